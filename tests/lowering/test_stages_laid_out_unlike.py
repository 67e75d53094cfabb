"""Stages whose layouts differ: an axis splits the batch in one, weights in the next. Steps are those of one process."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.choice import Choice
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layout
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.stages import cut
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.parameters import module_block
from shardwright.pcg.step.pipelining import ScheduleName
from shardwright.pcg.step.time import as_run
from shardwright.planning import certified_choices
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.exact.eliminate import Eliminator
from shardwright.search.exact.materialize import materialize
from shardwright.search.exact.solving import restriction
from tests.each import RANDOM_CASES, at_random, some
from tests.lowering.pipelines import evenly, in_one_process, in_stages, worst_error
from tests.lowering.runs import Case, doubled
from tests.lowering.test_microbatches import case

Roles = tuple[str, ...]
Cell = tuple[Roles, Roles, ScheduleName, int, tuple[int, ...], int, Zero]
CELLS: list[Cell] = [
    (("tensor",), ("data",), "1f1b", 1, (), 2, "kept"), (("data",), ("tensor",), "zero-bubble", 1, (), 4, "kept"),
    (("zero",), ("tensor",), "1f1b", 1, (), 2, "zero-3"), (("tensor",), ("zero",), "gpipe", 1, (), 2, "zero-1"),
    (("data",), ("tensor",), "eager-1f1b", 1, (2, 1), 2, "kept"),
    (("tensor",), ("data",), "1f1b", 1, (1, 2), 4, "kept"),
    (("context",), ("tensor",), "1f1b", 1, (), 2, "kept"), (("tensor",), ("data",), "interleaved", 2, (), 2, "kept"),
    (("data", "tensor"), ("tensor", "data"), "1f1b", 1, (), 2, "kept"),
]  # fmt: skip
"""Roles of the axes in the first blocks and in the last, schedule, chunks, sizes of stages, microbatches, lifetime."""


def laid_out_unlike(found: Case, first: Roles, last: Roles, many: int, zero: Zero) -> Graph:
    """The plan whose axes have some roles in the first half of the blocks, and others behind it."""
    serial, mesh = found.captured.graph, Mesh.of(mb=many, **dict.fromkeys("xy"[: len(first)], 2))
    builder = ProblemBuilder(Cluster.local(mesh.num_devices), mesh, certified_choices())
    of_first, of_last = (restriction(serial, roles, mesh) for roles in (first, last))
    assert of_first is not None
    assert of_last is not None
    behind = behind_half(serial)

    def restrict(node: Node, axis: int, choice: Choice | Layout) -> bool:
        return (of_last if node.name in behind else of_first)(node, axis, choice)

    problem = builder.build(serial, restrict)
    graph = materialize(problem, Eliminator(builder.interner).solve(problem), certified_choices())
    return with_lifetimes(graph, {leaf.name: zero for leaf in graph.leaves("parameter")})


def behind_half(graph: Graph) -> set[str]:
    """The operators behind the middle block, and the parameters that they alone read."""
    operators = [node for node in graph.nodes if not node.is_leaf]
    blocks = list(dict.fromkeys(filter(None, (module_block(f"{node.source.module}.") for node in operators))))
    middle = next(i for i, n in enumerate(operators) if module_block(f"{n.source.module}.") == blocks[len(blocks) // 2])
    behind = {node.name for node in operators[middle:]}
    return behind | {leaf.name for leaf in graph.leaves("parameter") if behind.issuperset(graph.users[leaf.name])}


def uses(graph: Graph, execution: Execution, axis: int) -> Mapping[int, set[str]]:
    """By stage, the choices of its products along an axis."""
    where, found = cut(as_run(graph, execution), execution).where, dict[int, set[str]]()
    for node in graph.nodes:
        if node.op == "linear" and node.name in where:
            stage = where[node.name] % execution.schedule.num_stages
            found.setdefault(stage, set()).add(str(node.split[axis]))
    return found


@pytest.mark.parametrize(
    ("name", "cells"), [("gpt", some(CELLS, 5)), ("llama", some(CELLS[::-1], 2))], ids=["gpt", "llama"]
)
def test_steps_are_those_of_one_process(name: str, cells: Sequence[Cell]) -> None:
    """Dropout on. The two stages split their products otherwise. Llama's norms are computed in fp32."""
    assert_as_one_process(name, cells)


UNLIKE = [["tensor"], ["data", "zero"], ["context"]]
"""Roles by what they split."""
SCHEDULES: list[tuple[ScheduleName, int]] = [
    ("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("eager-1f1b", 1), ("interleaved", 2),
]  # fmt: skip


def drawn(rng: random.Random) -> Cell:
    first, last = ((rng.choice(roles),) for roles in rng.sample(UNLIKE, 2))
    (schedule, chunks), sizes = rng.choice(SCHEDULES), rng.choice([(), (), (2, 1), (1, 2)])
    unlike = sizes if chunks == 1 and schedule != "zero-bubble" else ()
    return first, last, schedule, chunks, unlike, rng.choice([2, 4]), rng.choice(ZEROS)


@at_random
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_random_steps_are_those_of_one_process(name: str) -> None:
    rng = random.Random(name)
    for _ in range(0, RANDOM_CASES // 2, 10):
        assert_as_one_process(name, [drawn(rng) for _ in range(10)])


def assert_as_one_process(name: str, cells: Sequence[Cell]) -> None:
    found = case(name) if name == "gpt" else doubled(name)
    expected, plans = in_one_process(found), list[tuple[Graph, Execution]]()
    for first, last, schedule, chunks, sizes, many, zero in cells:
        graph = laid_out_unlike(found, first, last, many, zero)
        plans.append((graph, evenly(graph, 2, schedule, chunks, sizes)))
        own = uses(*plans[-1], axis=1)
        assert chunks > 1 or own[0] != own[1], own
    for cell, by_rank in zip(cells, in_stages(found, plans), strict=True):
        assert worst_error(by_rank, expected) < (1e-11 if name == "gpt" else 1e-6), cell
