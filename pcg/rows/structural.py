"""Operators that only move elements: bit-exact under every split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.pcg.factors import Shape, reshape_factors
from shardwright.pcg.optable import Attrs, LocalShapes, Row, attr_dtype, local_result_shape

FactorText = tuple[str, Mapping[str, int]]


def names(rank: int, prefix: str = "d") -> list[str]:
    """Fresh factor names, one per dimension."""
    return [f"{prefix}{i}" for i in range(rank)]


def _ints(value: object) -> tuple[int, ...]:
    return tuple(value)  # type: ignore[arg-type]


def _reshape(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    return reshape_factors(shapes[0], _ints(attrs["shape"]))


def _permute(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    d = names(len(shapes[0]))
    return f"{' '.join(d)} -> {' '.join(d[i] for i in _ints(attrs['dims']))}", {}


def _expand(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    target, source = _ints(attrs["shape"]), shapes[0]
    d = names(len(target))
    lead = len(target) - len(source)
    left = ["1" if source[i] == 1 and target[lead + i] != 1 else d[lead + i] for i in range(len(source))]
    return f"{' '.join(left)} -> {' '.join(d)}", dict(zip(d, target, strict=True))


def slice_length(attrs: Attrs) -> int:
    start, stop, step = int(attrs["start"]), int(attrs["stop"]), int(attrs["step"])  # type: ignore[arg-type]
    return max(0, -(-(stop - start) // step))


def _slice(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    """A slice that is one of q equal blocks keeps what is inside a block: `(q o) -> o`. Others are fixed."""
    d, dim, length = names(len(shapes[0])), int(attrs["dim"]), slice_length(attrs)  # type: ignore[arg-type]
    extent, start = shapes[0][dim], int(attrs["start"])  # type: ignore[arg-type]
    left, right = list(d), list(d)
    if attrs["step"] == 1 and length and extent % length == 0 and start % length == 0:
        left[dim], right[dim] = "(q! o)", "o"
        return f"{' '.join(left)} -> {' '.join(right)}", {"q": extent // length, "o": length}
    left[dim], right[dim] = "x!", "y!"
    return f"{' '.join(left)} -> {' '.join(right)}", {"y": length}


def _local_slice(attrs: Attrs, shapes: LocalShapes) -> Attrs:
    dim = int(attrs["dim"])  # type: ignore[arg-type]
    whole, part = shapes.operands[0][dim], shapes.local_operands[0][dim]
    return {**attrs, "start": attrs["start"] * part // whole, "stop": attrs["stop"] * part // whole}  # type: ignore[operator]


def _concat(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    """Equal pieces are the blocks of the result: `o, o -> (n o)`. Unequal ones are fixed."""
    d, dim = names(len(shapes[0])), int(attrs["dim"])  # type: ignore[arg-type]
    extents = [shape[dim] for shape in shapes]
    result = list(d)
    if len(set(extents)) == 1:
        result[dim] = f"(n! {d[dim]})"
        return f"{', '.join([' '.join(d)] * len(shapes))} -> {' '.join(result)}", {"n": len(shapes)}
    pieces = [[*d[:dim], f"x{i}!", *d[dim + 1 :]] for i in range(len(shapes))]
    result[dim] = "y!"
    return f"{', '.join(map(' '.join, pieces))} -> {' '.join(result)}", {"y": sum(extents)}


def _pad(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    pads = _ints(attrs["pads"])
    d = names(len(shapes[0]))
    left = [n if pads[2 * i] == pads[2 * i + 1] == 0 else f"x{i}!" for i, n in enumerate(d)]
    right = [n if pads[2 * i] == pads[2 * i + 1] == 0 else f"y{i}!" for i, n in enumerate(d)]
    sizes = {f"y{i}": shapes[0][i] + pads[2 * i] + pads[2 * i + 1] for i in range(len(d)) if right[i] != d[i]}
    return f"{' '.join(left)} -> {' '.join(right)}", sizes


def _flip(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    d = [f"{n}!" if i in _ints(attrs["dims"]) else n for i, n in enumerate(names(len(shapes[0])))]
    return f"{' '.join(d)} -> {' '.join(d)}", {}


def _full(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    shape = _ints(attrs["shape"])
    return f"-> {' '.join(names(len(shape)))}", dict(zip(names(len(shape)), shape, strict=True))


def _arange(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    return "-> n!", {"n": slice_length(attrs)}


def _np_slice(x: np.ndarray, dim: int, start: int, stop: int, step: int) -> np.ndarray:
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


def _np_pad(x: np.ndarray, pads: tuple[int, ...], value: float) -> np.ndarray:
    return np.pad(x, list(zip(pads[::2], pads[1::2], strict=True)), constant_values=value)


ROWS = [
    Row("reshape", _reshape, lambda x, shape: x.reshape(shape), "{0}.reshape({shape})",
        linear_in=((0,),), localize=local_result_shape, view=True),
    Row("permute", _permute, lambda x, dims: x.transpose(dims), "{0}.permute({dims})", linear_in=((0,),), view=True),
    Row("expand", _expand, lambda x, shape: np.broadcast_to(x, shape), "{0}.expand({shape})",
        linear_in=((0,),), localize=local_result_shape, view=True),
    Row("slice", _slice, _np_slice, "rt.slice({0}, {dim}, {start}, {stop}, {step})",
        linear_in=((0,),), localize=_local_slice, view=True),
    Row("contiguous", "... -> ...", np.ascontiguousarray, "{0}.contiguous()", linear_in=((0,),)),
    Row("concat", _concat, lambda *xs, dim: np.concatenate(xs, dim), "torch.cat([{*}], dim={dim})"),
    Row("pad", _pad, _np_pad, "rt.pad({0}, {pads}, {value})"),
    Row("flip", _flip, lambda x, dims: np.flip(x, dims), "{0}.flip({dims})", linear_in=((0,),)),
    Row("full", _full, lambda shape, value, dtype: np.full(shape, value, dtype),
        "torch.full({shape}, {value}, dtype=torch.{dtype}, device=rt.device())", dtype=attr_dtype, localize=local_result_shape),
    Row("arange", _arange, lambda start, stop, step, dtype: np.arange(start, stop, step, dtype),
        "torch.arange({start}, {stop}, {step}, dtype=torch.{dtype}, device=rt.device())", dtype=attr_dtype),
]  # fmt: skip
