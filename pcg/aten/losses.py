"""Losses: sums over the batch, divided by global counts, so that a split gives exact partial sums."""

from __future__ import annotations

from shardwright.pcg.aten.reductions import mean, total, wide
from shardwright.pcg.aten.registry import cast, handles, require
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
    require(weight is None and reduction != NONE and not is_float(b.types[target].dtype))
    logits = wide(b, x) if reduction == MEAN else x
    loss = b.op("cross_entropy_sum", logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing)
    if reduction == SUM:
        return loss
    return b.op("div", loss, total(b, cast(b, b.op("ne", target, ignore_index), b.types[loss].dtype)))


@handles("binary_cross_entropy_with_logits")
def _bce(b: GraphBuilder, x: str, target: str, weight: str | None = None, pos_weight: str | None = None,
         reduction: int = MEAN) -> str:  # fmt: skip
    require(weight is None and pos_weight is None)
    x, target = b.wide(x), b.wide(target)
    return _reduced(b, b.op("sub", b.op("softplus", x), b.op("mul", x, target)), reduction)


@handles("mse_loss")
def _mse(b: GraphBuilder, x: str, target: str, reduction: int = MEAN) -> str:
    error = b.op("sub", b.wide(x), b.wide(target))
    return _reduced(b, b.op("mul", error, error), reduction)
