"""Measured kernels: the times of some shapes on a device, and the predictions for others of their kind.

The prediction is a roofline whose two lines are curves. Kernels bound by arithmetic give one curve, over the seconds of
arithmetic at the peak; kernels bound by memory give the other, over the seconds of their bytes. Work takes the larger
of both. Between measured kernels, seconds are interpolated in logarithms; beyond the last and before the first they
change in proportion. (A curve that were constant before its first kernel would give that time to all smaller work,
whatever the other curve has measured there.) Where kernels are launched, none takes less than the fastest of its kind;
on a host, the measured dispatch of an operator includes that least time. Points are first made to rise, so that noise
cannot make more work faster along a curve. Kernels of a backward pass use the forward's curves if none was measured.

The time of a product depends on its shape too: libraries have other algorithms for a wide one than for a deep one. A
product's ratio to its curve is predicted from measured products of like shape: a mean weighted by their distance
(Nadaraya and Watson's regression, 1964, with a Gaussian of one octave in every size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import groupby
from math import exp, log
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.compute.work import WORK_KINDS, Work
from shardwright.pcg import checks

_LEAST_S = 1e-9
_LEAST_BOUND_S = 1e-15  # positive, so that it has a logarithm
_PRIOR = 0.1  # weight of the curve itself beside kernels of like shape; a kernel of the same shape weighs 1
_Key = tuple[str, str, bool]
"""Kind, dtype, backward."""


@dataclass(frozen=True, slots=True)
class Kernel(Work):
    """Measured work, with its seconds without the host's dispatch."""

    seconds: float = field(kw_only=True)

    def __post_init__(self) -> None:
        checks.choice(self.kind, "Kernel", "kind", WORK_KINDS)
        checks.text(self.dtype, "Kernel", "dtype", "a dtype of the graph, such as 'float32'")
        if not isinstance(self.shape, (tuple, list)) or not self.shape:
            problem = f"expected the sizes of the work, got {self.shape!r}; a matmul has (batch, m, n, k)"
            raise checks.FieldError("Kernel", "shape", problem)
        sizes = tuple(checks.positive_int(x, "Kernel", "shape", "a size of the work") for x in self.shape)
        num_sizes = 4 if self.kind in ("matmul", "conv", "attention") else 1
        if len(sizes) != num_sizes:
            problem = f"expected {num_sizes} sizes, as {self.kind} has, got {list(sizes)}; see `Work.shape`"
            raise checks.FieldError("Kernel", "shape", problem)
        object.__setattr__(self, "shape", sizes)
        checks.canonical(self, {
            "flops": (checks.non_negative, "floating-point operations"),
            "num_bytes": (checks.non_negative, "bytes"),
            "seconds": (checks.positive, "seconds"),
        })  # fmt: skip
        for name in ("causal", "backward"):
            if not isinstance(getattr(self, name), bool):
                problem = f"expected true or false, got {getattr(self, name)!r}; give one of them"
                raise checks.FieldError("Kernel", name, problem)


def measured(work: Work, seconds: float) -> Kernel:
    """Return a kernel that did this work in `seconds`."""
    return Kernel(**asdict(work), seconds=max(seconds, _LEAST_S))


def checked_kernels(kernels: object) -> tuple[Kernel, ...]:
    """Return kernels, from kernels or their JSON objects."""
    if not isinstance(kernels, Sequence) or isinstance(kernels, str):
        problem = f"expected a list of measured kernels, got {kernels!r}; leave it out or run `shardwright calibrate`"
        raise checks.FieldError("Device", "kernels", problem)
    return tuple(entry if isinstance(entry, Kernel) else _read(entry, place) for place, entry in enumerate(kernels))


def _read(entry: object, place: int) -> Kernel:
    names = [f.name for f in fields(Kernel)]
    required = [f.name for f in fields(Kernel) if f.default is MISSING]
    if not isinstance(entry, Mapping) or not set(required) <= set(entry) <= set(names):
        problem = f"expected an object with {', '.join(required)}, got {entry!r}; calibrate again"
        raise checks.FieldError("Device", f"kernels[{place}]", problem)
    with checks.located(f"Device.kernels[{place}]."):
        return Kernel(**entry)


class KernelTable:
    """Seconds of work from measured kernels of its kind; `bounds` returns the seconds of its arithmetic and its bytes.

    `launched`: kernels are launched by a host for another device, which takes a least time whatever the work.
    """

    def __init__(
        self, kernels: Iterable[Kernel], bounds: Callable[[Work], tuple[float, float]], *, launched: bool
    ) -> None:
        self._bounds = bounds
        points: dict[tuple[_Key, bool], list[tuple[float, float]]] = {}
        alike: dict[_Key, list[Kernel]] = {}
        for kernel in kernels:
            key, bound_s = _key(kernel), bounds(kernel)
            by_memory = bound_s[1] > bound_s[0]
            point = (log(max(*bound_s, _LEAST_BOUND_S)), log(kernel.seconds))
            points.setdefault((key, by_memory), []).append(point)
            alike.setdefault(key, []).append(kernel)
        self._curves = {key: _rising(of_kind) for key, of_kind in points.items()}
        self._least_s = {key: min(k.seconds for k in of_kind) if launched else 0.0 for key, of_kind in alike.items()}
        self._shapes = {
            key: self._deviations(key, of_kind) for key, of_kind in alike.items() if len(of_kind[0].shape) > 1
        }

    def seconds(self, work: Work) -> float | None:
        """Return the seconds of work, or None if neither its kind and dtype nor their forward was measured."""
        key = next((key for key in (_key(work), _forward(work)) if key in self._least_s), None)
        if key is None:
            return None
        seconds = self._curve_s(key, work)
        if key in self._shapes:
            places, deviations = self._shapes[key]
            near = np.exp(-np.sum((places - _place(work)) ** 2, axis=1) / 2)
            seconds *= exp(float(near @ deviations) / (float(near.sum()) + _PRIOR))
        return max(seconds, self._least_s[key])

    def _curve_s(self, key: _Key, work: Work) -> float:
        """Return the larger value of the two curves; at least one exists."""
        curves = (self._curves.get((key, by_memory)) for by_memory in (False, True))
        bounded = zip(curves, self._bounds(work), strict=True)
        return max(_at(curve, bound_s) for curve, bound_s in bounded if curve is not None)

    def _deviations(self, key: _Key, kernels: Sequence[Kernel]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the kernels' places among shapes, and the logarithms of their times over their curve's."""
        places = np.array([_place(kernel) for kernel in kernels])
        return places, np.array([log(kernel.seconds / self._curve_s(key, kernel)) for kernel in kernels])


def _key(work: Work) -> _Key:
    return work.kind, work.dtype, work.backward


def _forward(work: Work) -> _Key:
    return work.kind, work.dtype, False


def _place(work: Work) -> NDArray[np.float64]:
    """Return the place of work among shapes, in octaves; causal work is one octave from other work."""
    return np.log2([*work.shape, 2.0 if work.causal else 1.0])


def _at(curve: tuple[list[float], list[float]], bound_s: float) -> float:
    ideal, measured_s = curve
    place = log(max(bound_s, _LEAST_BOUND_S))
    return exp(float(np.interp(place, ideal, measured_s)) + max(0.0, place - ideal[-1]) + min(0.0, place - ideal[0]))


def _rising(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the points in order with rising seconds: falling neighbours get their mean (isotonic regression).

    Points of one place get their mean too, such as both gradients of a convolution.
    """
    blocks: list[list[tuple[float, float]]] = []
    for _, alike in groupby(sorted(points), key=itemgetter(0)):
        blocks.append(list(alike))
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return [x for block in blocks for x, _ in block], [_mean(block) for block in blocks for _ in block]


def _mean(block: Sequence[tuple[float, float]]) -> float:
    return sum(y for _, y in block) / len(block)
