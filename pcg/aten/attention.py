"""Scaled dot-product attention."""

from __future__ import annotations

import math

import torch

from shardwright.pcg.aten.registry import handles, require
from shardwright.pcg.aten.structure import expand, reshape, transpose, unsqueeze
from shardwright.pcg.builder import GraphBuilder


@handles("scaled_dot_product_attention")
def _sdpa(b: GraphBuilder, q: str, k: str, v: str, mask: str | None = None, p: float = 0.0, causal: bool = False, *,
          scale: float | None = None, enable_gqa: bool = False) -> str:  # fmt: skip
    _require_shapes(b, q, k, v, mask)
    if not p:
        return b.op("sdpa", *(t for t in (q, k, v, mask) if t is not None), causal=causal, scale=scale)
    return _with_dropout(b, q, k, v, mask, p, causal, scale)


def _require_shapes(b: GraphBuilder, q: str, k: str, v: str, mask: str | None) -> None:
    """Require that query heads share key heads, that batches are equal, and that the mask fits the scores."""
    queries, keys, values = b.shape(q), b.shape(k), b.shape(v)
    require(len(queries) == len(keys) == len(values) >= 3)
    require(queries[:-3] == keys[:-3] == values[:-3])
    require(keys[-3:-1] == values[-3:-1] and queries[-3] % keys[-3] == 0)
    if mask is not None:
        scores, shape = (*queries[:-1], keys[-2]), b.shape(mask)
        require(len(shape) <= len(scores))
        require(all(m in (1, s) for m, s in zip(shape[::-1], scores[::-1], strict=False)))


def _with_dropout(b: GraphBuilder, q: str, k: str, v: str, mask: str | None, p: float, causal: bool,
                  scale: float | None) -> str:  # fmt: skip
    """Write out attention with dropout; the draw covers the whole tensor of probabilities."""
    scale = 1 / math.sqrt(b.shape(q)[-1]) if scale is None else scale
    k, v = _repeat_heads(b, k, b.shape(q)[-3]), _repeat_heads(b, v, b.shape(q)[-3])
    scores = b.op("mul", b.op("matmul", q, transpose(b, k, -2, -1)), scale)
    dtype = b.types[scores].dtype
    if causal:
        mask = _lower_triangle(b, *b.shape(scores)[-2:])
    if mask is not None and b.types[mask].dtype == "bool":
        scores = b.op("where", mask, scores, b.scalar(torch.finfo(getattr(torch, dtype)).min, dtype))
    elif mask is not None:
        scores = b.op("add", scores, mask)
    weights = b.op("dropout", b.op("softmax", scores, dim=len(b.shape(scores)) - 1), p=p)
    out = b.op("matmul", weights, v)
    if mask is None or causal or b.types[mask].dtype != "bool":
        return out
    seen = b.op("any", mask, dims=(len(b.shape(mask)) - 1,), keepdim=True)
    return b.op("where", seen, out, b.scalar(0, dtype))


def _lower_triangle(b: GraphBuilder, num_rows: int, num_columns: int) -> str:
    rows, columns = (b.op("arange", start=0, stop=n, step=1, dtype="int64") for n in (num_rows, num_columns))
    return b.op("le", unsqueeze(b, columns, 0), unsqueeze(b, rows, 1))


def _repeat_heads(b: GraphBuilder, x: str, heads: int) -> str:
    shape = b.shape(x)
    if shape[-3] == heads:
        return x
    wide = expand(b, unsqueeze(b, x, -3), (*shape[:-2], heads // shape[-3], *shape[-2:]))
    return reshape(b, wide, (*shape[:-3], heads, *shape[-2:]))
