"""Memory of one device by category, and what training keeps per parameter.

Sources: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models" (2020), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from shardwright.pcg.step.assumed import Optimizer
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.types import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, by what they are for.

    Attributes:
        parameters_bytes: this device's part of the weights.
        gradients_bytes: of their gradients.
        optimizer_bytes: of the optimizer's states.
        activations_bytes: kept for the backward pass.
        gathered_bytes: weights gathered from their shards: all buffers that these ever need, which stay.
        buffers_bytes: the model's buffers and constants, and the batch.
        communication_bytes: buffers of the library's connections, and staging buffers of collectives.
        temporary_bytes: values and gradients of values that only live for a moment.
        context_bytes: the driver, loaded kernels and libraries' workspaces.
        slack_bytes: what the allocator holds beyond that.
    """

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    gathered_bytes: int = 0
    buffers_bytes: int = 0
    communication_bytes: int = 0
    temporary_bytes: int = 0
    context_bytes: int = 0
    slack_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.by_category().values())

    @property
    def stored_bytes(self) -> int:
        """Of parameters, gradients and moments, which are all there when a step ends."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    def by_category(self) -> dict[str, int]:
        """Bytes by category ("parameters", "gradients", …), in the order of the fields."""
        return {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, categories: Mapping[str, float]) -> Memory:
        """Bytes by category, as `by_category` gives them."""
        return cls(**{f"{name}_bytes": round(num_bytes) for name, num_bytes in categories.items()})


SAFE_SHARE = 0.9
"""Predictions of memory are not exact: a plan is only said to fit if it leaves a tenth of the device's memory free."""
MemoryVerdict = Literal["fits", "may not fit", "does not fit"]


def safe_bytes(memory_bytes: float) -> int:
    """What a plan may use of a device's memory and still be said to fit."""
    return int(memory_bytes * SAFE_SHARE)


def verdict(used_bytes: float, memory_bytes: float) -> MemoryVerdict:
    """Whether what is predicted fits a device; within the last tenth of its memory it may not."""
    if used_bytes > memory_bytes:
        return "does not fit"
    return "fits" if used_bytes <= safe_bytes(memory_bytes) else "may not fit"


# ------------------------------------------------------------------------------------------------------- per parameter


MOMENTS: Mapping[Optimizer, int] = {"adam": 2, "sgd": 0}


class Stored(NamedTuple):
    """A parameter as one device stores it. `gathered`: from slices, before every use (ZeRO-3).

    `used`: the dtype in which it lies there for its readers. Where the graph casts it, the copy is an activation.
    """

    num_elements: float
    dtype: str
    grad: bool
    gathered: bool
    used: str


def gradient_bytes(stored: Stored, execution: Execution) -> float:
    """Of the accumulated gradient on one device."""
    return stored.num_elements * ITEM_BYTES[execution.state_dtype(stored.dtype)]


def state_bytes(stored: Stored, execution: Execution, shards: int = 1) -> dict[str, float]:
    """What a parameter and its optimizer keep all the time, by category. `shards`: of the optimizer's part (ZeRO-1).

    Adam keeps two moments. In mixed precision there is a 16-bit weight to compute with and a master copy in fp32, which
    counts as the optimizer's; of a gathered parameter the master copy is all that is stored. With its fp32 gradient
    that is 18 bytes per parameter, 16 / n where it is gathered from n slices (Rajbhandari et al., section 3, counts a
    16-bit gradient: 16).
    """
    state, used = _item_bytes(stored, execution)
    if not stored.grad:
        return {"parameters": stored.num_elements * used}
    moments = MOMENTS[execution.assumed.optimizer]
    master = state if state > used and not stored.gathered else 0
    return {
        "parameters": stored.num_elements * (state if stored.gathered else used),
        "optimizer": stored.num_elements * (master + moments * state) / shards,
    }


def kept_bytes(stored: Stored, execution: Execution) -> float:
    """Of a parameter, its optimizer and, while that waits for the update, its gradient."""
    gradient = gradient_bytes(stored, execution) if stored.grad else 0.0
    return sum(state_bytes(stored, execution).values()) + gradient


def update_bytes(stored: Stored, execution: Execution, shards: int = 1) -> float:
    """Bytes that the optimizer's update of a parameter reads and writes: gradient once, weight and moments twice.

    A loss scaler reads and writes the gradient once more before: divided by the scale, and checked for overflow.
    """
    if not stored.grad:
        return 0.0
    state, used = _item_bytes(stored, execution)
    moments = MOMENTS[execution.assumed.optimizer]
    traffic = (1 + 2 * (1 + moments) + 2 * execution.is_scaled) * state
    return stored.num_elements * (traffic + (used if state > used and not stored.gathered else 0)) / shards


def _item_bytes(stored: Stored, execution: Execution) -> tuple[int, int]:
    """Of one element: as the optimizer keeps it, and as it is computed with."""
    return ITEM_BYTES[execution.state_dtype(stored.dtype)], ITEM_BYTES[stored.used]
