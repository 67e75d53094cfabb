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

    Both take a mask that is added to the scores, [..., h·r or 1, m or 1, l or 1], or None. A query that it hides from
    all keys has a mean of 0 and a log-sum-exp of -inf; backward is given inf for one that no key of any part sees.
    `most_rows`: the most queries that it takes at once; None: any number.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]
    most_rows: int | None = None


def kernel_for(q: Tensor, v: Tensor, mask: Tensor | None = None, *, trains_mask: bool = False) -> Kernel:
    """Return what attends with such queries, values and masks: a fused kernel, or plain products.

    `trains_mask`: backward returns the gradient of the mask, too, of the mask's own shape.
    """
    if not trains_mask and (fused := fused_attention(q, v, masked=mask is not None)) is not None:
        if mask is None:
            return Kernel(*fused)
        forward, backward = fused
        return Kernel(partial(_masked_forward, forward), partial(_masked_backward, backward))
    return Kernel(plain_forward, partial(plain_backward, trains_mask=trains_mask), PLAIN_ROWS)


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax(q kᵀ · scale + mask) v, [..., h·r, m, e], and the log-sum-exp of scores, [..., h·r, m]."""
    scores = _scores(q, k, causal, scale, mask)
    log_sum = scores.logsumexp(-1)
    weights = (scores - without_any(log_sum).unsqueeze(-1)).exp_()
    return (weights @ v.unsqueeze(-3).to(weights.dtype)).flatten(-4, -3), log_sum.flatten(-3, -2)


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, log_sum: Tensor, causal: bool, scale: float,
    mask: Tensor | None = None, *, trains_mask: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k and v, of attention that gave `result` and this log-sum-exp over all keys."""
    shared = partial(_shared, num_heads=k.shape[-3])
    weights = (_scores(q, k, causal, scale, mask) - shared(log_sum.unsqueeze(-1))).exp_()
    grad = shared(grad).to(weights.dtype)
    slopes = grad @ v.unsqueeze(-3).mT.to(grad.dtype) - (grad * shared(result)).sum(-1, keepdim=True)
    slopes *= weights
    of_mask = (slopes.flatten(-4, -3).sum_to_size(mask.shape),) if trains_mask and mask is not None else ()
    into_q = (slopes @ k.unsqueeze(-3).to(slopes.dtype)).flatten(-4, -3)
    into_k = (slopes.mT @ shared(q).to(slopes.dtype)).sum(-3)
    return into_q.mul_(scale), into_k.mul_(scale), (weights.mT @ grad).sum(-3), *of_mask


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    """Return [..., h, r, m, l]: the scores of queries, of which r heads share a head of keys."""
    wide, num_heads = wide_dtype(q.dtype), k.shape[-3]
    scores = _shared(q, num_heads).to(wide) @ k.unsqueeze(-3).mT.to(wide) * scale
    if mask is not None:
        scores += mask.unsqueeze(-3) if mask.shape[-3] == 1 else _shared(mask, num_heads)
    return scores.masked_fill_(_above(scores), float("-inf")) if causal else scores


def _above(scores: Tensor) -> Tensor:
    """Return [m, l]: whether a key comes after the query."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)


# ---- fused kernels with a mask ----


def _masked_forward(
    forward: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
    mask: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what a fused kernel gives, with the log-sum-exp of no keys where a query sees none."""
    bias = _bias(q, k, causal, mask)
    result, log_sum = forward(q, k, v, False, scale, bias)
    return result, log_sum.masked_fill(bias.isneginf().all(-1), float("-inf"))


def _masked_backward(
    backward: Callable[..., tuple[Tensor, ...]], grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor,
    log_sum: Tensor, causal: bool, scale: float, mask: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    return backward(grad, q, k, v, result, log_sum, False, scale, _bias(q, k, causal, mask))


def _bias(q: Tensor, k: Tensor, causal: bool, mask: Tensor) -> Tensor:
    """Return the mask for each pair of a query and a key, with the keys after a causal query hidden."""
    bias = mask.expand(*mask.shape[:-2], q.shape[-2], k.shape[-2])
    return bias.masked_fill(_above(bias), float("-inf")) if causal else bias.contiguous()


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


def without_any(log_sum: Tensor) -> Tensor:
    """Return log-sums by which a query that sees no key has weights of 0."""
    return log_sum.masked_fill(log_sum.isneginf(), float("inf"))


def merge(mean: Tensor, log_sum: Tensor, other: Tensor, other_log_sum: Tensor) -> None:
    """Merge, in place, means over some keys with those over others: lemma `merged-means` of the verifier."""
    share = torch.sigmoid((other_log_sum - log_sum).nan_to_num_(0.0))  # no keys beside no keys: both means are 0
    mean.lerp_(other.to(mean.dtype), share.unsqueeze(-1).to(mean.dtype))
    torch.logaddexp(log_sum, other_log_sum.to(log_sum.dtype), out=log_sum)
