"""Units in a row, spread over chunks that are as equal as can be."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.pcg.errors import PlanError

_PRECISION = 1e-3


def balanced(seconds: Sequence[float], num_chunks: int) -> list[int]:
    """How many units each chunk takes such that the slowest chunk is as fast as possible (bisection over its time).

    Raises:
        PlanError: fewer units than chunks.
    """
    if len(seconds) < num_chunks:
        problem = f"{num_chunks} virtual stages, but the model has only {len(seconds)} sections to put on them"
        raise PlanError(f"{problem}; choose fewer stages or chunks, or name the model's blocks in `repeats`")
    low, high = max(seconds), sum(seconds)
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if len(_filled(seconds, middle, num_chunks)) <= num_chunks:
            high = middle
        else:
            low = middle
    return _filled(seconds, high, num_chunks)


def _filled(seconds: Sequence[float], most_s: float, num_chunks: int) -> list[int]:
    """Chunks filled one after the other up to `most_s`, leaving at least one unit for each that follows."""
    sizes, total = [0], 0.0
    for number, unit_s in enumerate(seconds):
        left = len(seconds) - number
        full = total + unit_s > most_s * (1 + 1e-9) or left <= num_chunks - len(sizes)
        if sizes[-1] and full:
            sizes.append(0)
            total = 0.0
        sizes[-1] += 1
        total += unit_s
    return sizes
