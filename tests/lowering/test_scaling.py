"""`torch.amp.GradScaler`: whatever one rank alone sees overflow, no rank steps, and all go on with one scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from shardwright.lowering.private import unwrap
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.meshes import num_devices
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.lowering.pipelines import evenly, of_one_stage
from tests.lowering.rounding import case, solved
from tests.lowering.runs import Case, run_all
from tests.search.graphs import cluster

SCALE = 1024.0


@dataclass(frozen=True)
class Overflow:
    """In the gradient of which of the optimizer's parameters, on which rank; how that optimizer is made and used."""

    graph: Graph
    number: int
    way: str = "plain"
    run: Execution = DEFAULT
    rank: int = -1

    @property
    def num_ranks(self) -> int:
        return num_devices(self.graph.mesh, self.run)


def overflowing(*overflows: Overflow) -> list[list[tuple[bool, float]]]:
    """On each rank: whether parameters have changed, and the scale, after a step in which one rank has an inf."""
    example = case("gpt")  # captured once, and not by every rank
    return run_all([(one.num_ranks, partial(step, example, one)) for one in overflows])


def step(example: Case, one: Overflow) -> tuple[bool, float]:
    parallel = example.lower(one.graph, one.run)
    owned = list(parallel.parameters())[:: -1 if one.way == "reversed" else 1]
    optimizer = torch.optim.AdamW(owned, lr=1.0, fused=one.way == "fused")
    parallel.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    parallel.forward_backward(**example.batch)
    parameters = [unwrap(p) for p in owned]
    before = [p.clone() for p in parameters]
    if one.number >= 0 and dist.get_rank() == one.rank % one.num_ranks:
        gradient = owned[one.number].grad
        assert gradient is not None
        unwrap(gradient).view(-1)[-1] = float("inf")
    if one.way == "unscaled first":
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return any(not torch.equal(*pair) for pair in zip(parameters, before, strict=True)), scaler.get_scale()


def test_no_rank_steps_where_one_has_an_overflow() -> None:
    data, tensor, zero = (solved("gpt", role) for role in ("data", "tensor", "zero"))
    cases = [
        Overflow(data, 0),  # all gradients are replicated
        Overflow(data, 5, "unscaled first"),
        Overflow(data, 3, "fused"),
        Overflow(tensor, 5, "reversed"),  # a shard, where the first gradient is replicated
        Overflow(zero, 0),
    ]
    assert overflowing(*cases) == [[(False, SCALE / 2)] * 2] * len(cases)


def test_without_an_overflow_all_step() -> None:
    data = solved("gpt", "data")
    assert overflowing(Overflow(data, -1), Overflow(data, -1, "fused")) == [[(True, SCALE)] * 2] * 2


def test_on_a_mesh_of_two_axes() -> None:
    """Of four ranks, the last one's neighbours on both axes learn it, and the one that is neither."""
    planner = Planner(cluster(4), certified_choices())
    graph = planner.solve(case("gpt").captured.graph, Mesh.of(dp=2, tp=2), ("data", "tensor"), "").graph
    assert overflowing(Overflow(graph, 2)) == [[(False, SCALE / 2)] * 4]


def test_in_pipeline_stages() -> None:
    """Of two stages of two ranks, the other stage learns it too, also the rank that is at another place of its mesh."""
    graph = of_one_stage(case("gpt"), ("data",), 2)
    two, unlike = evenly(graph, 2), evenly(graph, 2, sizes=(2, 1))
    found = overflowing(
        *(Overflow(graph, 1, run=two, rank=rank) for rank in (0, 3)),
        Overflow(graph, -1, run=two),
        *(Overflow(graph, 1, run=unlike, rank=rank) for rank in (0, 1, 2)),
    )
    assert found[:2] == [[(False, SCALE / 2)] * 4] * 2
    assert found[2] == [(True, SCALE)] * 4
    assert found[3:] == [[(False, SCALE / 2)] * 3] * 3
