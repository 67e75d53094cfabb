"""The predicted step of a plan, as its file has it. `predict` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from shardwright.cost.timeline.memory import Memory


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's predicted step on every device.

    Attributes:
        step_s: by the timeline, in which communication and compute overlap.
        compute_s, communication_s, optimizer_s: of all nodes, as if each ran alone; `serial_s` is their sum. With
            several stages, compute and update are those of the busiest stage; `communication_s` and
            `communication_bytes` are an equal share, without messages between stages.
        exposed_s: while compute waits for communication; of the busiest stage, as `bubble_s` is.
        bubble_s: while a device has nothing to do.
        memory: at its peak, of the stage where it is the largest part of its devices' memory; `peak_at` describes the
            task that runs then.
        device_bytes: the memory of that stage's devices.
    """

    step_s: float
    compute_s: float
    communication_s: float
    optimizer_s: float
    exposed_s: float
    bubble_s: float
    communication_bytes: float
    memory: Memory
    peak_at: str
    device_bytes: int

    @property
    def serial_s(self) -> float:
        """The search's first objective: nothing overlaps, every parameter moves on its own."""
        return self.compute_s + self.communication_s + self.optimizer_s

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "serial_s": self.serial_s}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Prediction:
        values = {f.name: data[f.name] for f in fields(cls)}
        values["memory"] = Memory(**values["memory"])  # type: ignore[arg-type]
        return cls(**values)  # type: ignore[arg-type]
