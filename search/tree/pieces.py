"""The number of pieces in which the moves of a plan run beside its products (`pcg.step.pairs`)."""

from __future__ import annotations

from dataclasses import replace

from shardwright.search.exact.solving import Candidate, Solver


def in_pieces(solver: Solver, found: Candidate, num_pieces: int | None) -> Candidate:
    """Return a plan of the whole graph with its moves in so many pieces; None: whole."""
    if num_pieces in (None, found.execution.pieces):
        return found
    execution = replace(found.execution, pieces=num_pieces)
    prediction = solver.predicted(found.graph, execution, {})
    return replace(found, execution=execution, prediction=prediction, fits=solver.fits(prediction))
