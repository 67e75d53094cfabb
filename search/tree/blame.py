"""The part of a request without which there would be a plan, where the whole request leaves none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import isfinite

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.exact.solving import over_time
from shardwright.search.request.asked import Bound, LayoutPin, parse
from shardwright.search.request.options import SearchOptions
from shardwright.search.request.pins import Pins
from shardwright.search.request.restrict import TENSOR
from shardwright.search.tree.ways import Ways, folded


def blamed(error: NoLayoutsError, graph: Graph, options: SearchOptions, ways: Ways) -> PlanError:
    """Return the same error, with the request and, if it has several parts, those whose omission would give a plan."""
    things = list(options)
    if not things:
        return error
    lines = [str(error), f"asked for: {options}", *_in_use(options)]
    if len(things) > 1:
        omitted = "; ".join(words for words, rest in things if any(_has_layouts(graph, rest, ways)))
        lines.append(
            f"without one of these there is a plan: {omitted}" if omitted else "leave out more than one of them"
        )
    return NoLayoutsError("\n".join(lines))


def _in_use(options: SearchOptions) -> Iterator[str]:
    """Yield what a pin of slices means, where no operator may be split so."""
    pins = [pin for text in options.pins for pin in parse(text)]
    if any(isinstance(pin, Bound) and (pin.what, pin.high) == (TENSOR, 1) for pin in pins):
        for pin in pins:
            if isinstance(pin, LayoutPin) and pin.kept == "sharded":
                yield (
                    f"{pin.text!r} means used in slices, which splits operators as 'no tensor' forbids; "
                    f"for slices that are put together for use say '{pin.pattern}=gathered'"
                )


def _has_layouts(graph: Graph, options: SearchOptions, ways: Ways) -> Iterator[bool]:
    """Yield, for every space of the request, whether it has layouts in the fewest microbatches, with any memory."""
    solver = ways.solver
    try:
        pins = Pins.of(graph, solver.cluster, options)
    except PlanError:
        return
    same, execution = folded(graph, pins), ways.execution
    for space in (*pins.spaces, *chain.from_iterable(pins.staged.values())):
        mesh = over_time(space.mesh, pins.microbatches or 1)
        try:
            problem, eliminator = solver.problem(same, mesh, space.roles, execution, space.zeros[-1], space.limits)
        except NoLayoutsError:
            continue
        yield isfinite(eliminator.solve(problem).objective)
