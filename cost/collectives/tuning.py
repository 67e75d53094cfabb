"""Factors on NCCL's own figures: on latency, and on time per byte, by what the library runs.

    t = λ · latency + σ · (t_model − latency)        λ = λ₀·λ_c, σ = σ₀·σ_p

λ₀ and σ₀ belong to the machine, λ_c to a choice ("ring LL") and σ_p to a phase of it ("ring LL, opening"). Every one of
them is 1 unless measurements say otherwise: `bench/tuning.py` fits them.
"""

from __future__ import annotations

from dataclasses import dataclass


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
