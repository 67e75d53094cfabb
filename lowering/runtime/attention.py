"""Attention as programs call it, of all queries or of a part of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from shardwright.lowering.private import FakeTensor


def sdpa(
    causal: bool, scale: float | None, offset: int | None, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor
) -> Tensor:
    """softmax(q kᵀ · scale + mask) v; query heads share key heads where there are more of them.

    With an `offset`, `q` holds queries [offset, offset + len) of the sequence. Keys after the last that a causal one of
    these sees are left out, so that what remains is a causal mask at the lower right, which kernels of GPUs have.
    """
    bias, shared = mask[0] if mask else None, q.shape[-3] != k.shape[-3]
    if causal and offset is not None:
        seen = min(offset + q.shape[-2], k.shape[-2])
        k, v = k[..., :seen, :], v[..., :seen, :]
        bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., :seen]
    if causal and (mask or offset):
        rows, columns, start = q.shape[-2], k.shape[-2], offset or 0
        at_corner = bias is None and start + rows == columns
        if at_corner and isinstance(q, FakeTensor):  # a dry run counts no mask, as on a GPU
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
        if at_corner and q.is_cuda:  # not where kernels read a mask anyway: torch.compile breaks its graph here
            bias = causal_lower_right(rows, columns)
        else:
            lower = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(start)
            given = lower if bias is None else bias
            bias = given & lower if given.dtype == torch.bool else given.masked_fill(~lower, float("-inf"))
        causal = False
    return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, scale=scale, enable_gqa=shared)
