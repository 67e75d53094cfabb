"""Devices: what one accelerator, or one CPU rank, computes and remembers per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.cost import checks
from shardwright.pcg.errors import ClusterError

DeviceKind = Literal["cuda", "cpu"]

DEVICE_KINDS: tuple[DeviceKind, ...] = ("cuda", "cpu")
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")

_PRECISION_OF_DTYPE = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one CPU rank with its threads.

    Attributes:
        memory_bytes: what one rank may use.
        memory_bytes_per_s: sustained (not datasheet) bandwidth to that memory, reads and writes together.
        flops_per_s: peak of matrix multiplication by precision, dense; "fp32" is required, the others fall back on it.
        matmul_efficiency: share of the peak that large matrix multiplications reach.
        op_overhead_s: launch or dispatch of one operator.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    matmul_efficiency: float
    op_overhead_s: float
    kind: DeviceKind

    def __post_init__(self) -> None:
        checks.text(self.name, "Device", "name", "what people call the device, such as 'H100-SXM'")
        memory_bytes = checks.positive_int(self.memory_bytes, "Device", "memory_bytes", "a number of bytes")
        bandwidth = checks.positive(self.memory_bytes_per_s, "Device", "memory_bytes_per_s", "bytes per second")
        efficiency = checks.fraction(
            self.matmul_efficiency, "Device", "matmul_efficiency", "the share of the peak that matmuls reach"
        )
        overhead = checks.non_negative(self.op_overhead_s, "Device", "op_overhead_s", "seconds")
        checks.choice(self.kind, "Device", "kind", DEVICE_KINDS)
        object.__setattr__(self, "memory_bytes", memory_bytes)
        object.__setattr__(self, "memory_bytes_per_s", bandwidth)
        object.__setattr__(self, "flops_per_s", _checked_flops(self.flops_per_s))
        object.__setattr__(self, "matmul_efficiency", efficiency)
        object.__setattr__(self, "op_overhead_s", overhead)

    def peak_flops_per_s(self, dtype: str) -> float:
        """The matmul peak for a precision ("bf16") or a dtype name of the graph ("bfloat16"), in FLOP per second.

        Where the table has no entry, 16-bit types and tf32 run at the fp32 rate and fp64 at half of it. Integers and
        bools count as fp32.
        """
        precision = "fp32" if dtype in _INTEGERS else _PRECISION_OF_DTYPE.get(dtype, dtype)
        if precision not in PRECISIONS:
            known = [*PRECISIONS, *_PRECISION_OF_DTYPE, *_INTEGERS]
            raise ClusterError(f"device {self.name!r}: no peak rate for dtype {dtype!r}; choose one of {known}")
        if precision in self.flops_per_s:
            return self.flops_per_s[precision]
        return self.flops_per_s["fp32"] * (0.5 if precision == "fp64" else 1.0)


def _checked_flops(flops: object) -> dict[str, float]:
    if not isinstance(flops, Mapping):
        problem = f"expected a mapping of precision to FLOP per second, got {flops!r}; give at least {{'fp32': …}}"
        raise checks.FieldError("Device", "flops_per_s", problem)
    for precision in flops:
        if precision not in PRECISIONS:
            problem = f"unknown precision {precision!r}; remove it or correct it to one of {', '.join(PRECISIONS)}"
            raise checks.FieldError("Device", "flops_per_s", problem)
    if "fp32" not in flops:
        problem = f"missing 'fp32', got {', '.join(map(str, flops)) or 'nothing'}; the other precisions fall back on it"
        raise checks.FieldError("Device", "flops_per_s", problem)
    unit = "FLOP per second"
    return {key: checks.positive(rate, "Device", f"flops_per_s.{key}", unit) for key, rate in flops.items()}
