"""Images and volumes: pooling, resampling, padding by what is there, patches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.pcg.aten.reductions import mean
from shardwright.pcg.aten.registry import Handler, Ints, cast, dimension, handles, pair, require
from shardwright.pcg.aten.structure import cat, constant_pad, expand, flip, part, reshape, squeeze, unsqueeze
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.rows.contractions import conv_extent
from shardwright.pcg.types import is_float

# ---- pooling ----


def _several(value: Ints, count: int) -> tuple[int, ...]:
    """Return a value for each of several dimensions; a single number counts for all."""
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values * count if len(values) == 1 else values)


def _overhang(extent: int, kernel: int, stride: int, padding: int) -> int:
    """Return how far the last window reaches beyond the padding where a part of a window counts (`ceil_mode`)."""
    count = -(-(extent + 2 * padding - kernel) // stride) + 1
    count -= (count - 1) * stride >= extent + padding  # no window begins in the padding behind
    return max((count - 1) * stride + kernel - extent - 2 * padding, 0)


def _pooled(b: GraphBuilder, row: str, x: str, kernel: Ints, stride: Ints, padding: Ints) -> str:
    """Pool the last two dimensions of x [c, h, w] or [b, c, h, w]; of a volume, by planes and then by depth."""
    sizes = [_several(v, len(_several(kernel, 2))) for v in (kernel, stride, padding)]
    if len(sizes[0]) == 3:
        return _volume(b, row, x, *sizes)
    if len(b.shape(x)) == 3:
        return squeeze(b, _pooled(b, row, unsqueeze(b, x, 0), kernel, stride, padding), 0)
    require(len(b.shape(x)) == 4 and is_float(b.types[x].dtype))
    attrs = dict(zip(("kernel", "stride", "padding"), map(pair, sizes), strict=True))
    return b.op(row, x, **attrs)


def _volume(b: GraphBuilder, row: str, x: str, *sizes: Sequence[int]) -> str:
    *lead, depth, height, width = b.shape(x)
    planes = reshape(b, x, (math.prod(lead[:-1]), lead[-1] * depth, height, width))
    planes = _pooled(b, row, planes, *(v[1:] for v in sizes))
    height, width = b.shape(planes)[2:]
    columns = reshape(b, planes, (math.prod(lead[:-1]), lead[-1], depth, height * width))
    y = _pooled(b, row, columns, *((v[0], n) for v, n in zip(sizes, (1, 1, 0), strict=True)))
    return reshape(b, y, (*lead, b.shape(y)[2], height, width))


def _overhangs(b: GraphBuilder, x: str, kernel: Ints, stride: Ints, padding: Ints) -> list[int]:
    """Return the elements that `ceil_mode` needs behind each dimension, as pads from the last dimension."""
    count = 3 if not isinstance(kernel, int) and len(kernel) == 3 else 2
    window = zip(b.shape(x)[-count:], *(_several(v, count) for v in (kernel, stride, padding)), strict=True)
    return [n for numbers in reversed(list(window)) for n in (0, _overhang(*numbers))]


@handles("max_pool2d")
def _max_pool(b: GraphBuilder, x: str, kernel: Ints, stride: Ints = (), padding: Ints = 0, dilation: Ints = 1,
              ceil: bool = False) -> str:  # fmt: skip
    require(set(_several(dilation, 1)) == {1} and is_float(b.types[x].dtype))
    stride = stride or kernel
    if ceil:
        x = constant_pad(b, x, _overhangs(b, x, kernel, stride, padding), -math.inf)
    return _pooled(b, "max_pool2d", x, kernel, stride, padding)


@handles("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool_with_indices(b: GraphBuilder, x: str, kernel: Ints, stride: Ints = (), padding: Ints = 0,
                           dilation: Ints = 1, ceil: bool = False) -> tuple[str, None]:  # fmt: skip
    return (_max_pool(b, x, kernel, stride, padding, dilation, ceil), None)


@handles("avg_pool2d", "avg_pool3d")
def _avg_pool(b: GraphBuilder, x: str, kernel: Ints, stride: Ints = (), padding: Ints = 0, ceil: bool = False,
              count_padding: bool = True, divisor: int | None = None) -> str:  # fmt: skip
    """Append means of windows. Where not all of a window counts, its mean is divided by the mean of what counts."""
    require(is_float(b.types[x].dtype))
    stride, count = stride or kernel, 3 if not isinstance(kernel, int) and len(kernel) == 3 else 2
    behind = _overhangs(b, x, kernel, stride, padding) if ceil else [0] * (2 * count)
    inside = [n for size in reversed(_several(padding, count)) for n in (size, size)]
    total = [a + c for a, c in zip(inside, behind, strict=True)]
    ones = b.op("full", shape=(*(1,) * (len(b.shape(x)) - count), *b.shape(x)[-count:]), value=1.0,
                dtype=b.types[x].dtype)  # fmt: skip
    if divisor is not None or not any(behind if count_padding else total):
        y = _pooled(b, "avg_pool2d", constant_pad(b, x, behind), kernel, stride, padding)
        return y if divisor is None else b.op("mul", y, math.prod(_several(kernel, count)) / divisor)
    counted = constant_pad(b, ones, inside, 1 if count_padding else 0)
    counted = constant_pad(b, counted, behind)
    sums, counts = (_pooled(b, "avg_pool2d", v, kernel, stride, 0) for v in (constant_pad(b, x, total), counted))
    return b.op("div", sums, counts)


@handles("adaptive_avg_pool2d", "_adaptive_avg_pool2d")
def _adaptive(b: GraphBuilder, x: str, size: Ints) -> str:
    if pair(size) == (1, 1):
        return mean(b, x, (-2, -1), True)
    if len(b.shape(x)) == 3:
        return squeeze(b, _adaptive(b, unsqueeze(b, x, 0), size), 0)
    return b.op("adaptive_avg_pool2d", x, size=pair(size))


def _equal_windows(b: GraphBuilder, x: str, size: Ints, count: int) -> list[int]:
    """Return the size of windows that lie side by side; others are not covered."""
    extents, wanted = b.shape(x)[-count:], _several(size, count)
    require(all(n and extent % n == 0 for extent, n in zip(extents, wanted, strict=True)))
    return [extent // n for extent, n in zip(extents, wanted, strict=True)]


@handles("adaptive_avg_pool3d", "_adaptive_avg_pool3d")
def _adaptive_volume(b: GraphBuilder, x: str, size: Ints) -> str:
    return _avg_pool(b, x, _equal_windows(b, x, size, 3))


handles("adaptive_max_pool2d")(lambda b, x, size: (_max_pool(b, x, _equal_windows(b, x, size, 2)), None))
handles("adaptive_max_pool3d")(lambda b, x, size: (_max_pool(b, x, _equal_windows(b, x, size, 3)), None))

# ---- resampling ----


def _sizes(
    b: GraphBuilder, x: str, sizes: Sequence[int] | None, factors: Sequence[float] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the extents behind the channels, before and after."""
    extents = b.shape(x)[2:]
    return extents, tuple(sizes or [int(n * factor) for n, factor in zip(extents, factors or (), strict=True)])


@handles("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def _nearest(b: GraphBuilder, x: str, sizes: Sequence[int] | None, factors: Sequence[float] | None) -> str:
    """Repeat every element by a whole factor along each dimension behind the channels, or look the nearest one up.

    Torch finds the element by a product. From a factor of 41 on it may lie below the whole number in fp32, and torch's
    own gradient goes elsewhere.
    """
    extents, wanted = _sizes(b, x, sizes, factors)
    require(all(n and size <= 40 * n for size, n in zip(wanted, extents, strict=True)))
    times = [size // n for size, n in zip(wanted, extents, strict=True)]
    if any(size % n for size, n in zip(wanted, extents, strict=True)) or (
        factors is not None and list(factors) != times
    ):
        return _looked_up(b, x, wanted, factors)
    lead = b.shape(x)[:2]
    single = reshape(b, x, (*lead, *(n for size in extents for n in (size, 1))))
    wide = expand(b, single, (*lead, *(n for each in zip(extents, times, strict=True) for n in each)))
    return reshape(b, wide, (*lead, *wanted))


def _looked_up(b: GraphBuilder, x: str, wanted: Sequence[int], factors: Sequence[float] | None) -> str:
    dtype = "float64" if b.types[x].dtype == "float64" else "float32"
    for i, (before, after) in enumerate(zip(b.shape(x)[2:], wanted, strict=True)):
        step = 1 / factors[i] if factors else before / after
        places = b.op("floor", b.op("mul", b.op("arange", start=0, stop=after, step=1, dtype=dtype), step))
        index = b.op("minimum", cast(b, places, "int64"), before - 1)
        x = b.op("index", x, index, dim=2 + i)
    return x


def _resampled(interpolation: str, *, antialias: bool = False) -> Handler:
    def handler(b: GraphBuilder, x: str, sizes: Sequence[int] | None, align: bool, factors: Sequence[float] | None,
                *more: float | None) -> str:  # fmt: skip
        require(is_float(b.types[x].dtype) and not more and not (align and antialias))
        size, scales = _sizes(b, x, sizes, factors)[1], tuple(map(float, factors)) if factors else None
        attrs = {"interpolation": interpolation, "align": align, "antialias": antialias}
        return b.op("resample", x, size=size, scales=scales, **attrs)

    return handler


handles("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")(_resampled("linear"))
handles("upsample_bicubic2d.vec")(_resampled("cubic"))


def _smoothed(interpolation: str) -> Handler:
    """Return the handler of resampling against aliases, for which torch has a factor for each dimension, or none."""
    resampled = _resampled(interpolation, antialias=True)

    def handler(b: GraphBuilder, x: str, sizes: Sequence[int], align: bool, *factors: float | None) -> str:
        require(all(n is None for n in factors) or all(int(n * factor) == size for n, factor, size in zip(
            b.shape(x)[2:], (f or 0 for f in factors), sizes, strict=True)))  # fmt: skip
        return resampled(b, x, sizes, align, None if None in factors else factors)

    return handler


handles("_upsample_bilinear2d_aa.default")(_smoothed("linear"))
handles("_upsample_bicubic2d_aa.default")(_smoothed("cubic"))


@handles("pixel_shuffle")
def _pixel_shuffle(b: GraphBuilder, x: str, factor: int) -> str:
    """Lay the channels of each pixel out as `factor` by `factor` pixels."""
    *lead, channels, height, width = b.shape(x)
    n, fine = len(lead), channels // factor**2
    y = reshape(b, x, (*lead, fine, factor, factor, height, width))
    y = b.op("permute", y, dims=(*range(n + 1), n + 3, n + 1, n + 4, n + 2))
    return reshape(b, y, (*lead, fine, height * factor, width * factor))


@handles("pixel_unshuffle")
def _pixel_unshuffle(b: GraphBuilder, x: str, factor: int) -> str:
    *lead, channels, height, width = b.shape(x)
    n = len(lead)
    y = reshape(b, x, (*lead, channels, height // factor, factor, width // factor, factor))
    y = b.op("permute", y, dims=(*range(n + 1), n + 2, n + 4, n + 1, n + 3))
    return reshape(b, y, (*lead, channels * factor**2, height // factor, width // factor))


@handles("channel_shuffle")
def _channel_shuffle(b: GraphBuilder, x: str, groups: int) -> str:
    batch, channels, *rest = b.shape(x)
    y = reshape(b, x, (batch, groups, channels // groups, *rest))
    return reshape(b, b.op("permute", y, dims=(0, 2, 1, *range(3, 3 + len(rest)))), b.shape(x))


# ---- padding, patches ----


@handles("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def _reflected(b: GraphBuilder, x: str, pads: Sequence[int]) -> str:
    """Pad each dimension by what stands before or behind its edge, the other way round."""
    for dim, before, after in _edges(b, x, pads):
        extent = b.shape(x)[dim]
        front = [flip(b, part(b, x, dim, 1, 1 + before), (dim,))] if before > 0 else []
        back = [flip(b, part(b, x, dim, extent - 1 - after, extent - 1), (dim,))] if after > 0 else []
        x = cat(b, [*front, x, *back], dim)
    return constant_pad(b, x, [min(n, 0) for n in pads])


@handles("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _replicated(b: GraphBuilder, x: str, pads: Sequence[int]) -> str:
    """Pad each dimension by copies of the element at its edge."""
    for dim, before, after in _edges(b, x, pads):
        extent, shape = b.shape(x)[dim], b.shape(x)
        ends = ((part(b, x, dim, 0, 1), before), (part(b, x, dim, extent - 1, extent), after))
        wide = [[expand(b, end, (*shape[:dim], n, *shape[dim + 1 :]))] if n > 0 else [] for end, n in ends]
        x = cat(b, [*wide[0], x, *wide[1]], dim)
    return constant_pad(b, x, [min(n, 0) for n in pads])


def _edges(b: GraphBuilder, x: str, pads: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return each dimension with the sizes to pad it by; `pads` begins with the last dimension."""
    rank = len(b.shape(x))
    return [(rank - 1 - i // 2, pads[i], pads[i + 1]) for i in range(0, len(pads), 2)]


def _window(kernel: Ints, dilation: Ints, padding: Ints, stride: Ints) -> dict[str, tuple[int, int]]:
    return {"kernel": pair(kernel), "dilation": pair(dilation), "padding": pair(padding), "stride": pair(stride)}


@handles("im2col")
def _patches(b: GraphBuilder, x: str, *window: Ints) -> str:
    if len(b.shape(x)) == 3:
        return squeeze(b, _patches(b, unsqueeze(b, x, 0), *window), 0)
    return b.op("patches", x, **_window(*window))


@handles("col2im")
def _from_patches(b: GraphBuilder, x: str, size: Ints, *window: Ints) -> str:
    if len(b.shape(x)) == 2:
        return squeeze(b, _from_patches(b, unsqueeze(b, x, 0), size, *window), 0)
    return b.op("from_patches", x, size=pair(size), **_window(*window))


@handles("unfold")
def _frames(b: GraphBuilder, x: str, dim: int, size: int, step: int) -> str:
    """Look up every `step`-th run of `size` elements of a dimension; the run is a new last dimension."""
    if not b.shape(x):
        return reshape(b, x, (size,))
    dim = dimension(b, x, dim)
    count = conv_extent(b.shape(x)[dim], size, step, 0)
    y = b.op("index", x, _places(b, count, size, step), dim=dim)
    rest = [d for d in range(len(b.shape(y))) if d != dim + 1]
    return b.op("permute", y, dims=(*rest, dim + 1))


@handles("unfold_backward")
def _from_frames(b: GraphBuilder, x: str, sizes: Ints, dim: int, size: int, step: int) -> str:
    """Add runs up where they overlap, as `istft` does: the adjoint of `unfold`. Other dimensions are broadcast."""
    shape = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    require(len(shape) > 0)
    dim, rank = dim % len(shape), len(shape)
    own, count = b.shape(x), b.shape(x)[dim]
    runs = b.op("permute", x, dims=(*range(dim + 1), rank, *range(dim + 1, rank)))
    rows = reshape(b, runs, (*own[:dim], count * size, *own[dim + 1 : rank]))
    places = reshape(b, _places(b, count, size, step), (*(1,) * dim, count * size, *(1,) * (rank - dim - 1)))
    return expand(b, b.op("scatter_sum", places, rows, dim=dim, places=shape[dim]), shape)


def _places(b: GraphBuilder, count: int, size: int, step: int) -> str:
    """Return the places of `count` runs of `size` elements, which begin `step` apart."""
    begins, inside = (b.op("arange", start=0, stop=stop, step=n, dtype="int64")
                      for stop, n in ((count * step, step), (size, 1)))  # fmt: skip
    return b.op("add", reshape(b, begins, (count, 1)), inside)
