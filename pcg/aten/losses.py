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
    require(reduction != NONE and not is_float(b.types[target].dtype))
    if weight is not None:
        return _weighted_cross_entropy(b, x, target, weight, reduction, ignore_index, label_smoothing)
    logits = wide(b, x) if reduction == MEAN else x
    loss = b.op("cross_entropy_sum", logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if reduction == SUM:
        return loss
    return b.op("div", loss, total(b, cast(b, b.op("ne", target, ignore_index), b.types[loss].dtype)))


def _weighted_cross_entropy(b: GraphBuilder, x: str, target: str, weight: str, reduction: int, ignore_index: int,
                            label_smoothing: float) -> str:  # fmt: skip
    """Weigh each target by its class. The mean divides by the sum of the targets' weights."""
    require(len(b.shape(x)) == len(b.shape(target)) + 1 and len(b.shape(x)) > 1)
    log_p = b.op("log_softmax", b.wide(x), dim=1)
    counts, shape = b.op("ne", target, ignore_index), b.shape(target)
    known = b.op("where", counts, target, b.scalar(0, b.types[target].dtype))
    column = reshape(b, cast(b, weight, b.types[log_p].dtype), (b.shape(weight)[0], 1))
    weights = reshape(b, b.op("embedding", column, known, padding_idx=None), shape)
    weights = b.op("mul", weights, cast(b, counts, b.types[log_p].dtype))
    chosen = b.op("gather", log_p, reshape(b, known, (shape[0], 1, *shape[1:])), dim=1)
    loss = b.op("neg", total(b, b.op("mul", reshape(b, chosen, shape), weights)))
    if label_smoothing:
        by_class = reshape(b, cast(b, weight, b.types[log_p].dtype), (1, b.shape(weight)[0], *(1,) * (len(shape) - 1)))
        others = b.op("mul", total(b, b.op("mul", log_p, by_class), 1), cast(b, counts, b.types[log_p].dtype))
        smoothed = b.op("mul", total(b, others), -label_smoothing / b.shape(x)[1])
        loss = b.op("add", b.op("mul", loss, 1 - label_smoothing), smoothed)
    return loss if reduction == SUM else b.op("div", loss, total(b, weights))


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
