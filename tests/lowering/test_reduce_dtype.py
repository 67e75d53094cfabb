"""Gradients that are sent in another dtype than that of their parameters: what of them is rounded, and when.

All gradients here are whole numbers, which float32 adds without rounding, and which bfloat16 rounds if they are large.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import Execution, ReduceDtype
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.precisions import Precision
from shardwright.planning import certified_choices
from shardwright.search.exact.solving import Candidate
from shardwright.search.tree.planner import Planner
from tests.each import each
from tests.lowering.runs import Case, Step, parallel_step, peak_on_rank
from tests.lowering.trial.test_dryrun import report
from tests.search.graphs import cluster

NUM_MICROBATCHES = 2
REDUCED = Execution(reduce_dtype="bfloat16")


class Sums(nn.Module):
    """The gradient of every row of `weight` is the sum of the batch; one is large enough to be sent by itself."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 16, dtype=dtype))
        self.large = nn.Parameter(torch.ones(1 << 15, 16, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight).sum() + nn.functional.linear(x, self.large).sum()


@cache
def case(dtype: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(1)
    return Case(Sums(dtype), {"x": torch.randint(-1000, 1000, (16, 16)).to(dtype)})


def planned(found: Case, role: str, mesh: Mesh, zero: Zero = "zero-3") -> Graph:
    devices = [axis for axis in mesh.names if axis != TIME]
    roles = ("data",) * (len(devices) - 1) + (role,)
    planner = Planner(cluster(mesh.num_devices), certified_choices())
    graph = planner.solve(found.captured.graph, mesh, roles, "test").graph
    return with_lifetimes(graph, {leaf.name: zero for leaf in graph.leaves("parameter")})


def rounded(gradient: Tensor) -> Tensor:
    return gradient.bfloat16().float()


def total(gradients: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(gradients)).sum(0)


def summed(first: Tensor, second: Tensor) -> Tensor:
    """By two ranks, in 16 bits."""
    return rounded(rounded(first) + rounded(second))


def parts(count: int) -> list[Tensor]:
    """The gradient of a row by each part of the batch."""
    return [x.sum(0) for x in case().batch["x"].chunk(count)]


def taken(parallel: ParallelModule) -> Step:
    """One step, after one more, whose gradients are let go of."""
    parallel.forward_backward(**case().batch)
    parallel.zero_grad()
    return parallel_step(parallel, case().batch)


def gradients(graph: Graph, execution: Execution = REDUCED) -> list[Tensor]:
    """A row of each parameter's gradient: all rows and ranks are alike."""
    found = list[Tensor]()
    for step in case().on_ranks(graph, taken, execution):
        for gradient in step.gradients.values():
            assert gradient is not None
            assert gradient.dtype == torch.float32
            assert torch.equal(gradient, gradient[:1].expand_as(gradient))
            found.append(gradient[0])
    assert all(torch.equal(gradient, found[0]) for gradient in found)
    return found[:1]


def test_each_rank_rounds_once_what_it_sends() -> None:
    """And the sum is rounded; without a dtype, or in that of the parameters, nothing is."""
    first, second = parts(2)
    assert not torch.equal(first, rounded(first))
    graph = planned(case(), "data", Mesh.of(x=2))
    (found,) = gradients(graph)
    assert torch.equal(found, summed(first, second))
    for exact in (Execution(), Execution(reduce_dtype="float32")):
        assert torch.equal(gradients(graph, exact)[0], first + second)


def test_fsdp_sends_the_same() -> None:
    """Bit by bit; its gradient is that of the mean over ranks, half of ours."""

    def sharded() -> Tensor:
        model = copy.deepcopy(case().model)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        model(case().batch["x"].chunk(2)[dist.get_rank()]).backward()
        gradient = next(model.parameters()).grad
        assert isinstance(gradient, DTensor)
        return 2 * gradient.full_tensor()[0]

    (found,) = gradients(planned(case(), "zero", Mesh.of(x=2)))
    assert all(torch.equal(found, theirs) for theirs in run_ranks(sharded, 2, 60))


def test_microbatches_are_added_before_that() -> None:
    """Data parallel and ZeRO-1 round the sum of a rank's microbatches; other lifetimes scatter each by itself."""
    mesh, halves, quarters = Mesh.of(mb=NUM_MICROBATCHES, x=2), parts(2), parts(4)
    # a microbatch is half of the batch, and a rank's part half of that
    own = [quarters[rank] + quarters[rank + 2] for rank in (0, 1)]
    assert torch.equal(total(own), total(halves))
    (found,) = gradients(planned(case(), "data", mesh))
    assert torch.equal(found, summed(*own))
    for zero in ZEROS:
        (found,) = gradients(planned(case(), "zero", mesh, zero))
        first, second = quarters[:2], quarters[2:]
        each_time = [own] if zero == "zero-1" else [first, second]
        assert torch.equal(found, total(summed(*sent) for sent in each_time)), zero


def test_hybrid_sharding_rounds_once_for_each_sum() -> None:
    """Slices are summed inside a group, and then across groups."""
    a, b, c, d = parts(4)
    (found,) = gradients(planned(case(), "zero", Mesh.of(dp=2, x=2)))
    assert torch.equal(found, summed(summed(a, b), summed(c, d)))


def test_parameters_in_16_bits_are_summed_in_32() -> None:
    """Where they are added in 16 bits, the sum of four is another one, as every addition rounds."""
    found = case(torch.bfloat16)

    def sums(role: str, reduce_dtype: ReduceDtype | None) -> Tensor:
        graph, run = planned(found, role, Mesh.of(x=4)), Execution(reduce_dtype=reduce_dtype)
        return found.on_ranks(graph, lambda p: parallel_step(p, found.batch), run)[0].gradients["weight"][0]

    each_rank = [x.float().sum(0).bfloat16().float() for x in found.batch["x"].chunk(4)]
    expected = total(each_rank).bfloat16()
    for role in ("data", "zero"):
        assert torch.equal(sums(role, "float32"), expected)
    assert not torch.equal(sums("data", None), expected)


class Layers(nn.Module):
    """Enough of them that no single one decides where memory is at its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


@cache
def layers(precision: Precision | None) -> Case:
    torch.manual_seed(1)
    model, batch = Layers(), {"x": torch.randn(64, 512)}
    return Case(model, batch, capture(model, batch, precision=precision))


MESH = Mesh.of(mb=NUM_MICROBATCHES, x=2)


@each("precision, role, zero", [
    ("amp_bf16", "data", "zero-3"), *(("amp_bf16", "zero", zero) for zero in ZEROS),
    ("amp_fp16", "zero", "zero-3"),  # buffers of one size, but of two dtypes
])  # fmt: skip
def test_what_is_sent_is_predicted(precision: Precision, role: str, zero: Zero) -> None:
    """By a dry run: every collective with its bytes, and memory. Sums are half of what they were in float32."""
    graph = planned(layers(precision), role, MESH, zero)
    own, found = report(graph), report(graph, execution=REDUCED)
    assert own.findings == [], str(own)
    assert found.findings == [], str(found)
    less = own.plan.prediction.communication_bytes - found.plan.prediction.communication_bytes
    assert less > 0.15 * own.plan.prediction.communication_bytes
    one, other = Counter(own.run.messages), Counter(found.run.messages)
    before, after = one - other, other - one
    assert after == Counter({m._replace(num_bytes=m.num_bytes // 2): times for m, times in before.items()})


@pytest.mark.slow
def test_memory_is_what_ranks_measure() -> None:
    ways: list[tuple[str, Zero]] = [("data", "zero-3"), ("zero", "zero-1"), ("zero", "zero-3")]
    for role, zero in ways:
        found, graph = layers("amp_bf16"), planned(layers("amp_bf16"), role, MESH, zero)
        (measured, _) = run_ranks(lambda f=found, g=graph: peak_on_rank(f, g, REDUCED, steps=3), 2, 60)
        assert report(graph, execution=REDUCED).predicted_bytes == pytest.approx(measured, rel=0.1), (role, zero)


def test_the_search_counts_what_is_sent() -> None:
    """Half of the bytes, in the sum that it minimizes as in what it tells."""
    graph, found = layers(None).captured.graph, list[Candidate]()
    for reduce_dtype in (None, "bfloat16"):
        planner = Planner(cluster(2, link_bytes_per_s=1e7), certified_choices(), reduce_dtype=reduce_dtype)
        found.append(planner.solve(graph, Mesh.of(x=2), ("data",), "test"))
        assert found[-1].bound_s == pytest.approx(found[-1].prediction.serial_s, rel=1e-3)
    own, reduced = found
    assert reduced.execution == REDUCED
    assert reduced.prediction.communication_s < 0.55 * own.prediction.communication_s
