"""The number of pieces in which the moves of a plan run beside its products (`pcg.step.pairs`).

Layouts are known, and were chosen for moves that run whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from shardwright.cost.timeline.clock import SHARING
from shardwright.search.effort import LITTLE
from shardwright.search.exact.solving import Candidate, Identity, Solver, rank

TRIED = (2, 4, 8)
"""The numbers that are tried, as long as more are faster. Each piece more saves less, and takes a launch more."""


def in_pieces(solver: Solver, candidate: Candidate, pieces: int | None) -> Candidate:
    """Return a plan of the whole graph with its moves in as many pieces as are asked for; None: as are fastest."""
    if pieces is not None:
        return run_with(solver, candidate, pieces=pieces)
    best = candidate
    for count in TRIED if _may_gain(solver, candidate) else ():
        cut = run_with(solver, candidate, pieces=count)
        if rank(cut) >= rank(best):
            break
        best = cut
    return best


def rivals_in_pieces(
    solver: Solver, best: Candidate, others: Iterable[Candidate], count: int | None
) -> Iterator[tuple[Identity, Candidate]]:
    """Yield other plans in pieces, with how they are run, that may be faster than the best one by what it hides."""
    for other in others:
        hidden = other.prediction
        if count != 1 and other.fits and not other.folded and hidden.step_s - hidden.exposed_s < best.prediction.step_s:
            yield other.identity, in_pieces(solver, other, count)


def _may_gain(solver: Solver, candidate: Candidate) -> bool:
    """Return whether compute waits for what may run beside it, and the two together are faster than in turn."""
    sharing, prediction = SHARING[solver.cluster.device.kind], candidate.prediction
    return sharing.compute + sharing.communication > 1 and prediction.exposed_s > LITTLE * prediction.step_s


def run_with(solver: Solver, candidate: Candidate, **changes: Any) -> Candidate:
    """Return a plan of the whole graph that is run with other fields of its execution."""
    execution = replace(candidate.execution, **changes)
    if execution == candidate.execution:
        return candidate
    prediction = solver.predicted(candidate.graph, execution, {})
    return replace(candidate, execution=execution, prediction=prediction, fits=solver.fits(prediction))
