"""Fits of lines, latency plus bytes over bandwidth, to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Fit:
    """The line time = latency_s + s_per_byte · bytes, with its errors as shares of the measured times."""

    latency_s: float
    s_per_byte: float
    median_error: float
    worst_error: float


def fit_line(num_bytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Return the line with the least sum of squared *relative* errors and no coefficient below zero.

    min Σ ((α + β·bytes)/t − 1)² over α, β ≥ 0: linear in α and β, convex, so where the free minimum has a coefficient
    below zero, the best lies on an edge.

    Raises:
        ValueError: fewer than two different sizes, or a time that is not positive.
    """
    size, time = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    if len(set(num_bytes)) < 2 or len(size) != len(time) or not (time > 0).all():
        raise ValueError(f"expected positive times at two or more sizes, got {seconds} at {num_bytes}")
    columns = np.stack([1 / time, size / time], axis=1)
    free = np.linalg.lstsq(columns, np.ones(len(time)), rcond=None)[0]
    edges = [np.array([columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), 0.0])]
    edges.append(np.array([0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()]))
    candidates = [free] if (free >= 0).all() else edges
    best = min(candidates, key=lambda line: float(((columns @ line - 1) ** 2).sum()))
    errors = np.abs(columns @ best - 1)
    return Fit(float(best[0]), float(best[1]), float(np.median(errors)), float(errors.max()))
