"""The kernels of torch that lowering calls and that have no public name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Fused = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor, Tensor]]]
"""Attention forward: (q, k, v, causal, scale) -> (result, log-sum-exp of scores); and backward: (gradient, q, k, v,
result, log-sum-exp, causal, scale) -> gradients of q, k and v. One for masks takes one after the scale, [.., m, l]."""


def fused_attention(q: Tensor, v: Tensor, *, masked: bool = False) -> Fused | None:
    """Return torch's fused attention for queries and values like these, [b, h, n, d], or None if there is none."""
    if q.shape[-1] != v.shape[-1]:
        return None
    if q.device.type == "cpu":
        return _flash_on_cpu, _flash_on_cpu_backward
    if (
        not masked
        and q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    ):
        return _flash_on_gpu, _flash_on_gpu_backward
    return None


def _flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _flash_on_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, log_sum: Tensor, causal: bool, scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, result, log_sum, 0.0, causal, attn_mask=mask, scale=scale)


def _flash_on_gpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    result, log_sum, *_ = forward(q, k, v, 0.0, causal, scale=scale)
    return result, log_sum


def _flash_on_gpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that does not happen
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = q.shape[-2], k.shape[-2]
    given = grad, q, k, v, result, log_sum.contiguous(), None, None, *lengths
    return backward(*given, 0.0, causal, seed, seed, scale=scale)


def fourier(name: str) -> Callable[..., Tensor]:
    """Return torch's transform `_fft_r2c`, `_fft_c2c` or `_fft_c2r`, by the end of its name."""
    return getattr(torch.ops.aten, f"_fft_{name}")
