"""Normalization, dropout and recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.pcg.aten.constants import full
from shardwright.pcg.aten.reductions import mean, root, total
from shardwright.pcg.aten.registry import HANDLERS, Handler, cast, handles, require
from shardwright.pcg.aten.structure import reshape
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import GraphError
from shardwright.pcg.node import OPAQUE
from shardwright.pcg.precision import HALVES
from shardwright.pcg.rows.recurrent import STATES

_EPSILON, _EPSILON_DOUBLE = 2.0**-23, 2.0**-52  # for float32, in which halves are normalized too, and for float64

HANDLERS.update({
    "native_dropout": lambda b, x, p, train=True: (b.op("dropout", x, p=0 if train is False else p), None),
    # with the statistics of the batch, in training and in evaluation
    "_native_batch_norm_legit.no_stats": lambda b, x, w, bias, training, momentum, eps: (
        _standardized(b, x, *_statistics(b, x), w, bias, eps), None, None,
    ),
})  # fmt: skip


@handles("bernoulli.p")
def _bernoulli(b: GraphBuilder, x: str, p: float = 0.5, *, generator: object = None) -> str:
    """Append a mask of ones with probability p: what dropout leaves of ones. It is drawn as dropout draws."""
    require(generator is None and 0 < p < 1)
    left = b.op("dropout", full(b, b.shape(x), 1, b.default_float), p=1 - p)
    return cast(b, b.op("ne", left, 0), b.types[x].dtype)


# ---- normalization ----


@handles("layer_norm")
def _layer_norm(b: GraphBuilder, x: str, shape: Sequence[int], w: str | None = None, bias: str | None = None,
                eps: float = 1e-5, cudnn: bool = True) -> str:  # fmt: skip
    require(w is not None or bias is None)
    return b.op("layer_norm", *(v for v in (x, w, bias) if v is not None), normalized_dims=len(shape), eps=eps)


@handles("rms_norm")
def _rms_norm(b: GraphBuilder, x: str, shape: Sequence[int], w: str | None = None, eps: float | None = None) -> str:
    usual = _EPSILON_DOUBLE if b.types[x].dtype == "float64" else _EPSILON
    operands = (v for v in (x, w) if v is not None)
    return b.op("rms_norm", *operands, normalized_dims=len(shape), eps=usual if eps is None else eps)


@handles("_weight_norm_interface")
def _weight_norm(b: GraphBuilder, v: str, g: str, dim: int = 0) -> tuple[str, str]:
    """Append v · g / ‖v‖, with the norm of each slice along a dimension, and the norms."""
    require(b.types[v].dtype not in HALVES)
    rank = len(b.shape(v))
    norms = root(b, total(b, b.op("mul", v, v), [d for d in range(rank) if d != dim % rank], keepdim=True))
    return b.op("mul", v, b.op("div", g, norms)), norms


@handles("native_group_norm")
def _group_norm(b: GraphBuilder, x: str, w: str | None, bias: str | None, num_samples: int, num_channels: int,
                num_pixels: int, num_groups: int, eps: float) -> tuple[str, None, None]:  # fmt: skip
    """Normalize each group's channels as one dimension of a layer normalization, then scale and shift by channel."""
    rank, count = len(b.shape(x)), num_channels // num_groups * num_pixels
    groups = reshape(b, x, (num_samples, num_groups, count))
    y = reshape(b, b.op("layer_norm", groups, normalized_dims=1, eps=eps), b.shape(x))
    return (_affine(b, y, w, bias, rank), None, None)


@handles("_native_batch_norm_legit_no_training")
def _by_running_statistics(b: GraphBuilder, x: str, w: str | None, bias: str | None, running_mean: str,
                           running_var: str, momentum: float, eps: float) -> tuple[str, None, None]:  # fmt: skip
    _check_narrow(b, w, running_mean)
    return (_standardized(b, x, running_mean, running_var, w, bias, eps), None, None)


def _check_narrow(b: GraphBuilder, w: str | None, running: str) -> None:
    """Raise if the weights are narrower than the running statistics, which torch does not run."""
    if w is not None and b.types[w].dtype in HALVES and b.types[running].dtype not in HALVES:
        raise GraphError(
            f"torch takes no weights in {b.types[w].dtype} beside running statistics in {b.types[running].dtype}; run "
            f"the module in float32, as precision={{{b.source.module!r}: 'fp32', '*': 'bf16_params'}}"
        )


@handles("_native_batch_norm_legit_functional")
def _batch_norm(b: GraphBuilder, x: str, w: str | None, bias: str | None, running_mean: str, running_var: str,
                training: bool, momentum: float, eps: float) -> tuple[str, None, None, str, str]:  # fmt: skip
    """Normalize by statistics of the whole batch, as a single process does, and update the running ones."""
    require(training)
    _check_narrow(b, w, running_mean)
    centre, spread = _statistics(b, x)
    y = _standardized(b, x, centre, spread, w, bias, eps)
    count = math.prod(b.shape(x)) // b.shape(x)[1] // b.num_samples(x, (0,))
    unbiased = b.op("mul", b.op("detach", spread), count / max(count - 1, 1))

    def update(old: str, new: str) -> str:
        mixed = b.op("add", b.op("mul", old, 1 - momentum), b.op("mul", new, momentum))
        return cast(b, mixed, b.types[old].dtype)

    return (y, None, None, update(running_mean, b.op("detach", centre)), update(running_var, unbiased))


def _single(b: GraphBuilder, x: str) -> str:
    """Cast 16-bit floats to float32, in which they are normalized."""
    return cast(b, x, "float32" if b.types[x].dtype in ("float16", "bfloat16") else None)


def _over_channels(b: GraphBuilder, v: str, rank: int) -> str:
    return reshape(b, v, (1, b.shape(v)[0], *(1,) * (rank - 2)))


def _statistics(b: GraphBuilder, x: str) -> tuple[str, str]:
    """Return the mean and variance of every channel, from sums that may be split."""
    x = _single(b, x)
    rank = len(b.shape(x))
    dims = [d for d in range(rank) if d != 1]
    centre = mean(b, x, dims)
    centred = b.op("sub", x, _over_channels(b, centre, rank))
    return centre, mean(b, b.op("mul", centred, centred), dims)


def _standardized(
    b: GraphBuilder, x: str, centre: str, spread: str, w: str | None, bias: str | None, eps: float
) -> str:
    rank, dtype = len(b.shape(x)), b.types[x].dtype
    y = b.op("sub", _single(b, x), _over_channels(b, centre, rank))
    y = b.op("mul", y, _over_channels(b, b.op("rsqrt", b.op("add", spread, eps)), rank))
    return cast(b, _affine(b, y, w, bias, rank), dtype)


def _affine(b: GraphBuilder, y: str, w: str | None, bias: str | None, rank: int) -> str:
    y = y if w is None else b.op("mul", y, _over_channels(b, w, rank))
    return y if bias is None else b.op("add", y, _over_channels(b, bias, rank))


@handles("rrelu_with_noise_functional")
def _random_leaky_relu(
    b: GraphBuilder, x: str, noise: str, low: float = 1 / 8, high: float = 1 / 3, train: bool = False, _: None = None
) -> tuple[str, None]:
    """Append `rrelu`, which draws its noise itself: this operator's derivative reads noise that is not drawn yet."""
    if not train:
        return HANDLERS["leaky_relu"](b, x, (low + high) / 2), None
    kind = {"shape": b.shape(x), "dtype": b.types[x].dtype}
    args = (("$", 0), low, high, True)
    return b.op(OPAQUE, x, target="aten.rrelu.default", args=args, kwargs=(), result=0, **kind), None


def _recurrent(cell: str) -> Handler:
    """Return the handler of a recurrent layer. What drops between layers draws, and is not covered."""

    def handler(b: GraphBuilder, x: str, begin: Sequence[str] | str, weights: Sequence[str], biases: bool, layers: int,
                dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> tuple[str, ...]:  # fmt: skip
        states = [begin] if isinstance(begin, str) else list(begin)
        require(not (dropout and train and layers > 1) and len(b.shape(x)) == 3)
        require(len({b.shape(state) for state in states}) == 1)  # else outputs are projected
        require(len({b.types[v].dtype for v in (x, *states, *weights)}) == 1)
        attrs = {"cell": cell, "biases": biases, "layers": layers, "bidirectional": bidirectional,
                 "batch_first": batch_first}  # fmt: skip
        operands = (x, *states, *weights)
        return tuple(b.op("recurrent", *operands, **attrs, result=n) for n in range(1 + STATES[cell]))

    return handler


HANDLERS.update({f"{cell}.input": _recurrent(cell) for cell in STATES})
