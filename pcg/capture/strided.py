"""Positions in place of strides, for operators that name elements by their place in memory (`Tensor.as_strided`).

A graph does not say how tensors are stored, and torch (2.13, 2.14) differentiates `as_strided_scatter` wrongly, which
writes into such a view become. In a tensor that fills its memory, strides name elements of a vector:

    as_strided(x, …) = vector(x)[positions]        as_strided_scatter(x, y, …) = vector(x) with y at the positions
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.pcg.errors import CaptureError

_aten = torch.ops.aten


def _as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    order = _memory_order(x)
    positions = _positions(x, size, stride, storage_offset)
    return x.permute(order).reshape(-1).index_select(0, positions).reshape(tuple(size))


def _as_strided_scatter(
    x: Tensor, y: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    order = _memory_order(x)
    shape = [x.shape[d] for d in order]
    positions = _positions(x, size, stride, storage_offset)
    vector = x.permute(order).reshape(-1).index_put((positions,), y.reshape(-1))
    return vector.reshape(shape).permute([order.index(d) for d in range(x.dim())])


def _memory_order(x: Tensor) -> list[int]:
    """Return the dimensions from the outermost one in memory on."""
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    if not x.permute(order).is_contiguous():
        raise CaptureError(
            f"as_strided of a tensor of shape {list(x.shape)} and strides {list(x.stride())}, which does not fill its "
            "memory; use slices, select or diagonal, which name elements by their indices"
        )
    return order


def _positions(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Tensor:
    place = 0 if offset is None else offset - int(x.storage_offset())
    last = place + sum((number - 1) * step for number, step in zip(size, stride, strict=True))
    if 0 not in size and not 0 <= place <= last < x.numel():
        raise CaptureError(
            f"as_strided names the elements {place} to {last} of a tensor of {x.numel()}, others than its own; use it "
            "on the tensor whose memory it reads"
        )
    positions = torch.full((1,) * len(size), place, dtype=torch.int64, device=x.device)
    for dim, (number, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(number, dtype=torch.int64, device=x.device) * step
        positions = positions + along.reshape([-1 if d == dim else 1 for d in range(len(size))])
    return positions.reshape(-1)


STRIDED: Mapping[torch._ops.OperatorBase, Callable[..., Any]] = {
    _aten.as_strided.default: _as_strided,
    _aten.as_strided_copy.default: _as_strided,
    _aten.as_strided_scatter.default: _as_strided_scatter,
}
