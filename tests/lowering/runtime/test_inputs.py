"""What ranks pass to a step is compared: a batch of each rank's own, as under DDP, is an error on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.lowering.module import ParallelModule, lower
from shardwright.lowering.ranks.agreement import digest, digests
from shardwright.lowering.runtime.inputs import NUM_FIRST
from shardwright.pcg.errors import BatchError, ShardwrightError
from tests.lowering.runs import Case
from tests.lowering.test_microbatches import planned
from tests.lowering.test_training import DATA, GRID, MEGATRON, TWO, Net, both

Batch = dict[str, Tensor]


@pytest.fixture(scope="module")
def net() -> Case:
    torch.manual_seed(0)
    return Case(Net().double(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})


def own_batch(seed: int, rows: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randint(20, (rows, 12), generator=generator) for key in ("ids", "labels")}


def refused(parallel: ParallelModule, batch: Batch) -> str:
    with pytest.raises(BatchError) as caught:
        parallel.forward_backward(**batch)
    assert all(p.grad is None for p in parallel.parameters())
    return str(caught.value)


def test_a_batch_of_each_ranks_own_is_refused_by_all(net: Case) -> None:
    """Under a whole plan it would train two models, under a data plan half of each batch would be dropped."""

    def body(parallel: ParallelModule) -> str:
        return refused(parallel, own_batch(dist.get_rank()))

    whole, again = net.on_ranks(net.graph(TWO, {}), body)
    assert whole == again
    assert whole.startswith("batch: 'ids' in step 1 differs between ranks 0 and 1: a tensor of shape [8, 12] is the")
    assert "keeps whole on every rank; pass the same on every rank" in whole
    assert "compile with all of them as one batch" in whole
    data, _ = net.on_ranks(net.graph(TWO, DATA, data_axes=(0,)), body)
    assert "of which every rank takes its part [4, 12] (dp: S(0)); pass the same" in data
    assert "or pass each rank's own part alone" in data


def test_every_way_to_run_a_step_compares(net: Case) -> None:
    """`parallel(...)`, microbatches, compiled programs; one row in another place is enough."""

    def body(parallel: ParallelModule) -> None:
        rows = torch.arange(8) if dist.get_rank() == 0 else torch.tensor([0, 1, 2, 3, 4, 5, 7, 6])
        batch = {"ids": net.batch["ids"], "labels": net.batch["labels"][rows]}
        with pytest.raises(BatchError, match="'labels' in step 1 differs between ranks 0 and 1"):
            parallel(**batch)
        with torch.no_grad(), pytest.raises(BatchError, match="'labels' in step 2"):
            parallel(**batch)
        parallel.compile(backend="eager")
        with pytest.raises(BatchError, match="'labels' in step 3"):
            parallel.forward_backward(**batch)

    net.on_ranks(net.graph(TWO, {}), body)


class Nested(nn.Module):
    """A batch with words, numbers and nothing in it, at the top and inside of what holds tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any, how: Any = None) -> Tensor:
        return self.layer(x["pixels"]).square().mean() * x["scale"] * how["times"]


def test_what_is_no_tensor_may_be_passed_again_or_left_out() -> None:
    x = torch.randn(4, 4)
    batch: dict[str, Any] = {"x": {"pixels": x, "scale": 2, "mask": None}, "how": {"times": 3, "name": "a"}}
    found = Case(Nested(), batch)

    def body(parallel: ParallelModule) -> None:
        loss = parallel.forward_backward(**found.batch)
        assert parallel.forward_backward(x={"pixels": x}) == loss
        with pytest.raises(BatchError, match=r"'how.times' is 4, but 3 was captured and is part of the program"):
            parallel.forward_backward(x=batch["x"], how={"times": 4})
        with pytest.raises(BatchError, match=r"'x.mask' is 1, but None was captured"):
            parallel.forward_backward(x={"pixels": x, "mask": 1})

    found.on_ranks(found.graph(TWO, {}), body)


def test_gradients_of_the_batch_are_refused() -> None:
    """Each rank would get that of its own part, or none."""
    found = Case(Regression(), {"labels": torch.randn(8, 4)})

    def body(parallel: ParallelModule) -> None:
        batch = {"labels": found.batch["labels"].clone().requires_grad_()}
        with pytest.raises(BatchError, match="'labels' requires a gradient, and a plan has gradients of parameters"):
            parallel.forward_backward(**batch)
        with torch.no_grad():
            parallel(**batch)

    found.on_ranks(found.graph(TWO, {}), body)


class Regression(nn.Module):
    """A linear layer, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, labels: Tensor) -> Tensor:
        return (F.dropout(self.up(labels), 0.5, self.training) - labels).square().mean()


def test_microbatches_compare_the_whole_batch() -> None:
    found = Case(Regression(), {"labels": torch.randn(8, 4)})

    def body(parallel: ParallelModule) -> None:
        parallel.forward_backward(**found.batch)
        shards = found.batch["labels"].chunk(2)
        parallel.forward_backward(labels=shards[dist.get_rank()])
        with pytest.warns(UserWarning, match=r"same 'labels' \[4, 4\], .* their shards of \[8, 4\]"):
            parallel.forward_backward(labels=shards[0])
        parallel.zero_grad()
        with torch.no_grad():
            assert "'labels' in step 4 differs" in refused(
                parallel, {"labels": found.batch["labels"] + dist.get_rank()}
            )

    found.on_ranks(planned(found, ("data",), many=2), body)


def test_shards_of_a_ranks_own_are_compared_among_those_that_hold_the_same(net: Case) -> None:
    """On a mesh of data and tensor axes, ranks that differ along the tensor axis hold the same shard."""
    graph = net.graph(GRID, both(DATA, MEGATRON), data_axes=(0,))

    def body(parallel: ParallelModule) -> str:
        rank = dist.get_rank()
        parallel.forward_backward(**own_batch(rank // 2, 4))
        parallel.zero_grad()
        mixed = net.batch if rank == 0 else own_batch(rank // 2, 4)
        assert "rank 0 passed the global tensor, ranks 1, 2 and 3 a shard of it; pass the same" in refused(
            parallel, mixed
        )
        return refused(parallel, own_batch(rank, 4))

    for message in net.on_ranks(graph, body):
        assert message.startswith(
            "batch: 'ids' in step 3 differs between ranks 0 and 1: they hold the same shard [4, 12] of the global "
            "tensor [8, 12] (dp: S(0), tp: R)"
        )


def test_all_raise_where_one_cannot_take_its_batch(net: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        rank = dist.get_rank()
        message = refused(parallel, own_batch(0, 6 if rank == 1 else 8))
        shape = (
            "batch: 'ids' has shape [6, 12], expected the global shape [8, 12] on every rank, as this plan shards no"
        )
        assert message.startswith(shape if rank else "batch: rank 1 cannot take what was pa")
        parallel.forward_backward(**net.batch)

    net.on_ranks(net.graph(TWO, {}), body)


def test_when_it_is_compared(net: Case) -> None:
    """In the first steps; on request in all or none. Later steps send nothing for it."""
    graph = net.graph(TWO, {})
    quiet = Case(Net().double().eval(), net.batch)

    def steps(check: Any) -> list[bool]:
        parallel = lower(quiet.graph(TWO, {}), quiet.model, timeout_s=30, check_inputs=check)
        found = list[bool]()
        for step in range(NUM_FIRST + 2):
            try:
                parallel.forward_backward(**own_batch(dist.get_rank() if step >= NUM_FIRST - 1 else 0))
                found.append(False)
            except BatchError:
                found.append(True)
        return found

    def body(parallel: ParallelModule) -> None:
        assert steps("first") == [False, False, True, False, False]
        assert steps("always") == [False, False, True, True, True]
        assert steps("never") == [False] * 5
        with pytest.raises(ShardwrightError, match="check_inputs='often': expected one of 'first', 'always', 'never'"):
            steps("often")

    net.on_ranks(graph, body)


def test_steps_without_gradients_are_counted_by_themselves(net: Case) -> None:
    """As those that try out a validation before the training."""

    def body(parallel: ParallelModule) -> None:
        with torch.no_grad():
            for _ in range(NUM_FIRST):
                parallel(**net.batch)
            parallel(**own_batch(dist.get_rank()))
        assert "'ids' in step 5 differs between ranks 0 and 1" in refused(parallel, own_batch(dist.get_rank()))

    net.on_ranks(net.graph(TWO, {}), body)


def test_digests_tell_values_and_places_apart() -> None:
    x = torch.randn(6, 8)
    same = torch.cat([torch.zeros(3), x.flatten()])[3:].view(6, 8)  # not where 8 bytes begin
    assert digest(x) == digest(same) == digest(x.t().contiguous().t())
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex64):
        value = (x > 0).to(dtype)
        assert digest(value) == digest(value.clone())
        assert len({int(digest(v)) for v in (value, ~(x > 0), value.flip(0), value.flip(1))}) >= 3, dtype
    odd, nan = torch.arange(3.0), torch.tensor([1.0, float("nan"), 2.0])
    assert digest(odd) != digest(odd.flip(0))
    assert digest(nan) == digest(nan.clone())
    assert digest(torch.zeros(0)) == digest(torch.zeros(0, 3)) == 0
    spaced = torch.arange(16.0)[::2], torch.ones(1).expand(8), torch.arange(16.0).view(8, 2)[:, 1]
    assert [digest(v) for v in spaced] == [digest(v.clone()) for v in spaced]
    assert digest(torch.zeros(2)) != digest(torch.zeros(4))
    long = torch.arange((1 << 15) + 5)
    assert digest(long) != digest(torch.cat([long[:-2], long[-2:].flip(0)]))
    chunks = torch.randint(9, (2, 1 << 15))  # which are hashed one after the other
    assert digest(chunks) != digest(chunks.flip(0))
    assert digests([odd, long, chunks, nan]) == [digest(x) for x in (odd, long, chunks, nan)]
