"""Losses: sums over the batch, divided by global counts, so that a split gives exact partial sums."""

from __future__ import annotations

from shardwright.pcg.aten.reductions import mean, total, wide
from shardwright.pcg.aten.registry import cast, handles, require
from shardwright.pcg.aten.structure import reshape
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.types import is_float

NONE, MEAN, SUM = range(3)  # ATen's numbers of reductions


def _reduced(b: GraphBuilder, losses: str, reduction: int) -> str:
    if reduction == NONE:
        return losses
    return mean(b, losses) if reduction == MEAN else total(b, losses)


@handles("cross_entropy_loss")
def _cross_entropy(b: GraphBuilder, x: str, target: str, weight: str | None = None, reduction: int = MEAN,
                   ignore_index: int = -100, label_smoothing: float = 0.0) -> str:  # fmt: skip
    if is_float(b.types[target].dtype):
        return _soft_cross_entropy(b, x, target, weight, reduction, label_smoothing)
    if weight is not None or reduction == NONE:
        log_p = b.op("log_softmax", b.wide(x), dim=min(len(b.shape(x)) - 1, 1))
        return _likelihood(b, log_p, target, weight, reduction, ignore_index, label_smoothing)[0]
    logits = wide(b, x) if reduction == MEAN else x
    loss = b.op("cross_entropy_sum", logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if reduction == SUM:
        return loss
    return b.op("div", loss, total(b, cast(b, b.op("ne", target, ignore_index), b.types[loss].dtype)))


def _soft_cross_entropy(b: GraphBuilder, x: str, target: str, weight: str | None, reduction: int,
                        label_smoothing: float) -> str:  # fmt: skip
    """Append the cross-entropy of a distribution for each place; the mean is over places."""
    dim, shape = min(len(b.shape(x)) - 1, 1), b.shape(x)
    log_p = b.op("log_softmax", b.wide(x), dim=dim)
    if label_smoothing:
        target = b.op("add", b.op("mul", target, 1 - label_smoothing), label_smoothing / shape[dim])
    if weight is not None:
        log_p = b.op("mul", log_p, _by_class(b, log_p, weight, dim))
    return _reduced(b, b.op("neg", total(b, b.op("mul", log_p, b.wide(target)), dim)), reduction)


def _by_class(b: GraphBuilder, log_p: str, weight: str, dim: int) -> str:
    """Return the weights of classes in the place of `log_p`'s dimension of classes."""
    shape = [n if d == dim else 1 for d, n in enumerate(b.shape(log_p))]
    return reshape(b, cast(b, weight, b.types[log_p].dtype), shape)


def _likelihood(b: GraphBuilder, log_p: str, target: str, weight: str | None, reduction: int, ignore_index: int,
                label_smoothing: float = 0.0) -> tuple[str, str | None]:  # fmt: skip
    """Return the loss, each target weighed by its class, and the sum of the weights, which a mean divides by."""
    shape, dtype, dim = b.shape(target), b.types[log_p].dtype, min(len(b.shape(log_p)) - 1, 1)
    require(len(b.shape(log_p)) == len(shape) + 1)
    counts = b.op("ne", target, ignore_index)
    known = b.op("where", counts, target, b.scalar(0, b.types[target].dtype))
    weights = cast(b, counts, dtype)
    if weight is not None:
        column = reshape(b, cast(b, weight, dtype), (b.shape(weight)[0], 1))
        weights = b.op("mul", reshape(b, b.op("embedding", column, known, padding_idx=None), shape), weights)
    chosen = b.op("gather", log_p, reshape(b, known, (*shape[:dim], 1, *shape[dim:])), dim=dim)
    losses = b.op("neg", b.op("mul", reshape(b, chosen, shape), weights))
    if label_smoothing:
        every = log_p if weight is None else b.op("mul", log_p, _by_class(b, log_p, weight, dim))
        others = b.op("mul", total(b, every, dim), cast(b, counts, dtype))
        smoothed = b.op("mul", others, -label_smoothing / b.shape(log_p)[dim])
        losses = b.op("add", b.op("mul", losses, 1 - label_smoothing), smoothed)
    if reduction == NONE:
        return losses, None
    loss, count = total(b, losses), total(b, weights)
    return (loss if reduction == SUM else b.op("div", loss, count)), count


@handles("nll_loss_forward", "nll_loss2d_forward")
def _nll(b: GraphBuilder, log_p: str, target: str, weight: str | None, reduction: int,
         ignore_index: int) -> tuple[str, str | None]:  # fmt: skip
    return _likelihood(b, b.wide(log_p), target, weight, reduction, ignore_index)


@handles("binary_cross_entropy")
def _of_probabilities(
    b: GraphBuilder, x: str, target: str, weight: str | None = None, reduction: int = MEAN
) -> str:  # fmt: skip
    losses = b.op("binary_cross_entropy", x, target)
    return _reduced(b, losses if weight is None else b.op("mul", losses, b.wide(weight)), reduction)


@handles("smooth_l1_loss")
def _smooth_l1(b: GraphBuilder, x: str, target: str, reduction: int = MEAN, beta: float = 1.0) -> str:
    """Append d² / 2β below β, and |d| - β / 2 from there on."""
    return _reduced(b, _bent(b, x, target, beta, 1.0), reduction)


@handles("huber_loss")
def _huber(b: GraphBuilder, x: str, target: str, reduction: int = MEAN, delta: float = 1.0) -> str:
    """Append d² / 2 below δ, and δ |d| - δ² / 2 from there on."""
    return _reduced(b, _bent(b, x, target, delta, delta), reduction)


def _bent(b: GraphBuilder, x: str, target: str, bend: float, slope: float) -> str:
    """Append `slope` times |x - target|, rounded off below `bend`."""
    error = b.op("sub", b.wide(x), b.wide(target))
    size = b.op("abs", error)
    near = b.op("mul", b.op("mul", error, error), 0.5 * slope / bend)
    far = b.op("mul", b.op("sub", size, 0.5 * bend), slope)
    return b.op("where", b.op("lt", size, bend), near, far)


@handles("soft_margin_loss")
def _soft_margin(b: GraphBuilder, x: str, target: str, reduction: int = MEAN) -> str:
    product = b.op("mul", b.op("neg", b.wide(target)), b.wide(x))
    return _reduced(b, b.op("log1p", b.op("exp", product)), reduction)


@handles("binary_cross_entropy_with_logits")
def _bce(b: GraphBuilder, x: str, target: str, weight: str | None = None, pos_weight: str | None = None,
         reduction: int = MEAN) -> str:  # fmt: skip
    x, target = b.wide(x), b.wide(target)
    if pos_weight is None:
        losses = b.op("sub", b.op("softplus", x), b.op("mul", x, target))
    else:  # (1 - y) x + (1 + (p - 1) y) softplus(-x)
        certain = b.op("mul", b.op("sub", 1.0, target), x)
        weights = b.op("add", b.op("mul", b.op("sub", b.wide(pos_weight), 1.0), target), 1.0)
        losses = b.op("add", certain, b.op("mul", weights, b.op("softplus", b.op("neg", x))))
    return _reduced(b, losses if weight is None else b.op("mul", losses, b.wide(weight)), reduction)


@handles("mse_loss")
def _mse(b: GraphBuilder, x: str, target: str, reduction: int = MEAN) -> str:
    error = b.op("sub", b.wide(x), b.wide(target))
    return _reduced(b, b.op("mul", error, error), reduction)
