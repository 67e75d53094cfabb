"""Sums of products: where the FLOPs are, and where splitting a summed factor gives partial sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.pcg.attrs import Attrs, integer, integers
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape
from shardwright.pcg.row import LocalShapes, Row
from shardwright.pcg.rows.structural import FactorText


def conv_extent(size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    """Return the output size of a convolution or pooling window along one spatial dimension."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _conv(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    """Return the factors of a convolution over two or three spatial dimensions."""
    (x, w), groups = shapes, integer(attrs, "groups")
    stride, padding, dilation = (integers(attrs, key) for key in ("stride", "padding", "dilation"))
    rank = len(stride)
    if len(x) != rank + 2 or len(w) != rank + 2 or groups < 1 or w[0] % groups or x[1] != groups * w[1]:
        raise GraphError(f"conv{rank}d of {list(x)} with weight {list(w)} in {groups} groups; they do not fit together")
    if not len(padding) == len(dilation) == rank in (2, 3):
        raise GraphError(
            f"stride, padding and dilation are {stride}, {padding} and {dilation}; give each dimension one"
        )
    before, kernel, after = (" ".join(f"{n}!" for n in names[:rank]) for names in ("hwd", "pqr", "yxz"))
    sizes = {n: conv_extent(x[2 + i], w[2 + i], stride[i], padding[i], dilation[i]) for i, n in enumerate("yxz"[:rank])}
    return f"b (g c) {before}, (g o) c {kernel} -> b (g o) {after}", {"g": groups, **sizes}


def local_groups(attrs: Attrs, shapes: LocalShapes) -> Attrs:
    """Return the attributes with the number of groups that a device's channels fall into."""
    return {**attrs, "groups": shapes.local_operands[0][1] // shapes.local_operands[1][1]}


def windows(
    x: np.ndarray, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int] = (1, 1, 1)
) -> np.ndarray:
    """Return every window over the last dimensions of [b, c, h, w], as [b, c, y, x, kernel_h, kernel_w]."""
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=False)]
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, 2 + len(kernel))))
    steps = (*stride, *dilation[: len(kernel)])
    return view[(slice(None), slice(None), *(slice(None, None, step) for step in steps))]


def _np_conv(
    x: np.ndarray, w: np.ndarray, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> np.ndarray:
    v = windows(np.pad(x, [(0, 0), (0, 0), *((n, n) for n in padding)]), w.shape[2:], stride, dilation)
    batch, _, *extents = v.shape[: 2 + len(stride)]
    v = v.reshape(batch, groups, -1, *v.shape[2:])
    w = w.reshape(groups, -1, *w.shape[1:])
    out, kernel = "yxz"[: len(stride)], "pqr"[: len(stride)]
    y = np.einsum(f"bgc{out}{kernel},goc{kernel}->bgo{out}", v, w, optimize=True)
    return y.reshape(batch, -1, *extents)


def _np_grouped_mm(x: np.ndarray, w: np.ndarray, ends: np.ndarray) -> np.ndarray:
    out = np.zeros((x.shape[0], w.shape[2]), x.dtype)
    start = 0
    for expert, end in enumerate(np.asarray(ends).astype(int)):
        out[start:end] = x[start:end] @ w[expert]
        start = end
    return out


ROWS = [
    Row("linear", "... i, o i -> ... o", lambda x, w: x @ w.T, "F.linear({0}, {1})",
        linear_in=((0,), (1,)), fresh=True, saves=(0, 1), contraction=True, autocast="low", doc="x wᵀ"),
    Row("matmul", "... m k, ... k n -> ... m n", np.matmul, "{0} @ {1}",
        linear_in=((0,), (1,)), fresh=True, saves=(0, 1), contraction=True, autocast="low"),
    Row("conv2d", _conv, _np_conv, "F.conv2d({0}, {1}, None, {stride}, {padding}, {dilation}, {groups})",
        free={"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)},
        linear_in=((0,), (1,)), localize=local_groups, fresh=True, saves=(0, 1), joint=True, contraction=True,
        uncounted=("h", "w"), autocast="low"),
    Row("conv3d", _conv, _np_conv, "F.conv3d({0}, {1}, None, {stride}, {padding}, {dilation}, {groups})",
        free={"stride": (1, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1)},
        linear_in=((0,), (1,)), localize=local_groups, fresh=True, saves=(0, 1), joint=True, contraction=True,
        uncounted=("h", "w", "d"), autocast="low"),
    Row("grouped_mm", "t! i, e! i o, e! -> t! o", _np_grouped_mm, "rt.grouped_mm({0}, {1}, {2})",
        linear_in=((0,), (1,)), fresh=True, saves=(0, 1), contraction=True, uncounted=("e",),
        autocast="low", doc="rows of x, in groups that end at `ends`, each group times its own matrix"),
]  # fmt: skip
