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


def _conv2d(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    (x, w), groups = shapes, integer(attrs, "groups")
    stride, padding, dilation = (integers(attrs, key, 2) for key in ("stride", "padding", "dilation"))
    if len(x) != 4 or len(w) != 4 or groups < 1 or w[0] % groups or x[1] != groups * w[1]:
        raise GraphError(f"conv2d of {list(x)} with weight {list(w)} in {groups} groups; they do not fit together")
    y, x_ = (conv_extent(x[2 + i], w[2 + i], stride[i], padding[i], dilation[i]) for i in range(2))
    sizes = {"g": groups, "y": y, "x": x_}
    return "b (g c) h! w!, (g o) c p! q! -> b (g o) y! x!", sizes


def local_groups(attrs: Attrs, shapes: LocalShapes) -> Attrs:
    """Return the attributes with the number of groups that a device's channels fall into."""
    return {**attrs, "groups": shapes.local_operands[0][1] // shapes.local_operands[1][1]}


def windows(
    x: np.ndarray, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int] = (1, 1)
) -> np.ndarray:
    """Return every window over the last two dimensions of [b, c, h, w], as [b, c, y, x, kernel_h, kernel_w]."""
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=(2, 3))
    return view[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def _np_conv2d(
    x: np.ndarray, w: np.ndarray, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> np.ndarray:
    x = np.pad(x, [(0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2])
    v = windows(x, w.shape[2:], stride, dilation)
    b, _, height, width, kh, kw = v.shape
    v = v.reshape(b, groups, -1, height, width, kh, kw)
    w = w.reshape(groups, -1, *w.shape[1:])
    return np.einsum("bgcyxpq,gocpq->bgoyx", v, w, optimize=True).reshape(b, -1, height, width)


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
    Row("conv2d", _conv2d, _np_conv2d, "F.conv2d({0}, {1}, None, {stride}, {padding}, {dilation}, {groups})",
        free={"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)},
        linear_in=((0,), (1,)), localize=local_groups, fresh=True, saves=(0, 1), joint=True, contraction=True,
        outside=("h", "w"), autocast="low"),
    Row("grouped_mm", "t! i, e! i o, e! -> t! o", _np_grouped_mm, "rt.grouped_mm({0}, {1}, {2})",
        linear_in=((0,), (1,)), fresh=True, saves=(0, 1), contraction=True, outside=("e",),
        autocast="low", doc="rows of x, in groups that end at `ends`, each group times its own matrix"),
]  # fmt: skip
