"""Factors on NCCL's own figures from measured collectives: on latency, and on time per byte, by what the library runs.

    t = λ · latency + σ · (t_model − latency)        λ = λ₀·λ_c, σ = σ₀·σ_p

λ₀ and σ₀ belong to the machine, λ_c to a choice ("ring LL") and σ_p to a phase of it ("ring LL, opening"). Every one of
them is 1 unless measurements say otherwise: the fit minimizes Σ (log t/t_model)² / noise² + Σ (log factor)² / trust²,
so two measurements move the machine's own factors, and many move each choice's. How far the model's constants can be
trusted the measurements say too: `trust` is the value under which, with everything Gaussian, they are most likely, with
an exponential prior whose mean is the noise. Two rows cannot say that constants are far off: one may lie at a border
between choices, where the library's version decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOISE = 0.06
"""What a time is known to: two published tables of 8 H100 differ by this, at the median (`bench/collectives.py`)."""
TRUSTS = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
STEP = 1e-4
ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Tuning:
    """Factors by name; "" is the machine's, which counts where a name has none of its own.

    Attributes:
        latency: (choice, λ).
        slope: (phase, σ).
    """

    latency: tuple[tuple[str, float], ...] = ()
    slope: tuple[tuple[str, float], ...] = ()

    def factors(self, phase: str) -> tuple[float, float]:
        """(λ, σ) of a phase."""
        latency, slope = dict(self.latency), dict(self.slope)
        return latency.get(choice_of(phase), latency.get("", 1.0)), slope.get(phase, slope.get("", 1.0))


def choice_of(phase: str) -> str:
    """The choice that a phase belongs to."""
    return phase.partition(",")[0]


UNTUNED = Tuning()


def fit_tuning(phases: Sequence[str], seconds: Sequence[float], predict: Callable[[Tuning], Sequence[float]]) -> Tuning:
    """The factors under which `predict` comes nearest to the measured `seconds`.

    Args:
        phases: what each measurement ran under, as the model says.
        seconds: what was measured, in the same order.
        predict: the model's seconds under a tuning, in the same order.

    Raises:
        ValueError: a time that is not positive, or a phase too few or too many.
    """
    if len(phases) != len(seconds) or not all(s > 0 for s in seconds):
        raise ValueError(f"expected a positive time for each of {len(phases)} phases, got {list(seconds)}")
    if not phases:
        return UNTUNED
    names = ["", *sorted({choice_of(phase) for phase in phases})], ["", *sorted(set(phases))]
    measured = np.log(seconds)

    def errors(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(np.asarray(predict(_tuning(*names, x)))) - measured

    def slopes(x: NDArray[np.float64]) -> NDArray[np.float64]:
        here = errors(x)
        return np.stack([(errors(x + STEP * unit) - here) / STEP for unit in np.eye(len(x))], axis=1)

    x = np.zeros(sum(map(len, names)))
    start, columns = errors(x), slopes(x)
    trust = max(TRUSTS, key=lambda value: _log_likelihood(start, columns, value) - value / NOISE)
    for _ in range(ROUNDS):  # Gauss–Newton: the model is all but linear in the logarithms
        columns = np.concatenate([slopes(x) / NOISE, np.eye(len(x)) / trust])
        step = np.linalg.lstsq(columns, -np.concatenate([errors(x) / NOISE, x / trust]), rcond=None)[0]
        x += step
        if float(np.abs(step).max()) < STEP:
            break
    return _tuning(*names, x)


def _log_likelihood(errors: NDArray[np.float64], slopes: NDArray[np.float64], trust: float) -> float:
    """Return the unfitted errors' log-likelihood, up to a constant. Logarithms of factors spread by `trust`."""
    covariance = NOISE**2 * np.eye(len(errors)) + trust**2 * slopes @ slopes.T
    return float(-0.5 * (errors @ np.linalg.solve(covariance, errors) + np.linalg.slogdet(covariance)[1]))


def _tuning(choices: Sequence[str], phases: Sequence[str], x: NDArray[np.float64]) -> Tuning:
    """`x`: the logarithms of the factors on latency, then of those on time per byte; the machine's own come first."""
    latency, slope = np.split(x, [len(choices)])
    return Tuning(
        *(
            tuple(zip(names, np.exp(np.append(logs[:1], logs[:1] + logs[1:])).tolist(), strict=True))
            for names, logs in ((choices, latency), (phases, slope))
        )
    )
