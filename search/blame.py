"""Where what is asked for leaves no plan: which one thing, left out, would give one."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.search.asked import Asked
from shardwright.search.pins import Pins
from shardwright.search.problem import NoLayoutsError
from shardwright.search.solving import over_time
from shardwright.search.tuning import Tuner, folded


def blamed(error: NoLayoutsError, graph: Graph, asked: Asked, tuner: Tuner) -> PlanError:
    """The same error, with what else is there to be done where several things were asked for."""
    if len(list(asked)) < 2:
        return error
    found = [words for words, rest in asked if any(_has_layouts(graph, rest, tuner))]
    advice = f"without one of these there is a plan: {'; '.join(found)}" if found else "leave out more than one of them"
    return NoLayoutsError(f"{error}\nasked for: {asked}\n{advice}")


def _has_layouts(graph: Graph, asked: Asked, tuner: Tuner) -> Iterator[bool]:
    """For every space that would be searched, whether it has layouts in the fewest microbatches, of whatever size."""
    solver = tuner.solver
    try:
        pins = Pins.of(graph, solver.cluster, asked)
    except PlanError:
        return
    same, execution = folded(graph, pins), tuner.execution
    for space in pins.spaces:
        mesh = over_time(space.mesh, pins.microbatches or 1)
        try:
            problem, eliminator = solver.problem(same, mesh, space.roles, execution, space.zeros[-1], space.limits)
        except NoLayoutsError:
            continue
        yield isfinite(eliminator.solve(problem).objective)
