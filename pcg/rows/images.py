"""Images and volumes: resampling between grids, and the patches under a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardwright.pcg.attrs import Attrs, integers
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape
from shardwright.pcg.row import Row
from shardwright.pcg.rows.contractions import conv_extent, windows
from shardwright.pcg.rows.structural import FactorText, names


def _resample(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    size = integers(attrs, "size")
    if not size or len(size) != len(shapes[0]) - 2:
        raise GraphError(
            f"attribute 'size' is {size}; give each dimension of {list(shapes[0])} behind the channels one"
        )
    before, after = names(len(size), "x"), names(len(size), "y")
    text = f"b c {' '.join(f'{n}!' for n in before)} -> b c {' '.join(f'{n}!' for n in after)}"
    return text, dict(zip(after, size, strict=True))


def _cubic(t: np.ndarray, a: float) -> np.ndarray:
    """Return Keys' cubic kernel, which is 0 from |t| = 2 on."""
    t = np.abs(t)
    near, far = ((a + 2) * t - (a + 3)) * t * t + 1, ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0))


def _linear(t: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(t), 0)


_Kernel = Callable[[np.ndarray], np.ndarray]
_KERNELS: Mapping[str, tuple[int, _Kernel, _Kernel]] = {
    "linear": (1, _linear, _linear),
    "cubic": (2, lambda t: _cubic(t, -0.75), lambda t: _cubic(t, -0.5)),
}
"""By interpolation: how far a kernel reaches, itself, and the one that is used against aliases."""


def _taps(
    before: int, after: int, interpolation: str, align: bool, factor: float | None, antialias: bool
) -> np.ndarray:
    """Return the weight of each element before in each element after, as a matrix [after, before]."""
    reach, plain, smooth = _KERNELS[interpolation]
    if align:
        step, places = (before - 1) / max(after - 1, 1), np.arange(after) * ((before - 1) / max(after - 1, 1))
    else:
        step = 1 / factor if factor else before / after
        places = (np.arange(after) + 0.5) * step - 0.5
    taps = np.zeros((after, before))
    if antialias:
        wide = max(step, 1.0)
        for row, place in enumerate(places):
            first, last = (int(place + 0.5 + side * reach * wide + 0.5) for side in (-1, 1))
            columns = np.arange(max(first, 0), min(last, before))
            weights = smooth((columns - place) / wide)
            taps[row, columns] = weights / weights.sum()
        return taps
    for offset in range(1 - reach, 1 + reach):  # beyond the edge, the element at the edge
        columns = np.floor(places).astype(int) + offset
        np.add.at(taps, (np.arange(after), np.clip(columns, 0, before - 1)), plain(places - columns))
    return taps


def _np_resample(
    x: np.ndarray, interpolation: str, size: Shape, align: bool, scales: Sequence[float] | None, antialias: bool
) -> np.ndarray:
    for i, after in enumerate(size):
        taps = _taps(x.shape[2 + i], after, interpolation, align, scales[i] if scales else None, antialias)
        x = np.moveaxis(np.tensordot(x, taps, (2 + i, 1)), -1, 2 + i)
    return x


def _places(extents: Sequence[int], attrs: Attrs) -> tuple[int, ...]:
    """Return how many windows there are along each of two dimensions of these extents."""
    window = zip(*(integers(attrs, key, 2) for key in ("kernel", "stride", "padding", "dilation")), strict=True)
    return tuple(conv_extent(extent, *numbers) for extent, numbers in zip(extents, window, strict=True))


def _patches(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    kernel = integers(attrs, "kernel", 2)
    if len(shapes[0]) != 4:
        raise GraphError(f"patches of {list(shapes[0])}; give [b, c, h, w]")
    y, x = _places(shapes[0][2:], attrs)
    return "b c h! w! -> b (c k!) l!", {"k": kernel[0] * kernel[1], "l": y * x}


def _np_patches(
    x: np.ndarray, kernel: Shape, stride: Shape, padding: Shape, dilation: Shape
) -> np.ndarray:  # fmt: skip
    v = windows(np.pad(x, [(0, 0), (0, 0), *((n, n) for n in padding)]), kernel, stride, dilation)
    return v.transpose(0, 1, 4, 5, 2, 3).reshape(x.shape[0], x.shape[1] * kernel[0] * kernel[1], -1)


def _from_patches(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    size, kernel = integers(attrs, "size", 2), integers(attrs, "kernel", 2)
    y, x = _places(size, attrs)
    if len(shapes[0]) != 3 or shapes[0][2] != y * x:
        raise GraphError(f"{list(shapes[0])} are not the {y * x} patches of an image of size {size}")
    return "b (c k!) l! -> b c h! w!", {"k": kernel[0] * kernel[1], "h": size[0], "w": size[1]}


def _np_from_patches(
    x: np.ndarray, size: Shape, kernel: Shape, stride: Shape, padding: Shape, dilation: Shape
) -> np.ndarray:
    places = np.arange((size[0] + 2 * padding[0]) * (size[1] + 2 * padding[1]))
    wide = places.reshape(1, 1, size[0] + 2 * padding[0], -1)
    at = windows(wide, kernel, stride, dilation).transpose(0, 1, 4, 5, 2, 3).ravel()
    flat = x.reshape(len(x), -1, len(at))
    out = np.zeros((places.size, *flat.shape[:2]), x.dtype)
    np.add.at(out, at, np.moveaxis(flat, 2, 0))
    out = np.moveaxis(out, 0, 2).reshape(*flat.shape[:2], *wide.shape[2:])
    return out[:, :, padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


ROWS = [
    Row("resample", _resample, _np_resample,
        "rt.resample({0}, {interpolation!r}, {size}, {align}, {scales}, {antialias})",
        free={"interpolation": "linear", "align": False, "scales": None, "antialias": False}, linear_in=((0,),),
        fresh=True, rounds=True, flops_per_element=8, doc="interpolation between the elements of a grid"),
    Row("patches", _patches, _np_patches, "F.unfold({0}, {kernel}, {dilation}, {padding}, {stride})",
        linear_in=((0,),), fresh=True, doc="what lies under each place of a window"),
    Row("from_patches", _from_patches, _np_from_patches,
        "F.fold({0}, {size}, {kernel}, {dilation}, {padding}, {stride})", linear_in=((0,),), fresh=True,
        doc="the adjoint of `patches`: what lies at each place is added up"),
]  # fmt: skip
