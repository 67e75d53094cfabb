"""Memory of one device by category, and what the Adam optimizers keep per parameter.

Sources: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models" (2020), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, by what they are for.

    Attributes:
        parameters_bytes: this device's part of the weights.
        gradients_bytes: of their gradients.
        optimizer_bytes: of the optimizer's states.
        activations_bytes: kept for the backward pass.
        gathered_bytes: weights gathered from their shards, while they are in use.
        buffers_bytes: the model's buffers and constants.
        communication_bytes: staging buffers of collectives.
    """

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    gathered_bytes: int = 0
    buffers_bytes: int = 0
    communication_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        """Bytes by category ("parameters", "gradients", …), in the order of the fields."""
        return {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in fields(self)}

    def __add__(self, other: Memory) -> Memory:
        return Memory(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


ADAM_BYTES_PER_BYTE = 4
"""Weight, gradient and two moments of Adam, all in the weight's dtype."""
ADAM_TRAFFIC_PER_BYTE = 7
"""Adam reads weight, gradient and both moments, and writes weight and both moments."""


def adam_bytes(
    num_elements: int,
    *,
    parameter_shards: int = 1,
    gradient_shards: int = 1,
    optimizer_shards: int = 1,
    element_bytes: int = 4,
) -> Memory:
    """What training `num_elements` parameters with Adam or AdamW keeps on one device.

    Per element and for fp32 (`element_bytes` 4): parameter 4, gradient 4, two moments 8. Mixed precision, with its
    fp32 master copy, is later work.

    Args:
        num_elements: of the parameter as this device's plan lays it out, before the sharding of its storage.
        parameter_shards: over how many devices the storage of the parameter is sharded (ZeRO-3).
        gradient_shards: of the gradient (ZeRO-2).
        optimizer_shards: of the moments (ZeRO-1).
        element_bytes: of one parameter; torch keeps gradients and moments in the same dtype.
    """
    return Memory(
        parameters_bytes=_ceil_div(num_elements, parameter_shards) * element_bytes,
        gradients_bytes=_ceil_div(num_elements, gradient_shards) * element_bytes,
        optimizer_bytes=2 * _ceil_div(num_elements, optimizer_shards) * element_bytes,
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
