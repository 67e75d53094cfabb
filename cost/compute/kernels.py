"""Measured kernels: how long kernels of some shapes took on a device, and what that says about others of their kind.

A roofline whose two lines are curves: kernels that were bound by arithmetic give one over the seconds of arithmetic at
the peak, those bound by memory one over the seconds of their bytes; work takes the larger of both. Between measured
kernels, seconds are interpolated in logarithms; beyond the last and before the first they change in proportion. (A
curve that stayed as it is before its first kernel would give all smaller work that time, whatever the other curve has
measured there.) Where kernels are launched, none takes less than the fastest of its kind; a host's dispatch of an
operator, which is measured on next to nothing, holds that already. Points are made to rise first, so that noise cannot
make more work faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import exp, inf, log

import numpy as np

from shardwright.cost.clusters import checks
from shardwright.cost.compute.work import WORK_KINDS, Work, WorkKind

_LEAST_S = 1e-9
_LEAST_BOUND_S = 1e-15  # has a logarithm
_Key = tuple[str, str, bool, bool]
"""Kind, dtype, backward, whether bound by memory."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that was measured: its work (see `Work`), and its seconds without the host's dispatch."""

    kind: WorkKind
    shape: tuple[int, ...]
    flops: float
    num_bytes: float
    dtype: str
    seconds: float
    causal: bool = False
    backward: bool = False

    def __post_init__(self) -> None:
        checks.choice(self.kind, "Kernel", "kind", WORK_KINDS)
        checks.text(self.dtype, "Kernel", "dtype", "a dtype of the graph, such as 'float32'")
        if not isinstance(self.shape, (tuple, list)) or not self.shape:
            problem = f"expected the sizes of the work, got {self.shape!r}; a matmul has (batch, m, n, k)"
            raise checks.FieldError("Kernel", "shape", problem)
        sizes = tuple(checks.positive_int(x, "Kernel", "shape", "a size of the work") for x in self.shape)
        object.__setattr__(self, "shape", sizes)
        for name, unit in (("flops", "floating-point operations"), ("num_bytes", "bytes")):
            object.__setattr__(self, name, checks.non_negative(getattr(self, name), "Kernel", name, unit))
        object.__setattr__(self, "seconds", checks.positive(self.seconds, "Kernel", "seconds", "seconds"))
        for name in ("causal", "backward"):
            if not isinstance(getattr(self, name), bool):
                problem = f"expected true or false, got {getattr(self, name)!r}; give one of them"
                raise checks.FieldError("Kernel", name, problem)

    @property
    def work(self) -> Work:
        return Work(self.kind, self.shape, self.flops, self.num_bytes, self.dtype, self.causal, self.backward)


def measured(work: Work, seconds: float) -> Kernel:
    """A kernel that did this work in so many seconds."""
    parts = (work.kind, work.shape, work.flops, work.num_bytes, work.dtype)
    return Kernel(*parts, max(seconds, _LEAST_S), work.causal, work.backward)


def checked_kernels(kernels: object) -> tuple[Kernel, ...]:
    """Kernels, or what a JSON file holds of them."""
    if not isinstance(kernels, Sequence) or isinstance(kernels, str):
        problem = f"expected a list of measured kernels, got {kernels!r}; leave it out or run `shardwright calibrate`"
        raise checks.FieldError("Device", "kernels", problem)
    return tuple(entry if isinstance(entry, Kernel) else _read(entry, place) for place, entry in enumerate(kernels))


def _read(entry: object, place: int) -> Kernel:
    names = [f.name for f in fields(Kernel)]
    if not isinstance(entry, Mapping) or not set(names[:6]) <= set(entry) <= set(names):
        problem = f"expected an object with {', '.join(names[:6])}, got {entry!r}; calibrate again"
        raise checks.FieldError("Device", f"kernels[{place}]", problem)
    with checks.located(f"Device.kernels[{place}]."):
        return Kernel(**entry)


class KernelTable:
    """Seconds of work from measured kernels of its kind; `bounds` gives the seconds of its arithmetic and its bytes.

    `launched`: by a host for another device, which takes a time whatever the work.
    """

    def __init__(
        self, kernels: Iterable[Kernel], bounds: Callable[[Work], tuple[float, float]], *, launched: bool
    ) -> None:
        self._bounds = bounds
        points: dict[_Key, list[tuple[float, float]]] = {}
        for kernel in kernels:
            compute_s, memory_s = bounds(kernel.work)
            key = (kernel.kind, kernel.dtype, kernel.backward, memory_s > compute_s)
            point = (log(max(compute_s, memory_s, _LEAST_BOUND_S)), log(kernel.seconds))
            points.setdefault(key, []).append(point)
        self._curves = {key: _rising(found) for key, found in points.items()}
        self._least_s: dict[tuple[str, str, bool], float] = {}
        for (kind, dtype, backward, _), (_, measured_s) in self._curves.items() if launched else ():
            key = (kind, dtype, backward)
            self._least_s[key] = min(exp(measured_s[0]), self._least_s.get(key, inf))

    def seconds(self, work: Work) -> float | None:
        """None where nothing of this kind and dtype was measured."""
        key = (work.kind, work.dtype, work.backward)
        found = [
            _at(curve, bound_s)
            for by_memory, bound_s in enumerate(self._bounds(work))
            if (curve := self._curves.get((*key, bool(by_memory)))) is not None
        ]
        return max(*found, self._least_s.get(key, 0.0)) if found else None


def _at(curve: tuple[list[float], list[float]], bound_s: float) -> float:
    ideal, measured_s = curve
    place = log(max(bound_s, _LEAST_BOUND_S))
    return exp(float(np.interp(place, ideal, measured_s)) + max(0.0, place - ideal[-1]) + min(0.0, place - ideal[0]))


def _rising(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The points in order, seconds rising: neighbours that fall are replaced by their mean (isotonic regression)."""
    blocks: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        blocks.append([point])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [x for block in blocks for x, _ in block], [_mean(block) for block in blocks for _ in block]


def _mean(block: Sequence[tuple[float, float]]) -> float:
    return sum(y for _, y in block) / len(block)
