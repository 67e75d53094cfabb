"""Memory of one device by category, and the bytes that training keeps per parameter.

Sources: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models" (2020), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from shardwright.cost.clusters.device import Device
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.optimizers import AT_ONCE_BYTES, OPTIMIZERS, Row
from shardwright.pcg.types import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, by purpose.

    Attributes:
        parameters_bytes: this device's part of the weights.
        gradients_bytes: of their gradients.
        optimizer_bytes: of the optimizer's states.
        activations_bytes: kept for the backward pass.
        gathered_bytes: weights gathered from their shards: all buffers that they ever need, which stay.
        buffers_bytes: the model's buffers and constants, and the batch.
        communication_bytes: buffers of the library's connections, and staging buffers of collectives.
        temporary_bytes: values and gradients of values that only live for a moment.
        context_bytes: the driver, loaded kernels and libraries' workspaces.
        slack_bytes: memory that the allocator holds beyond its values.
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
        """The bytes of parameters, gradients and moments, all of which exist when a step ends."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    def by_category(self) -> dict[str, int]:
        """Return the bytes by category ("parameters", "gradients", …), in the order of the fields."""
        return {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, categories: Mapping[str, float]) -> Memory:
        """Return the memory from its bytes by category, as in `by_category`."""
        return cls(**{f"{name}_bytes": round(num_bytes) for name, num_bytes in categories.items()})


SAFE_SHARE = 0.9
"""Predictions of memory are not exact: a plan is only said to fit if it leaves a tenth of the device's memory free."""
MemoryVerdict = Literal["fits", "may not fit", "does not fit"]


def safe_bytes(memory_bytes: float) -> int:
    """Return the most bytes of a device's memory that a plan may use and still be said to fit."""
    return int(memory_bytes * SAFE_SHARE)


def verdict(used_bytes: float, memory_bytes: float) -> MemoryVerdict:
    """Return whether the predicted bytes fit a device; within the last tenth of its memory they may not."""
    if used_bytes > memory_bytes:
        return "does not fit"
    return "fits" if used_bytes <= safe_bytes(memory_bytes) else "may not fit"


# ------------------------------------------------------------------------------------------------------- per parameter


class Stored(NamedTuple):
    """A parameter as one device stores it. `gathered`: from slices, before every use (ZeRO-3).

    `used`: the dtype in which readers find it there. Where the graph casts it, the copy is an activation. `shape`: of
    the whole parameter.
    """

    num_elements: float
    dtype: str
    grad: bool
    gathered: bool
    used: str
    shape: tuple[int, ...] = ()


def gradient_bytes(stored: Stored, execution: Execution) -> float:
    """Return the bytes of the accumulated gradient on one device."""
    return stored.num_elements * ITEM_BYTES[execution.state_dtype(stored.dtype)]


def state_bytes(stored: Stored, execution: Execution, shards: int = 1) -> dict[str, float]:
    """Return the bytes that a parameter and its optimizer always keep, by category.

    `shards`: the number of parts that the optimizer's state is cut into (ZeRO-1).

    Adam keeps two moments, and other optimizers what `OPTIMIZERS` says. In mixed precision there is a 16-bit weight to
    compute with and a master copy in fp32, which counts as the optimizer's; of a gathered parameter the master copy is
    all that is stored. With its fp32 gradient and Adam that is 18 bytes per parameter, 16 / n where it is gathered from
    n slices (Rajbhandari et al., section 3, counts a 16-bit gradient: 16).
    """
    state, used = _item_bytes(stored, execution)
    if not stored.grad:
        return {"parameters": stored.num_elements * used}
    master = state if state > used and not stored.gathered else 0
    cut, whole = _optimizer_bytes(stored, execution)
    cut = 0.0 if _row(execution).on_host else cut
    return {
        "parameters": stored.num_elements * (state if stored.gathered else used),
        "optimizer": (stored.num_elements * master + cut) / shards + whole,
    }


def kept_bytes(stored: Stored, execution: Execution) -> float:
    """Return the bytes of a parameter, its optimizer and its gradient, which waits for the update."""
    gradient = gradient_bytes(stored, execution) if stored.grad else 0.0
    return sum(state_bytes(stored, execution).values()) + gradient


def update_s(stored: Stored, execution: Execution, device: Device, shards: int = 1) -> float:
    """Return the seconds of a parameter's update: gradient read once, weight and states read and written.

    A loss scaler first reads and writes the gradient once more: it is divided by the scale, and checked for overflow.
    States on the host are copied from there and back, and that is taken not to overlap with the update itself.
    """
    if not stored.grad:
        return 0.0
    state, used = _item_bytes(stored, execution)
    cut, whole = _optimizer_bytes(stored, execution)
    traffic = (1 + 2 + 2 * execution.is_scaled) * state + (used if state > used and not stored.gathered else 0)
    seconds = ((stored.num_elements * traffic + 2 * cut) / shards + 2 * whole) / device.memory_bytes_per_s
    return seconds + (2 * cut / shards / device.host_bytes_per_s if _row(execution).on_host else 0.0)


def in_flight_bytes(stored: Mapping[tuple[Stored, int], int], execution: Execution) -> float:
    """Return the bytes of states on the device while it updates, of those that lie on the host.

    `stored`: the number of parameters of a kind, by it and by the number of parts that their states are cut into. Two
    lots of `AT_ONCE_BYTES` of weights, or of a larger parameter, are on the device at a time, and no more than all.
    """
    if not _row(execution).on_host:
        return 0.0
    least = total = 0.0
    for (parameter, shards), times in stored.items():
        if parameter.grad:
            states = _optimizer_bytes(parameter, execution)[0] / shards
            weight = parameter.num_elements / shards * _item_bytes(parameter, execution)[0]
            least = max(least, states * max(1.0, AT_ONCE_BYTES / weight))
            total += times * states
    return min(2 * least, total)


def _optimizer_bytes(stored: Stored, execution: Execution) -> tuple[float, float]:
    """Return the bytes of the optimizer's states that are cut as the parameter is, and of those that are not."""
    states, item = _row(execution).of(stored.shape), _item_bytes(stored, execution)[0]
    return states.cut_bytes(stored.num_elements, item), states.whole_bytes(stored.shape, item)


def _row(execution: Execution) -> Row:
    return OPTIMIZERS[execution.assumed.optimizer]


def _item_bytes(stored: Stored, execution: Execution) -> tuple[int, int]:
    """Return the bytes of an element as the optimizer keeps it, and as it is computed with."""
    return ITEM_BYTES[execution.state_dtype(stored.dtype)], ITEM_BYTES[stored.used]
