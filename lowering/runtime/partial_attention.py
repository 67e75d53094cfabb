"""Attention to some of the keys. It gives the log-sum-exp of their scores, too, by which it merges with the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.lowering.private_kernels import fused_attention

PLAIN_ROWS = 512
"""The most queries whose scores are in memory at once, where no fused kernel runs."""


class Kernel(NamedTuple):
    """Attention that gives the log-sum-exp of scores, and its backward by a given one.

    `most_rows`: the most queries that it takes at once; None: any number.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    most_rows: int | None = None


def kernel_for(q: Tensor, v: Tensor) -> Kernel:
    """Return what attends with such queries and values: a fused kernel, or plain products."""
    if (fused := fused_attention(q, v)) is not None:
        return Kernel(*fused)
    return Kernel(plain_forward, plain_backward, PLAIN_ROWS)


def plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return softmax(q kᵀ · scale) v, [..., h·r, m, e], and the log-sum-exp of scores, [..., h·r, m]."""
    scores = _scores(q, k, causal, scale)
    log_sum = scores.logsumexp(-1)
    weights = (scores - log_sum.unsqueeze(-1)).exp_()
    return (weights @ v.unsqueeze(-3).to(weights.dtype)).flatten(-4, -3), log_sum.flatten(-3, -2)


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, of attention that gave `result` and this log-sum-exp over all keys."""
    shared = partial(_shared, num_heads=k.shape[-3])
    weights = (_scores(q, k, causal, scale) - shared(log_sum.unsqueeze(-1))).exp_()
    grad = shared(grad).to(weights.dtype)
    slopes = grad @ v.unsqueeze(-3).mT.to(grad.dtype) - (grad * shared(result)).sum(-1, keepdim=True)
    slopes *= weights * scale
    into_q = (slopes @ k.unsqueeze(-3).to(slopes.dtype)).flatten(-4, -3)
    return into_q, (slopes.mT @ shared(q).to(slopes.dtype)).sum(-3), (weights.mT @ grad).sum(-3)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Return [..., h, r, m, l]: the scores of queries, of which r heads share a head of keys."""
    wide = wide_dtype(q.dtype)
    scores = _shared(q, k.shape[-3]).to(wide) @ k.unsqueeze(-3).mT.to(wide) * scale
    if causal:
        rows, columns = scores.shape[-2:]
        above = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(above, float("-inf"))
    return scores


def _shared(x: Tensor, num_heads: int) -> Tensor:
    """Return [..., h·r, m, d] as [..., h, r, m, d]."""
    return x.unflatten(-3, (num_heads, -1))


# ---- merging ----


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept."""
    return torch.promote_types(dtype, torch.float32)


def nothing_seen(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of no values, and its log-sum-exp."""
    wide = wide_dtype(q.dtype)
    mean = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide)
    return mean, q.new_full(q.shape[:-1], float("-inf"), dtype=wide)


def merge(mean: Tensor, log_sum: Tensor, other: Tensor, other_log_sum: Tensor) -> None:
    """Merge, in place, means over some keys with those over others: lemma `merged-means` of the verifier."""
    share = torch.sigmoid(other_log_sum - log_sum)
    mean.lerp_(other.to(mean.dtype), share.unsqueeze(-1).to(mean.dtype))
    torch.logaddexp(log_sum, other_log_sum.to(log_sum.dtype), out=log_sum)
