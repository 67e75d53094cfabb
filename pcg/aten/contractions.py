"""Products of matrices, and convolutions."""

from __future__ import annotations

from typing import Any

from shardwright.pcg.aten.reductions import total
from shardwright.pcg.aten.registry import Ints, NotCovered, cast, handles, pair, require, scaled
from shardwright.pcg.aten.structure import constant_pad, flip, reshape, squeeze, unsqueeze
from shardwright.pcg.builder import GraphBuilder


@handles("linear")
def _linear(b: GraphBuilder, x: str, w: str, bias: str | None = None) -> str:
    require(len(b.shape(x)) >= 1 and len(b.shape(w)) == 2)
    y = b.op("linear", x, w)
    return y if bias is None else b.op("add", y, _as(b, bias, y))


def _as(b: GraphBuilder, bias: str, product: str) -> str:
    """Cast a bias to the dtype of the product that it is added to, because one kernel computes both."""
    return cast(b, bias, b.types[product].dtype)


@handles("mm", "bmm", "matmul", "mv", "dot")
def _matmul(b: GraphBuilder, x: str, y: str) -> str:
    """Multiply two tensors. A vector is a row on the left or a column on the right; its new dimension is dropped."""
    require(min(len(b.shape(x)), len(b.shape(y))) >= 1)
    row, column = len(b.shape(x)) == 1, len(b.shape(y)) == 1
    product = b.op("matmul", unsqueeze(b, x, 0) if row else x, unsqueeze(b, y, 1) if column else y)
    *lead, height, width = b.shape(product)
    return reshape(b, product, [*lead, *([] if row else [height]), *([] if column else [width])])


@handles("addmm", "baddbmm", "addmv")
def _add_product(b: GraphBuilder, bias: str, x: str, y: str, *, beta: float = 1, alpha: float = 1) -> str:
    return _biased(b, bias, _matmul(b, x, y), beta, alpha)


@handles("addbmm")
def _add_products(b: GraphBuilder, bias: str, x: str, y: str, *, beta: float = 1, alpha: float = 1) -> str:
    return _biased(b, bias, total(b, _matmul(b, x, y), 0), beta, alpha)


@handles("addr")
def _add_outer(b: GraphBuilder, bias: str, x: str, y: str, *, beta: float = 1, alpha: float = 1) -> str:
    return _biased(b, bias, b.op("mul", unsqueeze(b, x, 1), y), beta, alpha)


def _biased(b: GraphBuilder, bias: str, product: str, beta: float, alpha: float) -> str:
    """Append α product + β bias. As in torch, a bias with β = 0 is not read."""
    product = scaled(b, product, alpha)
    return product if beta == 0 else b.op("add", product, scaled(b, _as(b, bias, product), beta))


@handles("conv2d.default")
def _conv2d(b: GraphBuilder, x: str, w: str, bias: str | None = None, stride: Ints = 1, padding: Ints = 0,
            dilation: Ints = 1, groups: int = 1) -> str:  # fmt: skip
    require(len(b.shape(x)) == 4 and len(b.shape(w)) == 4)
    y = b.op("conv2d", x, w, stride=pair(stride), padding=pair(padding), dilation=pair(dilation), groups=groups)
    return y if bias is None else b.op("add", y, reshape(b, _as(b, bias, y), (1, b.shape(bias)[0], 1, 1)))


@handles("convolution")
def _convolution(b: GraphBuilder, x: str, w: str, bias: str | None, stride: Ints, padding: Ints, dilation: Ints,
                 transposed: bool, output_padding: Ints, groups: int) -> str:  # fmt: skip
    """Append a convolution in two or three dimensions; one in one dimension gets a first one of size 1."""
    if len(b.shape(w)) == 3:
        stride, padding, dilation, output_padding = (
            (usual, pair(n)[1]) for usual, n in ((1, stride), (0, padding), (1, dilation), (0, output_padding))
        )
        flat = unsqueeze(b, x, -2), unsqueeze(b, w, -2)
        return squeeze(
            b, _convolution(b, *flat, bias, stride, padding, dilation, transposed, output_padding, groups), -2
        )
    if len(b.shape(w)) == 5:
        require(not transposed and len(b.shape(x)) == 5)
        window = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation)}  # type: ignore[arg-type]
        y = b.op("conv3d", x, w, **window, groups=groups)
        return y if bias is None else b.op("add", y, reshape(b, _as(b, bias, y), (1, b.shape(bias)[0], 1, 1, 1)))
    if not transposed:
        return _conv2d(b, x, w, bias, stride, padding, dilation, groups)
    require((pair(dilation), groups, len(b.shape(w))) == ((1, 1), 1, 4))
    return _transposed(b, x, w, bias, pair(stride), pair(padding), pair(output_padding))


def _transposed(b: GraphBuilder, x: str, w: str, bias: str | None, stride: tuple[int, int], padding: tuple[int, int],
                output_padding: tuple[int, int]) -> str:  # fmt: skip
    """Append a transposed convolution as a plain one, with a channel per place in a stride, laid side by side:

        y[o, q · stride + r] = Σ x[c, q - a] w[c, o, a · stride + r] over c and a

    The products are as many as those of the transposed convolution.
    """
    (batch, _, *sizes), (channels, outputs, *kernel) = b.shape(x), b.shape(w)
    (s, t), (m, n) = stride, (-(-k // step) for k, step in zip(kernel, stride, strict=True))
    w = constant_pad(b, w, (0, n * t - kernel[1], 0, m * s - kernel[0]))
    w = flip(b, reshape(b, w, (channels, outputs, m, s, n, t)), (2, 4))
    w = reshape(b, b.op("permute", w, dims=(1, 3, 5, 0, 2, 4)), (outputs * s * t, channels, m, n))
    y = _conv2d(b, x, w, None, 1, (m - 1, n - 1))
    height, width = b.shape(y)[2:]
    y = b.op("permute", reshape(b, y, (batch, outputs, s, t, height, width)), dims=(0, 1, 4, 2, 5, 3))
    y, pads = reshape(b, y, (batch, outputs, height * s, width * t)), list[int]()
    for i in (1, 0):
        size = (sizes[i] - 1) * stride[i] - 2 * padding[i] + kernel[i] + output_padding[i]
        pads += [-padding[i], padding[i] + size - b.shape(y)[2 + i]]
    y = constant_pad(b, y, pads)
    return y if bias is None else b.op("add", y, reshape(b, _as(b, bias, y), (1, outputs, 1, 1)))


@handles("_grouped_mm", "transformers::grouped_mm_fallback")
def _grouped_mm(
    b: GraphBuilder, x: str, w: str, ends: str | None = None, bias: str | None = None, dtype: Any = None
) -> str:
    if ends is None or bias is not None or dtype is not None or (len(b.shape(x)), len(b.shape(w))) != (2, 3):
        raise NotCovered
    return b.op("grouped_mm", x, w, ends)
