"""`torch.amp.GradScaler`: whatever one rank alone sees overflow, no rank steps, and all go on with one scale."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwright.api import certified_choices
from shardwright.lowering.launch import run_ranks
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.private import unwrap
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.meshes import num_devices
from shardwright.search.planner import Planner
from tests.each import each
from tests.lowering.pipelines import evenly, of_one_stage
from tests.lowering.rounding import case, solved
from tests.search.graphs import cluster

SCALE = 1024.0


def overflowing(
    graph: Graph, number: int, way: str, run: Execution = DEFAULT, overflows: int = -1
) -> list[tuple[bool, float]]:
    """On each rank: whether parameters have changed, and the scale, after a step in which one rank has an inf.

    `number`: in the gradient of which of the optimizer's parameters. `way`: how it is made and used. `overflows`: the
    rank, or the last one.
    """
    example, num_ranks = case("gpt"), num_devices(graph.mesh, run)

    def step(parallel: ParallelModule) -> tuple[bool, float]:
        owned = list(parallel.parameters())[:: -1 if way == "reversed" else 1]
        optimizer = torch.optim.AdamW(owned, lr=1.0, fused=way == "fused")
        parallel.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        parallel.forward_backward(**example.batch)
        parameters = [unwrap(p) for p in owned]
        before = [p.clone() for p in parameters]
        if number >= 0 and dist.get_rank() == overflows % num_ranks:
            gradient = owned[number].grad
            assert gradient is not None
            unwrap(gradient).view(-1)[-1] = float("inf")
        if way == "unscaled first":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return any(not torch.equal(*pair) for pair in zip(parameters, before, strict=True)), scaler.get_scale()

    return run_ranks(lambda: step(example.lower(graph, run)), num_ranks, 60)


@each("role, number, way", [
    ("data", 0, "plain"),  # all gradients are replicated
    ("data", 5, "unscaled first"),
    ("data", 3, "fused"),
    ("tensor", 5, "reversed"),  # a shard, where the first gradient is replicated
    ("zero", 0, "plain"),
])  # fmt: skip
def test_no_rank_steps_where_one_has_an_overflow(role: str, number: int, way: str) -> None:
    graph = solved("gpt", role)
    assert overflowing(graph, number, way) == [(False, SCALE / 2)] * 2


def test_without_an_overflow_all_step() -> None:
    for way in ("plain", "fused"):
        assert overflowing(solved("gpt", "data"), -1, way) == [(True, SCALE)] * 2


def test_on_a_mesh_of_two_axes() -> None:
    """Of four ranks, the last one's neighbours on both axes learn it, and the one that is neither."""
    planner = Planner(cluster(4), certified_choices())
    graph = planner.solve(case("gpt").captured.graph, Mesh.of(dp=2, tp=2), ("data", "tensor"), "").graph
    assert overflowing(graph, 2, "plain") == [(False, SCALE / 2)] * 4


def test_in_pipeline_stages() -> None:
    """Of two stages of two ranks, the other stage learns it too, also the rank that is at another place of its mesh."""
    graph = of_one_stage(case("gpt"), ("data",), 2)
    run = evenly(graph, 2)
    for overflows in (0, 3):
        assert overflowing(graph, 1, "plain", run, overflows) == [(False, SCALE / 2)] * 4
    assert overflowing(graph, -1, "plain", run) == [(True, SCALE)] * 4
    for overflows in (0, 1, 2):
        assert overflowing(graph, 1, "plain", evenly(graph, 2, sizes=(2, 1)), overflows) == [(False, SCALE / 2)] * 3
