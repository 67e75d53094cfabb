"""One compiled model for many batches: other sizes and modes get programs of their own over the same parameters."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shardwright as sw
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.random.exact import seed_exactly
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import BatchError, DistributedError, PlanError, ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import S
from shardwright.search.plan import Plan
from shardwright.search.tree import reshaped as reshaping
from tests.each import some

VOCAB, WIDTH = 32, 16
Batch = dict[str, Tensor]
Cut = Callable[[str, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """With dropout, statistics of the batch, and an option that changes the result."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.seen = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, ids: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        x = self.seen(x.transpose(1, 2)).transpose(1, 2)
        return scale * cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Call(NamedTuple):
    """A step with an update in train mode; a loss without gradients in eval mode."""

    rows: int
    length: int
    training: bool = True


CALLS = (Call(8, 6), Call(3, 6), Call(8, 10), Call(8, 6, False), Call(4, 6), Call(3, 6, False), Call(8, 6), Call(16, 6))
"""A smaller last batch that no two ranks share evenly, longer sequences, evaluation, a larger batch."""


def batch_of(rows: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(100 * rows + length)
    return {name: torch.randint(VOCAB, (rows, length), generator=generator) for name in ("ids", "labels")}


def model_of(*, norm: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(norm).double()


class Trained(NamedTuple):
    losses: list[float]
    state: Mapping[str, Tensor]


def trained(model: nn.Module, calls: Sequence[Call], part: Cut = lambda name, x: x, **options: Any) -> Trained:
    """Of a model or its compiled form. `part`: what is passed of a tensor."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()
    for number, (rows, length, training) in enumerate(calls):
        model.train(training)
        batch = {name: part(name, x) for name, x in batch_of(rows, length).items()}
        with seed_exactly(number):
            if not training:
                with torch.inference_mode():
                    losses.append(model(**batch, **options).item())
                continue
            optimizer.zero_grad()
            if isinstance(model, ParallelModule):
                loss = model.forward_backward(**batch, **options)
            else:
                loss = model(**batch, **options)
                loss.backward()
            optimizer.step()
        losses.append(loss.item())
    state = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}
    return Trained(losses, {name: x.detach().clone() for name, x in state.items()})


def compiled(model: nn.Module, **options: Any) -> ParallelModule:
    batch = batch_of(CALLS[0].rows, CALLS[0].length)
    return sw.compile(model, sw.Cluster.local(2), kwargs=batch, timeout_s=60, **options)


def memory(parallel: ParallelModule) -> dict[str, tuple[int, int]]:
    """Which object each parameter is, and where its values lie."""
    return {name: (id(p), p.data_ptr()) for name, p in parallel.named_parameters()}


PLANS: dict[str, dict[str, Any]] = {
    "zero": {"mesh": {"x": 2}, "roles": "zero"},
    "microbatches": {"mesh": {"x": 2}, "roles": "data", "microbatches": 2, "recompute": "full"},
    "tensor": {"mesh": {"x": 2}, "roles": "tensor"},
    "stages": {"stages": 2, "mesh": {"x": 1}, "microbatches": 2},
}
AS_IT_IS = reshaping._as_it_is
NORMLESS = ("microbatches", "stages")
"""Statistics of the whole batch keep a model from being cut into microbatches."""


def with_rows_if_it_can(plan: Plan, graph: Graph) -> reshaping._Way:
    """Add rows wherever devices cannot share a batch; this model is so small that the search would not."""
    return reshaping._with_rows(plan, graph) or AS_IT_IS(plan, graph)


def calls_of(plan: str) -> list[Call]:
    return some(CALLS, len(CALLS) if plan == "zero" else 3)


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[Trained, bool]]]:
    """Of every rank, by plan: what is trained, and whether parameters stayed the same objects in the same memory."""

    def body() -> dict[str, tuple[Trained, bool]]:
        reshaping._as_it_is = with_rows_if_it_can
        results = dict[str, tuple[Trained, bool]]()
        for name, options in some(PLANS.items(), 2):
            model = model_of(norm=name not in NORMLESS)
            parallel = compiled(model, **options)
            before = memory(parallel)
            result = trained(parallel, calls_of(name))
            results[name] = result, memory(parallel) == before
        return results

    return run_ranks(body, 2, 280)


@pytest.mark.parametrize("plan", some(PLANS, 2))
def test_other_shapes_and_modes_are_as_in_one_process(found: list[dict[str, tuple[Trained, bool]]], plan: str) -> None:
    expected = trained(model_of(norm=plan not in NORMLESS), calls_of(plan))
    for by_plan in found:
        (losses, state), same = by_plan[plan]
        assert losses == pytest.approx(expected.losses, rel=1e-10)
        assert same
        for name, value in state.items():
            torch.testing.assert_close(value, expected.state[name], rtol=1e-7, atol=1e-10)


def test_a_program_is_made_once_and_options_stay() -> None:
    """Ranks may pass their shards, and leave out options; a program is made for each shape and mode, once."""
    calls = [Call(8, 6), Call(8, 10), Call(8, 6), Call(8, 10), Call(8, 10, False), Call(8, 10)]
    expected = trained(model_of(norm=False), calls, scale=2.0)

    def body() -> tuple[list[float], list[str]]:
        told, batch = list[str](), {**batch_of(8, 6), "scale": 2.0}
        model = model_of(norm=False)
        parallel = sw.compile(model, sw.Cluster.local(2), kwargs=batch, mesh={"x": 2}, roles="zero",
                              progress=told.append, timeout_s=60)  # fmt: skip
        told.clear()
        rank = torch.distributed.get_rank()
        assert parallel.input_layouts["ids"] == (S(0),)

        def own(name: str, x: Tensor) -> Tensor:
            return x[4 * rank : 4 * rank + 4] if parallel.input_layouts[name][0].is_shard else x

        losses = trained(parallel, calls, own).losses
        return losses, [text for text in told if text.startswith("capturing")]

    (first, told), (second, _) = run_ranks(body, 2, 120)
    assert first == second == pytest.approx(expected.losses, rel=1e-10)
    assert len(told) == 2  # a longer sequence, and it in eval mode


def refusals() -> dict[str, str]:
    """The words of each error, on every rank."""
    texts = dict[str, str]()

    def refused(what: str, kind: type[Exception], call: Any) -> None:
        with pytest.raises(kind) as error:
            call()
        texts[what] = str(error.value)

    model = model_of()
    parallel = compiled(model, mesh={"x": 2}, roles="data")
    ids, labels = batch_of(8, 10).values()
    refused("a dtype", BatchError, lambda: parallel(ids=ids.int(), labels=labels))
    refused("a name", BatchError, lambda: parallel(ids=ids, targets=labels))
    refused("dimensions", BatchError, lambda: parallel(ids=ids[0], labels=labels[0]))
    refused("a shape that the model refuses", ShardwrightError, lambda: parallel(ids=ids, labels=labels[:, :3]))
    rank = torch.distributed.get_rank()
    refused("unlike ranks", DistributedError, lambda: parallel(**batch_of(4 + rank, 7)))
    refused("unlike modes", DistributedError, lambda: parallel.train(rank == 0)(**batch_of(4, 7)))
    parallel.train()
    texts["after"] = f"{parallel(**batch_of(8, 6)).item():.12f}"
    del model
    gc.collect()
    refused("a model that is gone", ShardwrightError, lambda: parallel(**batch_of(8, 9)))
    return texts


def test_what_no_program_can_be_made_for_is_refused_on_every_rank() -> None:
    torch.manual_seed(0)
    words = {
        "a dtype": "'ids' has dtype torch.int32",
        "a name": "'labels' is missing",
        "dimensions": "has shape [10], expected",
        "a shape that the model refuses": "could not be captured",
        "unlike ranks": "batch: 'ids' is int64[5, 7] on rank 1 and int64[4, 7] on rank 0",
        "unlike modes": "the mode is eval on rank 1 and train on rank 0",
        "a model that is gone": "keep the model that was compiled",
    }
    results = run_ranks(refusals, 2, 120)
    for found in results:
        for what, text in words.items():
            assert text in found[what] or "rank 0 could not make the plan for this batch" in found[what], what
        assert found["after"] == results[0]["after"]


def test_a_model_without_a_batch_may_begin_in_eval_mode() -> None:
    expected = copy.deepcopy(model_of()).eval()(**batch_of(8, 6)).item()

    def body() -> list[float]:
        model = model_of()
        parallel = sw.compile(model, sw.Cluster.local(2), mesh={"x": 2}, roles="zero", timeout_s=60)
        with torch.no_grad():
            first = parallel.eval()(**batch_of(8, 6)).item()
        return [first, trained(parallel, [Call(8, 6)]).losses[0]]

    for first, after in run_ranks(body, 2, 60):
        assert first == pytest.approx(expected, rel=1e-10)
        assert after == pytest.approx(trained(model_of(), [Call(8, 6)]).losses[0], rel=1e-10)


class Stateful(nn.Module):
    """It counts its steps in Python, in train mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.step = nn.Linear(4, 4), 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if self.training:
            self.step += 1
        return self.inner(x).square().sum() * scale * (1 + self.step)


class Summed(nn.Module):
    """A loss that is a sum, a buffer with an odd name, and a batch norm that stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.result, self.norm = nn.Linear(4, 4), nn.Module(), nn.BatchNorm1d(4).eval()
        self.result.register_buffer("0", torch.zeros(4))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.norm(self.inner(x))
        dict(self.result.named_buffers())["0"].add_(y.detach().sum(0))
        return scale * y.square().sum()


def rows(number: int) -> Tensor:
    return torch.randn(number, 4, generator=torch.Generator().manual_seed(number), dtype=torch.double)


def edges() -> dict[str, Any]:
    """By what was tried: a loss, or the words of an error."""
    two, found = sw.Cluster.local(2), dict[str, Any]()
    torch.manual_seed(0)
    counting = Stateful().double()
    parallel = sw.compile(counting, two, kwargs={"x": rows(8)}, mesh={"x": 2}, roles="data", timeout_s=60)
    parallel.forward_backward(x=rows(8))
    with pytest.raises((PlanError, DistributedError)) as error:
        parallel.eval()(x=rows(8))
    found["state"] = str(error.value)
    torch.manual_seed(0)
    model = Summed().double()
    given = {"x": rows(8), "scale": 2.0}
    parallel = sw.compile(model, two, kwargs=given, mesh={"x": 2}, roles="data", timeout_s=60)
    rank = torch.distributed.get_rank()
    own = rows(8)[4 * rank :][:4]
    found["first"] = parallel(x=rows(8)).item()
    with pytest.raises(BatchError, match="captured"):
        parallel(x=rows(6), scale=3.0)
    found["after another option"] = parallel(x=rows(6), scale=2.0).item()
    found["no rows"] = parallel(x=rows(0), scale=2.0).item()
    parallel.eval()
    norm = parallel.train().get_submodule("norm")
    found["norm"] = [norm.training, norm.eval().training]
    again = Summed().double()
    again.load_state_dict(model.state_dict())
    by_shard = sw.compile(again, two, kwargs=given, mesh={"x": 2}, roles="data", timeout_s=60)
    for name, x in (("shard", own), ("global", rows(8)), ("shard again", own)):
        found[name] = by_shard(x=x).item()
    found["evaluated"] = by_shard.eval()(x=rows(8)).item()
    for scale in (2.0, 3.0, 2.0):
        found[f"evaluate {scale}"] = parallel.evaluate(x=rows(8), scale=scale).item()
    found["evaluate"] = parallel.evaluate(x=rows(8)).item()
    return found


def test_what_is_between_programs_is_told_or_right() -> None:
    """State, options, shards, modes of submodules, and names of buffers that look like those of results."""
    torch.manual_seed(0)
    model = Summed().double()
    whole, part = model(rows(8)).item(), model(rows(6)).item()
    for found in run_ranks(edges, 2, 120):
        assert "forward changes it in one mode or shape alone" in found.pop("state")
        assert found.pop("norm") == [False, False]
        assert found.pop("no rows") == 0.0
        assert found.pop("after another option") == pytest.approx(2 * part, rel=1e-10)
        assert found.pop("evaluate 3.0") == pytest.approx(3 * whole, rel=1e-10)
        assert len(found) == 7
        for name, loss in found.items():
            assert loss == pytest.approx(2 * whole, rel=1e-10), name


def test_recomputation_by_place_is_left_out_where_a_mode_has_no_such_place() -> None:
    expected = trained(model_of(norm=False), [Call(8, 6), Call(8, 6, False), Call(4, 6)])

    def body() -> list[float]:
        model = model_of(norm=False)
        parallel = compiled(model, mesh={"x": 2}, roles="data", recompute={"blocks.*": ["drop"]})
        return trained(parallel, [Call(8, 6), Call(8, 6, False), Call(4, 6)]).losses

    for losses in run_ranks(body, 2, 60):
        assert losses == pytest.approx(expected.losses, rel=1e-10)
