"""What is known of a plan's captured graph: whether one eager step of the model was compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CaptureCheck:
    """An eager step and one of the captured graph, compared on the model's values: loss, gradients, buffers, draws.

    equal       whether they were, up to rounding; a model of which they are not has no plan
    why         why they were not compared, or ""
    num_rows    of the batch, that were compared; None: all
    errors      the largest relative ones of losses, of gradients and of buffers
    noise       by how much of themselves rounding alone moves gradients, where errors were held against that; else 0
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
        beside = f"; rounding alone moves gradients by {self.noise:.1e}" if self.noise else ""
        each = f"losses to {loss:.1e}, gradients to {gradients:.1e}, buffers to {buffers:.1e}"
        return f"equal to an eager step{part}: {each}{beside}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "errors": list(self.errors)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaptureCheck:
        """Read what `to_json` gave."""
        loss, gradients, buffers = data["errors"]
        return cls(data["equal"], data["why"], data["num_rows"], (loss, gradients, buffers), data["noise"])
