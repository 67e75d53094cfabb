"""The attention that programs call, for all queries or for a part of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.lowering.private import FakeTensor
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime.ring import ring_attention


def sdpa(
    causal: bool, scale: float | None, offset: int | None, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor,
    ring: Axis | None = None, step: int = 1, sees: tuple[int, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """Return softmax(q kᵀ · scale + mask) v; if there are more query heads than key heads, they share key heads.

    With an `offset`, `q` holds queries of the sequence from there on, each `step` after the one before. Under a causal
    mask, keys after the last visible one are left out. If queries are neighbours, the rest is a causal mask at the
    lower right, for which GPUs have kernels.
    With a `ring`, `k` and `v` are this rank's parts along an axis, as far apart, and the result is of all parts; a mask
    is for this rank's queries and all keys; `sees` says which keys a query can see at all (`pcg.slices.Sees`).
    """
    if ring is not None:
        return ring_attention(causal, scale, offset or 0, q, k, v, ring, step, *mask, sees=sees)
    bias, shared = mask[0] if mask else None, q.shape[-3] != k.shape[-3]
    if causal and offset is not None:
        seen = min(offset + step * (q.shape[-2] - 1) + 1, k.shape[-2])
        k, v = k[..., :seen, :], v[..., :seen, :]
        bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., :seen]
    if causal and (mask or offset or step > 1):
        rows, columns, start = q.shape[-2], k.shape[-2], offset or 0
        at_corner = bias is None and step == 1 and start + rows == columns
        if at_corner and isinstance(q, FakeTensor):  # a dry run counts no mask, as on a GPU
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
        if at_corner and q.is_cuda:  # other cases read a mask anyway, and torch.compile breaks its graph here
            from torch.nn.attention.bias import causal_lower_right  # it loads torch's compilers

            bias = causal_lower_right(rows, columns)
        else:
            last = torch.arange(start, start + step * rows, step, device=q.device)
            lower = torch.arange(columns, device=q.device) <= last.unsqueeze(-1)
            given = lower if bias is None else bias
            bias = given & lower if given.dtype == torch.bool else given.masked_fill(~lower, float("-inf"))
        causal = False
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale, enable_gqa=shared)
