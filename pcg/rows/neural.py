"""Operators that networks use whole: normalization, attention, pooling, dropout, cross-entropy."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt

import numpy as np

from shardwright.pcg.attrs import Attrs, integer, integers
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape
from shardwright.pcg.row import Row, first_dtype, float_dtype
from shardwright.pcg.rows.contractions import conv_extent, windows
from shardwright.pcg.rows.reductions import _np_log_softmax, _np_softmax
from shardwright.pcg.rows.structural import FactorText, names


def _norm(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    """Return the factors of a normalization; its statistics fix the trailing dimensions, which the weight has too."""
    n = integer(attrs, "normalized_dims")
    if not 1 <= n <= len(shapes[0]):
        raise GraphError(f"attribute 'normalized_dims' is {n} for a tensor of rank {len(shapes[0])}")
    lead, tail = names(len(shapes[0]) - n), [f"h{i}!" for i in range(n)]
    whole = " ".join([*lead, *tail])
    return f"{', '.join([whole, *[' '.join(tail)] * (len(shapes) - 1)])} -> {whole}", {}


def _np_layer_norm(x: np.ndarray, *affine: np.ndarray, normalized_dims: int, eps: float) -> np.ndarray:
    axes = tuple(range(x.ndim - normalized_dims, x.ndim))
    y = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)
    y = y * affine[0] if affine else y
    return y + affine[1] if len(affine) > 1 else y


def _np_rms_norm(x: np.ndarray, *affine: np.ndarray, normalized_dims: int, eps: float) -> np.ndarray:
    axes = tuple(range(x.ndim - normalized_dims, x.ndim))
    y = x / np.sqrt((x * x).mean(axes, keepdims=True) + eps)
    return y * affine[0] if affine else y


def _sdpa(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    """Return the factors of attention; query heads `(h r)` share key heads `h`."""
    q, k = shapes[0], shapes[1]
    lead = [f"b{i}" for i in range(len(q) - 3)]
    heads, rows = "(h r)", "q"
    sides = [[*lead, heads, rows, "d!"], [*lead, "h", "k!", "d!"], [*lead, "h", "k!", "e!"]]
    if len(shapes) == 4:
        mask, full = shapes[3], [*lead, heads, rows, "k!"]
        shape = (*q[:-1], k[-2])
        sides.append(
            ["1" if extent == 1 else full[len(full) - len(mask) + i] for i, extent in enumerate(mask)]
            if all(m in (1, s) for m, s in zip(mask[::-1], shape[::-1], strict=False))
            else ["?"]
        )
    result = " ".join([*lead, heads, rows, "e!"])
    return f"{', '.join(map(' '.join, sides))} -> {result}", {"h": k[-3], "r": q[-3] // k[-3]}


def _np_sdpa(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *mask: np.ndarray, causal: bool, scale: float | None, offset: int = 0,
    step: int = 1,
) -> np.ndarray:  # fmt: skip
    """Compute attention. A causal query in row i sees the keys up to place i · `step` + `offset`."""
    repeat = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, repeat, -3), np.repeat(v, repeat, -3)
    scores = q @ np.swapaxes(k, -1, -2) * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        last = offset + step * np.arange(q.shape[-2])
        scores = np.where(np.arange(k.shape[-2]) <= last[:, None], scores, -np.inf)
    for m in mask:
        scores = np.where(m, scores, -np.inf) if m.dtype == bool else scores + m
    empty = np.isneginf(scores.max(axis=-1, keepdims=True))  # rows without a key give zeros
    return np.where(empty, 0, _np_softmax(np.where(empty, 0, scores), -1)) @ v


def _pool(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    kernel, stride, padding = (integers(attrs, key, 2) for key in ("kernel", "stride", "padding"))
    y, x = (conv_extent(shapes[0][2 + i], kernel[i], stride[i], padding[i]) for i in range(2))
    return "b c h! w! -> b c y! x!", {"y": y, "x": x}


def _np_pool(
    x: np.ndarray, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], average: bool
) -> np.ndarray:
    pads = [(0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2]
    v = windows(np.pad(x, pads, constant_values=0 if average else -np.inf), kernel, stride)
    return v.mean((-1, -2)) if average else v.max((-1, -2))


def _np_max_pool(x: np.ndarray, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> np.ndarray:
    return _np_pool(x, kernel, stride, padding, False)


def _np_avg_pool(x: np.ndarray, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> np.ndarray:
    return _np_pool(x, kernel, stride, padding, True)


def _adaptive(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    y, x = integers(attrs, "size", 2)
    return "b c h! w! -> b c y! x!", {"y": y, "x": x}


def _np_adaptive_avg_pool(x: np.ndarray, size: Sequence[int]) -> np.ndarray:
    def cuts(extent: int, parts: int) -> list[slice]:
        return [slice(i * extent // parts, -(-(i + 1) * extent // parts)) for i in range(parts)]

    rows = [[x[:, :, a, b].mean((2, 3)) for b in cuts(x.shape[3], size[1])] for a in cuts(x.shape[2], size[0])]
    return np.stack([np.stack(r, -1) for r in rows], -2)


def dropout_mask(shape: Shape, p: float, seed: int) -> np.ndarray:
    """Return the reference generator's keep-mask, which depends only on the seed and the global index."""
    return np.random.default_rng(seed).random(shape) >= p


def _np_dropout(
    x: np.ndarray, p: float, seed: int, shape: Shape | None = None, shard: tuple[np.ndarray, ...] = ()
) -> np.ndarray:
    """Apply dropout. `seed` numbers the draws of a program; a device draws the global mask and takes its `shard`."""
    mask = dropout_mask(shape or x.shape, p, seed)
    local_mask = mask[shard] if shard else mask
    return x * local_mask / (1 - p) if p < 1 else x * 0


def _cross_entropy(shapes: Sequence[Shape], attrs: Attrs) -> FactorText:
    d = names(len(shapes[1]), "n")
    logits = [*d[:1], "v!", *d[1:]] if d else ["v!"]
    return f"{' '.join(logits)}, {' '.join(d)} -> ", {}


def _np_cross_entropy_sum(
    logits: np.ndarray, target: np.ndarray, ignore_index: int, label_smoothing: float
) -> np.ndarray:
    axis = 1 if target.ndim else 0
    logp = _np_log_softmax(logits, axis)
    counted = target != ignore_index
    picked = np.take_along_axis(logp, np.expand_dims(np.where(counted, target, 0), axis), axis).squeeze(axis)
    loss = -(1 - label_smoothing) * picked - label_smoothing * logp.mean(axis)
    return np.where(counted, loss, 0).sum()


_WINDOW = {"stride": (1, 1), "padding": (0, 0)}
ROWS = [
    Row("layer_norm", _norm, _np_layer_norm, "rt.layer_norm({eps}, {normalized_dims}, {*})", dtype=first_dtype,
        free={"eps": 1e-5}, rounds=True, saves=(0, 1, 2), autocast="wide", flops_per_element=8),
    Row("rms_norm", _norm, _np_rms_norm, "rt.rms_norm({eps}, {normalized_dims}, {*})", dtype=first_dtype,
        free={"eps": 1e-5}, rounds=True, saves=(0, 1), autocast="wide", flops_per_element=6),
    Row("sdpa", _sdpa, _np_sdpa, "rt.sdpa({causal}, {scale}, {offset}, {*})", dtype=first_dtype,
        free={"scale": 0.5}, rounds=True, offset="q", offset_at=(0, -2), spaced=True, travels=(1, 2),
        saves=(0, 1, 2, "result", "log_sum"), contraction=True, uncounted=("e",), passes=2, autocast="low",
        doc="softmax(q kᵀ · scale + mask) v"),
    Row("max_pool2d", _pool, _np_max_pool, "F.max_pool2d({0}, {kernel}, {stride}, {padding})", free=_WINDOW,
        saves=(0, "index"), flops_per_element=9),
    Row("avg_pool2d", _pool, _np_avg_pool, "F.avg_pool2d({0}, {kernel}, {stride}, {padding})", free=_WINDOW,
        rounds=True, linear_in=((0,),), fresh=True, saves=(0,), joint=True, flops_per_element=9),
    Row("adaptive_avg_pool2d", _adaptive, _np_adaptive_avg_pool, "F.adaptive_avg_pool2d({0}, {size})",
        rounds=True, linear_in=((0,),), fresh=True, saves=(0,), joint=True),
    Row("dropout", "... -> ...", _np_dropout, "rt.dropout({0}, {p}, {draw}, {shard})", random=True, rounds=True,
        saves=("mask",), flops_per_element=4),
    Row("cross_entropy_sum", _cross_entropy, _np_cross_entropy_sum,
        "rt.cross_entropy_sum({0}, {1}, {ignore_index}, {label_smoothing})", dtype=float_dtype,
        free={"ignore_index": -100, "label_smoothing": 0.25}, indexes={1: (0, 1)}, fresh=True, rounds=True,
        saves=(1, "inside"), inside=lambda shapes: prod(shapes.local_operands[0]), autocast="wide", scratch=True,
        flops_per_element=12,
        doc="the sum, not the mean, of the losses of targets other than ignore_index"),
]  # fmt: skip
