"""The record of how a plan's captured graph was compared with one eager step of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CaptureCheck:
    """The result of comparing an eager step with a step of the captured graph: loss, gradients, buffers, draws.

    equal       whether the two agree up to rounding; False where they were not compared. A model with a difference has
                no plan
    why         why they were not compared, or ""
    num_rows    how many rows of the batch were compared; None: all
    errors      the largest relative errors of losses, of gradients and of buffers
    noise       the relative change of gradients by rounding alone, if errors were held against it; else 0
    """

    equal: bool
    why: str = ""
    num_rows: int | None = None
    errors: tuple[float, float, float] = (0.0, 0.0, 0.0)
    noise: float = 0.0

    def __str__(self) -> str:
        if not self.equal:
            return f"not checked: {self.why}"
        part = f" on {self.num_rows} rows of the batch" if self.num_rows is not None else ""
        loss, gradients, buffers = self.errors
        rounding = f"; rounding alone moves gradients by {self.noise:.1e}" if self.noise else ""
        each = f"losses to {loss:.1e}, gradients to {gradients:.1e}, buffers to {buffers:.1e}"
        return f"equal to an eager step{part}: {each}{rounding}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "errors": list(self.errors)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaptureCheck:
        """Read what `to_json` gave."""
        loss, gradients, buffers = data["errors"]
        return cls(data["equal"], data["why"], data["num_rows"], (loss, gradients, buffers), data["noise"])
