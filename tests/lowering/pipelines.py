"""Plans with pipeline stages for tests, and their steps compared with one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.random.exact import seed_exactly
from shardwright.pcg.capture.capture import find_loss
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero, with_lifetimes
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.pipelining import ScheduleName
from shardwright.pcg.step.sections import sections, units
from shardwright.pcg.step.time import as_run
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.lowering.runs import Case, whole

SEED = 3
Outcome = tuple[Tensor, dict[str, Tensor | None]]
"""The loss, and every gradient."""


def of_one_stage(
    found: Case, roles: tuple[str, ...], many: int, zero: Zero = "zero-1", per_microbatch: tuple[str, ...] = ()
) -> Graph:
    """The plan on the mesh of a stage, two ranks along each axis, in so many microbatches."""
    sizes = dict.fromkeys("xyz"[: len(roles)], 2) or {"x": 1}
    planner = Planner(Cluster.local(2 ** len(roles)), certified_choices(), per_microbatch=per_microbatch)
    mesh = Mesh.of(**({"mb": many} if many > 1 else {}), **sizes)
    graph = planner.solve(found.captured.graph, mesh, roles or ("data",), "test").graph
    return with_lifetimes(graph, {leaf.name: zero for leaf in graph.leaves("parameter")})


def evenly(
    graph: Graph,
    stages: int,
    schedule: ScheduleName = "1f1b",
    chunks: int = 1,
    sizes: tuple[int, ...] = (),
    **options: Any,
) -> Execution:
    """An execution whose virtual stages have about equally many sections. `sizes`: `stage_sizes`."""
    many = len(units(sections(Operations(as_run(graph, Execution.of(**options))), {}, by_block=True)))
    parts = stages * chunks
    split = tuple(many // parts + (number < many % parts) for number in range(parts))
    return Execution.of(
        num_stages=stages, stage_sizes=sizes, chunks_per_stage=chunks, schedule=schedule, split=split, **options
    )


def in_one_process(found: Case) -> Outcome:
    model = copy.deepcopy(found.model)
    with seed_exactly(SEED):
        loss = find_loss(model(**found.batch))
        assert loss is not None
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else whole(p.grad) for name, p in module.named_parameters()}


def step(parallel: ParallelModule, batch: dict[str, Tensor]) -> Outcome:
    with seed_exactly(SEED):
        loss = parallel.forward_backward(**batch)
    return loss, gradients(parallel)


def in_stages(found: Case, plans: Sequence[tuple[Graph, Execution]]) -> list[list[Outcome]]:
    """Of each plan, on every rank."""
    return found.on_ranks_of(plans, lambda parallel: step(parallel, found.batch))


def worst_error(by_rank: list[Outcome], expected: Outcome) -> float:
    """The largest relative error of loss and gradients. Every parameter is on some rank."""
    loss, wanted = expected
    largest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    assert {name for _, found in by_rank for name in found} == wanted.keys()
    errors = [float((got - loss).abs() / loss.abs()) for got, _ in by_rank]
    for _, found in by_rank:
        for name, got in found.items():
            gradient = wanted[name]
            if gradient is None:
                assert got is None or not got.any(), name
                continue
            assert got is not None, name
            scale = max(float(gradient.abs().max()), 1e-3 * largest)
            errors.append(float((got - gradient).abs().max()) / scale)
    return max(torch.tensor(errors).nan_to_num(torch.inf).tolist())
