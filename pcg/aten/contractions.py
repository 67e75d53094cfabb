"""Products of matrices, and convolutions."""

from __future__ import annotations

from typing import Any

from shardwright.pcg.aten.registry import Ints, NotCovered, cast, handles, pair, require
from shardwright.pcg.aten.structure import reshape, squeeze, unsqueeze
from shardwright.pcg.builder import GraphBuilder


@handles("linear")
def _linear(b: GraphBuilder, x: str, w: str, bias: str | None = None) -> str:
    require(len(b.shape(x)) >= 1 and len(b.shape(w)) == 2)
    y = b.op("linear", x, w)
    return y if bias is None else b.op("add", y, _as(b, bias, y))


def _as(b: GraphBuilder, bias: str, product: str) -> str:
    """A bias in the dtype of the product that it is added to: one kernel computes both."""
    return cast(b, bias, b.types[product].dtype)


@handles("mm", "bmm", "matmul", "mv", "dot")
def _matmul(b: GraphBuilder, x: str, y: str) -> str:
    """A vector is a row on the left and a column on the right, and its dimension of size 1 is dropped again."""
    require(min(len(b.shape(x)), len(b.shape(y))) >= 1)
    row, column = len(b.shape(x)) == 1, len(b.shape(y)) == 1
    product = b.op("matmul", unsqueeze(b, x, 0) if row else x, unsqueeze(b, y, 1) if column else y)
    *lead, height, width = b.shape(product)
    return reshape(b, product, [*lead, *([] if row else [height]), *([] if column else [width])])


@handles("addmm", "baddbmm")
def _addmm(b: GraphBuilder, bias: str, x: str, y: str, *, beta: float = 1, alpha: float = 1) -> str:
    require((beta, alpha) == (1, 1))
    product = b.op("matmul", x, y)
    return b.op("add", product, _as(b, bias, product))


@handles("conv2d.default")
def _conv2d(b: GraphBuilder, x: str, w: str, bias: str | None = None, stride: Ints = 1, padding: Ints = 0,
            dilation: Ints = 1, groups: int = 1) -> str:  # fmt: skip
    require(len(b.shape(x)) == 4 and len(b.shape(w)) == 4)
    y = b.op("conv2d", x, w, stride=pair(stride), padding=pair(padding), dilation=pair(dilation), groups=groups)
    return y if bias is None else b.op("add", y, reshape(b, _as(b, bias, y), (1, b.shape(bias)[0], 1, 1)))


@handles("convolution")
def _convolution(b: GraphBuilder, x: str, w: str, bias: str | None, stride: Ints, padding: Ints, dilation: Ints,
                 transposed: bool, output_padding: Ints, groups: int) -> str:  # fmt: skip
    """In two dimensions, or in one, which is two of which the first has size 1."""
    require(not transposed)
    if len(b.shape(w)) != 3:
        return _conv2d(b, x, w, bias, stride, padding, dilation, groups)
    stride, padding, dilation = ((usual, pair(n)[1]) for usual, n in ((1, stride), (0, padding), (1, dilation)))
    y = _conv2d(b, unsqueeze(b, x, -2), unsqueeze(b, w, -2), bias, stride, padding, dilation, groups)
    return squeeze(b, y, -2)


@handles("_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped_mm(
    b: GraphBuilder, x: str, w: str, ends: str | None = None, bias: str | None = None, dtype: Any = None
) -> str:
    if ends is None or bias is not None or dtype is not None or (len(b.shape(x)), len(b.shape(w))) != (2, 3):
        raise NotCovered
    return b.op("grouped_mm", x, w, ends)
