"""Devices: the compute rates and the memory of one accelerator, or of one CPU rank.

Constants that no datasheet has are assumed until calibrated:

    attention        FlashAttention-2 on an A100, assumed for the others: it reaches 50 to 73 % of that peak forward
                     and up to 63 % backward (Dao, "FlashAttention-2" (2023), section 4); 0.6 and 0.5 are round figures
                     below the best, chosen, not measured
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shardwright.cost.compute.kernels import Kernel, checked_kernels
from shardwright.pcg import checks
from shardwright.pcg.errors import ClusterError

DeviceKind = Literal["cuda", "cpu"]

DEVICE_KINDS: tuple[DeviceKind, ...] = get_args(DeviceKind)
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
ATTENTION_EFFICIENCY, ATTENTION_BACKWARD_EFFICIENCY = 0.6, 0.5

PRECISION_OF_DTYPE = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, or a CPU rank with its threads.

    Attributes:
        memory_bytes: all that one rank may use, including what the driver takes.
        memory_bytes_per_s: sustained (not datasheet) bandwidth to that memory, reads and writes together.
        flops_per_s: peak of matrix multiplication by precision, dense; "fp32" is required, the others fall back on it.
        matmul_efficiency: share of the peak that large matrix multiplications reach.
        op_overhead_s: the host's time to dispatch one kernel, forward or backward.
        attention_efficiency: share of the peak that fused attention reaches, forward.
        attention_backward_efficiency: the same, backward.
        vector_flops_per_s: arithmetic outside matrix multiplications; 0: the fp32 rate.
        num_units: multiprocessors, each of which works on one tile at a time; 0: not known, tiles are not counted.
        kernel_s: the least time of a kernel on the device itself, which its dispatch does not hide.
        update_overhead_s: dispatch of the optimizer's update of one parameter.
        step_overhead_s: a fixed time of every step, whatever the model.
        put_off_s: how much longer the host needs for an operator whose gradients of weights are left to a second part
            of backward, in both parts and forward together.
        host_bytes_per_s: copies to the host's memory, or from there, one way at a time; 0: there is no such memory to
            offload to.
        context_bytes: memory of the driver, loaded kernels and libraries' workspaces, whatever the model; less than
            `memory_bytes`.
        operators: measured dispatch by operator of the op table, (forward, backward) seconds; other operators take
            `op_overhead_s`.
        kernels: measured kernels; for kinds that have any, they replace the rates above.
        paces: by operator of the op table, (forward, backward): how many times as long its kernels take as other work
            of their kind; 1 for other operators. Measured at one size in one dtype, used for all.
        first_uses: by operator, (forward, backward) seconds: how much longer its first dispatch in a step takes than
            later ones, because its code has left the host's caches.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    matmul_efficiency: float
    op_overhead_s: float
    kind: DeviceKind
    attention_efficiency: float = ATTENTION_EFFICIENCY
    attention_backward_efficiency: float = ATTENTION_BACKWARD_EFFICIENCY
    vector_flops_per_s: float = 0.0
    num_units: int = 0
    kernel_s: float = 0.0
    update_overhead_s: float = 0.0
    step_overhead_s: float = 0.0
    put_off_s: float = 0.0
    host_bytes_per_s: float = 0.0
    context_bytes: int = 0
    operators: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    kernels: tuple[Kernel, ...] = field(default=(), hash=False)
    paces: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    first_uses: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checks.canonical(self, _CHECKS)
        checks.choice(self.kind, "Device", "kind", DEVICE_KINDS)
        if self.context_bytes >= self.memory_bytes:
            problem = f"expected less than the memory of {self.memory_bytes} bytes, got {self.context_bytes}"
            raise checks.FieldError("Device", "context_bytes", f"{problem}; correct the one or the other")
        object.__setattr__(self, "kernels", checked_kernels(self.kernels))

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the matmul peak of a precision ("bf16") or a graph's dtype ("bfloat16"), in FLOP per second.

        Where the table has no entry, fp8 runs at the bf16 rate, and so does fp16 on a GPU that has a bf16 rate; other
        16-bit types and tf32 run at the fp32 rate, fp64 at half of it. Integers and bools count as fp32.
        """
        precision = "fp32" if dtype in _INTEGERS else PRECISION_OF_DTYPE.get(dtype, dtype)
        if precision not in PRECISIONS:
            known = [*PRECISIONS, *PRECISION_OF_DTYPE, *_INTEGERS]
            raise ClusterError(f"device {self.name!r}: no peak rate for dtype {dtype!r}; choose one of {known}")
        if precision in self.flops_per_s:
            return self.flops_per_s[precision]
        if precision == "fp8" or (precision == "fp16" and self.kind == "cuda" and "bf16" in self.flops_per_s):
            return self.peak_flops_per_s("bf16")
        return self.flops_per_s["fp32"] * (0.5 if precision == "fp64" else 1.0)

    def times_as_quick(self, other: Device) -> float:
        """Return the largest ratio of this device's rates to `other`'s, over matrix products and memory."""
        quicker = self.memory_bytes_per_s / other.memory_bytes_per_s
        for precision in self.flops_per_s.keys() | other.flops_per_s.keys():
            mine, its = (d.peak_flops_per_s(precision) * d.matmul_efficiency for d in (self, other))
            quicker = max(quicker, mine / its)
        return quicker


_LEAST = ("memory_bytes", "memory_bytes_per_s", "matmul_efficiency", "attention_efficiency",
          "attention_backward_efficiency", "host_bytes_per_s")  # fmt: skip
_MOST = ("op_overhead_s", "kernel_s", "update_overhead_s", "step_overhead_s", "put_off_s")


def slowest_device(devices: Sequence[Device]) -> Device:
    """Return a device whose every rate is the least of `devices`; the device itself where all are one kind.

    Its context leaves as much of its memory as the fullest kind has free. Its multiprocessors are those of the slowest
    kind. Measurements of one kind alone (kernels, operators, paces, first uses) are left out.
    """
    first, *others = dict.fromkeys(devices)
    if not others:
        return first
    every = (first, *others)
    chosen = [(min, name) for name in _LEAST] + [(max, name) for name in _MOST]
    binding: dict[str, Any] = {name: choose(getattr(device, name) for device in every) for choose, name in chosen}
    free_bytes = min(device.memory_bytes - device.context_bytes for device in every)
    precisions = dict.fromkeys(precision for device in every for precision in device.flops_per_s)
    reached = {
        precision: min(device.peak_flops_per_s(precision) * device.matmul_efficiency for device in every)
        for precision in precisions
    }
    return Device(
        name=" + ".join(dict.fromkeys(device.name for device in every)),
        flops_per_s={precision: rate / binding["matmul_efficiency"] for precision, rate in reached.items()},
        kind="cpu" if any(device.kind == "cpu" for device in every) else "cuda",
        num_units=min(every, key=lambda device: device.peak_flops_per_s("fp16") * device.matmul_efficiency).num_units,
        context_bytes=binding["memory_bytes"] - free_bytes,
        **binding,
    )


def _count(value: object, owner: str, name: str, meaning: str) -> int:
    if value in (0, 0.0) and not isinstance(value, bool):
        return 0
    return checks.positive_int(value, owner, name, meaning)


def _passes(by_operator: object, owner: str, field_name: str, unit: str) -> dict[str, tuple[float, float]]:
    if not isinstance(by_operator, Mapping):
        problem = f"expected a mapping of operator to (forward, backward) {unit}, got {by_operator!r}; leave it out"
        raise checks.FieldError(owner, field_name, problem)
    by_name: dict[str, tuple[float, float]] = {}
    for name, pair in by_operator.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            problem = f"expected two numbers, the {unit} of forward and of backward, got {pair!r}; give both"
            raise checks.FieldError(owner, f"{field_name}.{name}", problem)
        forward, backward = (checks.non_negative(x, owner, f"{field_name}.{name}", unit) for x in pair)
        by_name[str(name)] = (forward, backward)
    return by_name


def _rates(flops: object, owner: str, name: str, unit: str) -> dict[str, float]:
    if not isinstance(flops, Mapping):
        problem = f"expected a mapping of precision to FLOP per second, got {flops!r}; give at least {{'fp32': …}}"
        raise checks.FieldError(owner, name, problem)
    for precision in flops:
        if precision not in PRECISIONS:
            problem = f"unknown precision {precision!r}; remove it or correct it to one of {', '.join(PRECISIONS)}"
            raise checks.FieldError(owner, name, problem)
    if "fp32" not in flops:
        problem = f"missing 'fp32', got {', '.join(map(str, flops)) or 'nothing'}; the other precisions fall back on it"
        raise checks.FieldError(owner, name, problem)
    return {key: checks.positive(rate, owner, f"{name}.{key}", unit) for key, rate in flops.items()}


_CHECKS: Mapping[str, tuple[checks.Check, str]] = {
    "name": (checks.text, "what people call the device, such as 'H100-SXM'"),
    "memory_bytes": (checks.positive_int, "a number of bytes"),
    "memory_bytes_per_s": (checks.positive, "bytes per second"),
    "flops_per_s": (_rates, "FLOP per second"),
    "matmul_efficiency": (checks.fraction, "the share of the peak that matmuls reach"),
    "op_overhead_s": (checks.non_negative, "seconds"),
    "attention_efficiency": (checks.fraction, "the share of the peak that fused attention reaches"),
    "attention_backward_efficiency": (checks.fraction, "the share of the peak that fused attention reaches"),
    "vector_flops_per_s": (checks.non_negative, "FLOP per second"),
    "num_units": (_count, "how many multiprocessors the device has, or 0"),
    "kernel_s": (checks.non_negative, "seconds"),
    "update_overhead_s": (checks.non_negative, "seconds"),
    "step_overhead_s": (checks.non_negative, "seconds"),
    "put_off_s": (checks.non_negative, "seconds"),
    "host_bytes_per_s": (checks.non_negative, "bytes per second"),
    "context_bytes": (_count, "the bytes that the driver and loaded kernels take, or 0"),
    "operators": (_passes, "seconds"),
    "paces": (_passes, "times"),
    "first_uses": (_passes, "seconds"),
}
