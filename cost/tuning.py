"""Measured collectives against the model: factors on latency and time per byte, per algorithm and protocol.

    t = λ · latency + σ · (t_model − latency)        λ = λ₀·λ_c, σ = σ₀·σ_c for the choice c

λ₀ and σ₀ belong to the machine, λ_c and σ_c to one choice. Every one of them is 1 unless measurements say otherwise:
the fit minimizes Σ (log t/t_model)² / NOISE² + Σ (log factor)² / TRUST², so two measurements move the machine's own
factors, and many move each choice's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOISE = 0.06
"""What a time is known to: two published tables of 8 H100 differ by this, at the median (`bench/collectives.py`)."""
TRUST = 0.1
"""What the model's own constants are good to (assumed)."""
STEP = 1e-4
ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Tuning:
    """Factors (choice, on latency, on time per byte); a choice without a row takes the row of "" or 1."""

    rows: tuple[tuple[str, float, float], ...] = ()

    def factors(self, choice: str) -> tuple[float, float]:
        """(λ, σ) of a choice."""
        by_name = {name: (latency, slope) for name, latency, slope in self.rows}
        return by_name.get(choice, by_name.get("", (1.0, 1.0)))


UNTUNED = Tuning()


def fit_tuning(names: Sequence[str], seconds: Sequence[float], predict: Callable[[Tuning], Sequence[float]]) -> Tuning:
    """The factors under which `predict` comes nearest to the measured `seconds`.

    Args:
        names: the choice that each measurement ran under, as the model says.
        seconds: what was measured, in the same order.
        predict: the model's seconds under a tuning, in the same order.

    Raises:
        ValueError: a time that is not positive, or a name too few or too many.
    """
    if len(names) != len(seconds) or not all(s > 0 for s in seconds):
        raise ValueError(f"expected a positive time for each of {len(names)} choices, got {list(seconds)}")
    if not names:
        return UNTUNED
    chosen, measured = sorted(set(names)), np.log(seconds)

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        errors = np.log(np.asarray(predict(_tuning(chosen, x)))) - measured
        return np.concatenate([errors / NOISE, x / TRUST])

    x = np.zeros(2 + 2 * len(chosen))
    for _ in range(ROUNDS):  # Gauss–Newton: the model is all but linear in the logarithms
        here = residuals(x)
        columns = [(residuals(x + STEP * unit) - here) / STEP for unit in np.eye(len(x))]
        step = np.linalg.lstsq(np.stack(columns, axis=1), -here, rcond=None)[0]
        x += step
        if float(np.abs(step).max()) < STEP:
            break
    return _tuning(chosen, x)


def _tuning(chosen: Sequence[str], x: NDArray[np.float64]) -> Tuning:
    """`x`: logarithms of (λ₀, σ₀), then (λ_c, σ_c) of each choice."""
    pairs = x.reshape(-1, 2)
    factors = np.exp(np.vstack([pairs[:1], pairs[0] + pairs[1:]])).tolist()
    return Tuning(tuple((name, latency, slope) for name, (latency, slope) in zip(["", *chosen], factors, strict=True)))
