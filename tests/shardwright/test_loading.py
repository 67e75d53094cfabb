"""`Loader`: ranks read their own rows of the batches that one process would take, and go on where a run was saved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import shardwright as sw
from shardwright import loading
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime.host import ThreadLink
from shardwright.pcg.errors import BatchError

ROWS, EXAMPLES = 4, 22
PLANS: dict[str, dict[str, Any]] = {
    "data": {"mesh": {"x": 2}, "roles": "zero"},
    "data in microbatches": {"mesh": {"x": 2}, "roles": "zero", "microbatches": 2},
    "tensor": {"mesh": {"x": 2}, "roles": "tensor"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.inner(x) - y).square().mean()


class Summed(Net):
    """A loss in which rows that are taken twice count twice."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.inner(x) - y).square().sum()


class Examples(Dataset[dict[str, Tensor]]):
    """It counts what is read."""

    def __init__(self) -> None:
        self.read = list[int]()

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        self.read.append(number)
        return example(number)


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, size: int = EXAMPLES) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(example, range(self.size))


def example(number: int) -> dict[str, Tensor]:
    return {"x": torch.full((4,), float(number)), "y": torch.full((4,), -float(number))}


def batch_of(numbers: list[int]) -> dict[str, Tensor]:
    examples = [example(number) for number in numbers]
    return {name: torch.stack([one[name] for one in examples]) for name in ("x", "y")}


def compiled(name: str, model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    words: dict[str, Any] = {"timeout_s": 60, "check_capture": "never", **PLANS[name]}
    return sw.compile(model or Net(), sw.Cluster.local(2), kwargs=batch_of(list(range(ROWS))), **words)


def orders(epochs: int, *, shuffle: bool) -> list[list[int]]:
    """The batches of one process."""
    found = list[list[int]]()
    for epoch in range(epochs):
        own = int.from_bytes(hashlib.sha256(f"(7, {epoch})".encode()).digest()[:8], "little") >> 1
        seeded = torch.Generator().manual_seed(own)
        order = torch.randperm(EXAMPLES, generator=seeded) if shuffle else torch.arange(EXAMPLES)
        found += order[: EXAMPLES // ROWS * ROWS].view(-1, ROWS).tolist()
    return found


@pytest.mark.parametrize("is_stream", [False, True])
def test_losses_are_those_of_one_process(is_stream: bool) -> None:
    def body() -> list[tuple[list[float], list[int]]]:
        found = list[tuple[list[float], list[int]]]()
        for name in PLANS:
            parallel, data = compiled(name), Stream() if is_stream else Examples()
            before = torch.get_rng_state()
            next(iter(sw.Loader(parallel, Examples())))
            assert torch.equal(torch.get_rng_state(), before)  # a resumed run starts to read once more
            loader = sw.Loader(parallel, data, seed=7)
            losses = [float(parallel.forward_backward(**batch)) for _ in range(2) for batch in loader]
            assert (loader.epoch, loader.batch) == (2, 0)
            found.append((losses, data.read if isinstance(data, Examples) else []))
        return found

    torch.manual_seed(0)
    model, numbers = Net(), orders(2, shuffle=not is_stream)
    expected = [model(**batch_of(own)).item() for own in numbers]
    by_rank = run_ranks(body, 2, 60)
    for number, name in enumerate(PLANS):
        for rank in range(2):
            torch.testing.assert_close(by_rank[rank][number][0], expected, rtol=1e-6, atol=0)
        read = [set(by_rank[rank][number][1]) for rank in range(2)]
        if not is_stream and name != "tensor":  # in an epoch each example is read by one rank
            halves = [by_rank[rank][number][1] for rank in range(2)]
            assert [len(half) for half in halves] == [len(numbers) * ROWS // 2] * 2
            assert sorted(halves[0] + halves[1]) == sorted(n for own in numbers for n in own)
        elif not is_stream:
            assert read[0] == read[1]


def test_it_goes_on_behind_what_was_taken() -> None:
    """Whatever workers have read ahead, and on another number of ranks."""

    def first() -> tuple[dict[str, int], list[list[float]]]:
        loader = sw.Loader(compiled("data"), Examples(), seed=7, num_workers=1, prefetch_factor=4)
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        return loader.state_dict(), [batch["x"][:, 0].tolist() for batch in batches]

    def second(state: dict[str, int], is_stream: bool) -> list[list[float]]:
        model = Net()
        parallel = sw.compile(model, sw.Cluster.local(1), kwargs=batch_of(list(range(ROWS))), timeout_s=60)
        loader = sw.Loader(parallel, Stream() if is_stream else Examples(), seed=7)
        loader.load_state_dict({**state, **({"shuffle": 0, "examples": -1} if is_stream else {})})
        found = [batch["x"][:, 0].tolist() for batch in loader]
        assert (loader.epoch, loader.batch) == (1, 0)
        return found

    by_rank = run_ranks(first, 2, 60)
    state = by_rank[0][0]
    assert state == by_rank[1][0] == {
        "epoch": 0, "batch": 2, "seed": 7, "size": ROWS, "shuffle": 1, "examples": EXAMPLES,
    }  # fmt: skip
    expected = orders(1, shuffle=True)[2:]
    (whole,) = run_ranks(second, 1, 60, args=(state, False))
    assert whole == expected
    assert [a + b for a, b in zip(by_rank[0][1], by_rank[1][1], strict=True)] == expected
    (stream,) = run_ranks(second, 1, 60, args=(state, True))
    assert stream == orders(1, shuffle=False)[2:]


def test_batches_are_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a link that is simulated: the same batches, and a place in the data that counts what was handed out."""
    sent = list[float]()

    class Noted(ThreadLink):
        def copy(self, target: Tensor, source: Tensor) -> Any:
            sent.append(float(source.flatten()[0]))
            return super().copy(target, source)

    def body(num_workers: int) -> tuple[list[list[float]], list[tuple[int, int]], int]:
        sent.clear()
        loader = sw.Loader(compiled("data"), Examples(), seed=7, num_workers=num_workers)
        given, places = list[list[float]](), list[tuple[int, int]]()
        for number, batch in enumerate(loader):
            given.append(batch["x"][:, 0].tolist())
            places.append((loader.state_dict()["batch"], len(sent) // 2))  # x and y
            if number == 3:
                break
        return given, places, len(sent)

    monkeypatch.setattr(loading, "link_to", lambda device: Noted(60))
    monkeypatch.setattr(ThreadLink, "bytes_per_s", 2e3)  # 16 ms for a shard
    by_rank = run_ranks(body, 2, 60, args=(1,))
    expected = orders(1, shuffle=True)[:4]
    assert [a + b for a, b in zip(by_rank[0][0], by_rank[1][0], strict=True)] == expected
    assert by_rank[0][1] == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert [found[2] for found in run_ranks(body, 2, 60, args=(0,))] == [0, 0]


def test_a_rest_is_a_batch_where_it_is_asked_for() -> None:
    """Also one that is no more than a shard; never one as large as a shard, for which it would be taken."""

    def body() -> tuple[list[list[float]], list[str]]:
        found, texts, model = list[list[float]](), list[str](), Summed()
        model.load_state_dict(start)
        parallel = compiled("data", model)
        sets: list[Any] = [[example(number) for number in range(21)], Stream(21), Stream(19), Stream(3)]
        for data in sets:
            loader = sw.Loader(parallel, data, shuffle=False, drop_last=False)
            found.append([float(parallel.forward_backward(**batch)) for _ in range(2) for batch in loader])
            assert loader.epoch == 2
        few: Any = [example(0)] * 3
        assert len(sw.Loader(parallel, few, drop_last=False)) == 1
        clashing: list[Any] = [[example(0)] * 22, Stream(22)]
        for data in clashing:
            with pytest.raises(BatchError) as error:
                list(sw.Loader(parallel, data, drop_last=False))
            texts.append(str(error.value))
        return found, texts

    model = Summed()
    start = model.state_dict()
    for found, texts in run_ranks(body, 2, 60):
        for size, losses in zip((21, 21, 19, 3), found, strict=True):
            batches = [list(range(n, min(size, n + ROWS))) for n in range(0, size, ROWS)]
            expected = [model(**batch_of(own)).item() for own in batches]
            torch.testing.assert_close(losses, expected * 2, rtol=1e-5, atol=0)
        for text in texts:
            assert "2 examples are left for the last batch, as many as a rank's part of a batch of 4" in text


def test_what_does_not_fit_is_refused() -> None:
    def body() -> list[str]:
        parallel, texts = compiled("data"), list[str]()

        def refused(dataset: Any, model: Any = parallel, **options: Any) -> None:
            with pytest.raises(BatchError) as error:
                sw.Loader(model, dataset, **options)
            texts.append(str(error.value))

        refused([example(0)] * 3)
        refused(Examples(), batch_size=2)
        refused(Stream(), num_workers=2)
        refused(Examples(), sw.compile(Net(), sw.Cluster.local(2), timeout_s=60))
        loader = sw.Loader(parallel, Examples(), seed=7)
        for state in ({"size": 8}, {"seed": 1}, {"shuffle": 0}, {"examples": 23}):
            with pytest.raises(BatchError) as error:
                loader.load_state_dict({**loader.state_dict(), **state})
            texts.append(str(error.value))
        return texts

    for texts in run_ranks(body, 2, 60):
        assert "the data set has 3 examples, less than a batch of 4" in texts[0]
        assert "batch_size= is the plan's" in texts[1]
        assert "use num_workers=1" in texts[2]
        assert "compiled without a batch" in texts[3]
        assert "saved with size 8, and here it is 4" in texts[4]
        assert "saved with seed 1, and here it is 7" in texts[5]
        assert "saved with shuffle 0, and here it is 1" in texts[6]
        assert "saved with examples 23, and here it is 22" in texts[7]
