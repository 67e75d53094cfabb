"""Operators that only move elements: bit-exact under every split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.pcg.attrs import Attrs, dimension, dimensions, get, integer, integers
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape, reshape_factors
from shardwright.pcg.row import LocalShapes, Row, attr_dtype, local_result_shape, numpy_dtype

FactorText = tuple[str, Mapping[str, int]]


def names(rank: int, prefix: str = "d") -> list[str]:
    """Return fresh factor names, one per dimension."""
    return [f"{prefix}{i}" for i in range(rank)]


def _reshape(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    return reshape_factors(shapes[0], integers(attrs, "shape"))


def _permute(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    d, dims = names(len(shapes[0])), dimensions(attrs, "dims", len(shapes[0]))
    if len(dims) != len(d):
        raise GraphError(f"attribute 'dims' is {dims}, not a permutation of {len(d)} dimensions")
    return f"{' '.join(d)} -> {' '.join(d[i] for i in dims)}", {}


def _expand(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    target, source = integers(attrs, "shape"), shapes[0]
    if len(target) < len(source):
        raise GraphError(f"expand of {list(source)} to the lower rank of {list(target)}")
    d = names(len(target))
    lead = len(target) - len(source)
    left = ["1" if source[i] == 1 and target[lead + i] != 1 else d[lead + i] for i in range(len(source))]
    return f"{' '.join(left)} -> {' '.join(d)}", dict(zip(d, target, strict=True))


def slice_length(attrs: Attrs) -> int:
    """Return how many integers range(start, stop, step) has."""
    return len(range(integer(attrs, "start"), integer(attrs, "stop"), integer(attrs, "step")))


def _slice(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    """Return the factors of a slice: `(q o) -> o` where it is one of q equal blocks. Other slices are fixed."""
    d, dim, length = names(len(shapes[0])), dimension(attrs, "dim", len(shapes[0])), slice_length(attrs)
    extent, start, stop = shapes[0][dim], integer(attrs, "start"), integer(attrs, "stop")
    if not (0 <= start <= extent and 0 <= stop <= extent):
        raise GraphError(f"slice from {start} to {stop} of dimension {dim} of {list(shapes[0])}; stay inside")
    left, right = list(d), list(d)
    if attrs["step"] == 1 and length and extent % length == 0 and start % length == 0:
        left[dim], right[dim] = "(q! o)", "o"
        return f"{' '.join(left)} -> {' '.join(right)}", {"q": extent // length, "o": length}
    left[dim], right[dim] = "x!", "y!"
    return f"{' '.join(left)} -> {' '.join(right)}", {"y": length}


def local_slice(attrs: Attrs, shapes: LocalShapes) -> Attrs:
    """Return the bounds of a device's slice of its part, scaled down from the whole dimension's."""
    dim = integer(attrs, "dim")
    whole, part = shapes.operands[0][dim], shapes.local_operands[0][dim]
    return {**attrs, **{key: integer(attrs, key) * part // whole for key in ("start", "stop") if part != whole}}


def _concat(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    """Return the factors of a concatenation: `o, o -> (n o)` for n equal pieces. Unequal pieces are fixed."""
    d, dim = names(len(shapes[0])), dimension(attrs, "dim", len(shapes[0]))
    if any(len(shape) != len(d) for shape in shapes):
        raise GraphError(f"concat of shapes {[list(shape) for shape in shapes]} of different rank")
    extents = [shape[dim] for shape in shapes]
    result = list(d)
    if len(set(extents)) == 1:
        result[dim] = f"(n! {d[dim]})"
        return f"{', '.join([' '.join(d)] * len(shapes))} -> {' '.join(result)}", {"n": len(shapes)}
    pieces = [[*d[:dim], f"x{i}!", *d[dim + 1 :]] for i in range(len(shapes))]
    result[dim] = "y!"
    return f"{', '.join(map(' '.join, pieces))} -> {' '.join(result)}", {"y": sum(extents)}


def _pad(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    d = names(len(shapes[0]))
    pads = integers(attrs, "pads", 2 * len(d))
    if any(n < 0 for n in pads):
        raise GraphError(f"attribute 'pads' is {pads}; slice instead of padding by less than nothing")
    left = [n if pads[2 * i] == pads[2 * i + 1] == 0 else f"x{i}!" for i, n in enumerate(d)]
    right = [n if pads[2 * i] == pads[2 * i + 1] == 0 else f"y{i}!" for i, n in enumerate(d)]
    sizes = {f"y{i}": shapes[0][i] + pads[2 * i] + pads[2 * i + 1] for i in range(len(d)) if right[i] != d[i]}
    return f"{' '.join(left)} -> {' '.join(right)}", sizes


def _flip(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    dims = dimensions(attrs, "dims", len(shapes[0]))
    d = [f"{n}!" if i in dims else n for i, n in enumerate(names(len(shapes[0])))]
    return f"{' '.join(d)} -> {' '.join(d)}", {}


def _full(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    get(attrs, "value")
    shape = integers(attrs, "shape")
    return f"-> {' '.join(names(len(shape)))}", dict(zip(names(len(shape)), shape, strict=True))


def _arange(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    return "-> n!", {"n": slice_length(attrs)}


def _np_slice(x: np.ndarray, dim: int, start: int, stop: int, step: int) -> np.ndarray:
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


def _np_pad(x: np.ndarray, pads: tuple[int, ...], value: float) -> np.ndarray:
    return np.pad(x, list(zip(pads[::2], pads[1::2], strict=True)), constant_values=value)


def _np_full(shape: Shape, value: float, dtype: str) -> np.ndarray:
    return np.full(shape, value, numpy_dtype(dtype))


def _np_arange(start: int, stop: int, step: int, dtype: str) -> np.ndarray:
    return np.asarray(range(start, stop, step)).astype(numpy_dtype(dtype))


ROWS = [
    Row("reshape", _reshape, lambda x, shape: x.reshape(shape), "{0}.reshape({shape})",
        linear_in=((0,),), localize=local_result_shape, view=True, moves=True),
    Row("permute", _permute, lambda x, dims: x.transpose(dims), "{0}.permute({dims})", linear_in=((0,),), view=True,
        moves=True),
    Row("expand", _expand, np.broadcast_to, "{0}.expand({shape})",
        linear_in=((0,),), localize=local_result_shape, view=True, moves=True),
    Row("slice", _slice, _np_slice, "rt.slice({0}, {dim}, {start}, {stop}, {step})",
        linear_in=((0,),), localize=local_slice, view=True, moves=True),
    Row("contiguous", "... -> ...", lambda x: x, "{0}.contiguous()", linear_in=((0,),), passes_on=True, moves=True),
    Row("concat", _concat, lambda *xs, dim: np.concatenate(xs, dim), "torch.cat([{*}], dim={dim})", moves=True),
    Row("pad", _pad, _np_pad, "rt.pad({0}, {pads}, {value})", free={"value": 1.0}),
    Row("flip", _flip, lambda x, dims: np.flip(x, dims), "{0}.flip({dims})", linear_in=((0,),), fresh=True, moves=True),  # noqa: PLW0108
    Row("full", _full, _np_full, "torch.full({shape}, {value}, dtype=torch.{dtype}, device=rt.device())",
        dtype=attr_dtype, localize=local_result_shape, free={"value": 1.0}, differentiable=False),
    Row("arange", _arange, _np_arange, "torch.arange({start}, {stop}, {step}, dtype=torch.{dtype}, device=rt.device())",
        dtype=attr_dtype, differentiable=False),
]  # fmt: skip
