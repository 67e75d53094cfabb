"""Numbers, norms and extremes of DTensors, computed over the whole tensor (`.item()`, `float`, `if`, …).

torch keeps each rank's summand as a *partial* DTensor and sums when another operator needs the sum. So a number that
is read there is the summand of one rank, and norms of parts are added as if they were sums. Here norms and extremes
are combined at once. An extreme keeps a NaN, whichever rank has it; gloo drops NaNs that are not on the first rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardwright.lowering import private, private_dtensors

_EXTREMES = {"max": math.inf, "amax": math.inf, "min": -math.inf, "amin": -math.inf}
"""Operators that compute an extreme, and the order of the norm by which ranks combine their results."""
Dims = frozenset[int]


def reduce_whole() -> None:
    """Replace torch's numbers, norms and extremes of DTensors in this process by those of the whole tensor."""
    private_dtensors.on_dtensors("_local_scalar_dense", _read)
    private_dtensors.on_dtensors("_foreach_norm.Scalar", _norms)
    for name in ("linalg_vector_norm", *_EXTREMES):
        private_dtensors.on_dtensors(name, _reduce)


def all_extreme(x: Tensor, group: dist.ProcessGroup | None = None, *, least: bool = False) -> Tensor:
    """Return the elementwise maximum, or minimum, over a group's ranks; NaN where any rank has one."""
    sign = -1 if least else 1
    if not x.is_floating_point():
        extreme = x.to(torch.int64) * sign
        dist.all_reduce(extreme, dist.ReduceOp.MAX, group)
        return (extreme * sign).to(x.dtype)
    lost = x.isnan()
    sent = torch.stack([(x * sign).masked_fill(lost, float("-inf")), lost.to(x.dtype)])
    dist.all_reduce(sent, dist.ReduceOp.MAX, group)
    return (sent[0] * sign).masked_fill(sent[1] > 0, float("nan"))


# ---- numbers ----


def _read(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Return the number in a DTensor of one element. If ranks hold summands, every rank of its mesh takes part."""
    (tensor,) = args
    return op(_whole(tensor), **kwargs)


def _whole(tensor: DTensor) -> Tensor:
    if any(not isinstance(placement, (Partial, Replicate)) for placement in tensor.placements):
        return tensor.full_tensor().detach()
    axes = enumerate(tensor.placements)
    return reduce(lambda value, at: _summed(value, at[1], tensor, at[0]), axes, private.unwrap(tensor).detach())


def _summed(value: Tensor, placement: Placement, tensor: DTensor, axis: int) -> Tensor:
    """Return a value summed over the ranks of an axis, or their extreme, as a partial placement says."""
    if not isinstance(placement, Partial):
        return value
    if placement.reduce_op in ("max", "min"):
        return all_extreme(value, tensor.device_mesh.get_group(axis), least=placement.reduce_op == "min")
    return private_dtensors.reduced(placement, value, tensor.device_mesh, axis)


# ---- norms and extremes ----


def _reduce(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DTensor:
    """Return a norm or an extreme of a DTensor, over some dimensions or all."""
    given = dict(zip(private_dtensors.argument_names_of(op), args, strict=False)) | dict(kwargs)
    x = _without_summands(given.pop("self"))
    order: float = _EXTREMES.get(private_dtensors.name_of(op)) or given.get("ord", 2)
    chosen = given.get("dim")
    listed = [chosen] if isinstance(chosen, int) else chosen or range(x.ndim)
    dims, value = frozenset(d % x.ndim for d in listed), op(private.unwrap(x), **given)
    for axis in _axes(x, dims):
        value = _combined(value, order, x.device_mesh.get_group(axis))
    return _laid_out(value, x, dims, keepdim=bool(given.get("keepdim")))


def _norms(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the norms of many tensors, with one reduction for all that are split along the same axes."""
    given = dict(zip(private_dtensors.argument_names_of(op), args, strict=False)) | dict(kwargs)
    tensors = [_without_summands(x) if isinstance(x, DTensor) else x for x in given.pop("self")]
    local = op([private.unwrap(x) if isinstance(x, DTensor) else x for x in tensors], **given)
    alike: dict[object, list[int]] = {}
    for number, x in enumerate(tensors):
        if isinstance(x, DTensor):
            alike.setdefault((x.device_mesh, _axes(x, _all(x)), local[number].dtype), []).append(number)
    for numbers in alike.values():
        x, together = tensors[numbers[0]], torch.stack([local[number] for number in numbers])
        for axis in _axes(x, _all(x)):
            together = _combined(together, given.get("ord", 2), x.device_mesh.get_group(axis))
        for number, value in zip(numbers, together.unbind(), strict=True):
            local[number] = value
    pairs = zip(local, tensors, strict=True)
    return [_laid_out(v, x, _all(x), keepdim=False) if isinstance(x, DTensor) else v for v, x in pairs]


def _without_summands(x: DTensor) -> DTensor:
    if not any(isinstance(placement, Partial) for placement in x.placements):
        return x
    return x.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in x.placements])


def _all(x: DTensor) -> Dims:
    return frozenset(range(x.ndim))


def _axes(x: DTensor, dims: Dims) -> tuple[int, ...]:
    """Return the mesh axes along which these dimensions are split."""
    return tuple(axis for axis, placement in enumerate(x.placements) if _dim(placement) in dims)


def _dim(placement: Placement) -> int | None:
    return None if isinstance(placement, Replicate) else placement.dim  # pyright: ignore[reportAttributeAccessIssue]


def _combined(value: Tensor, order: float, group: dist.ProcessGroup) -> Tensor:
    """Return the norm of the norms of a group's ranks."""
    if abs(order) == math.inf:
        return all_extreme(value, group, least=order < 0)
    total = value.double() ** order if order else value.double()
    dist.all_reduce(total, group=group)
    return (total ** (1 / order) if order else total).to(value.dtype)


def _laid_out(value: Tensor, x: DTensor, dims: Dims, *, keepdim: bool) -> DTensor:
    """Return a reduced value as a DTensor laid out as x without these dimensions, or with size 1 in their place."""
    left = [d for d in range(x.ndim) if keepdim or d not in dims]
    shape = [1 if d in dims else x.shape[d] for d in left]

    def kept(placement: Placement) -> Placement:
        dim = _dim(placement)
        if dim is None or dim in dims:
            return Replicate()
        if private.is_strided(placement):
            return private.strided_shard(left.index(dim), private.num_blocks(placement))
        return Shard(left.index(dim))

    like = torch.empty(shape, dtype=value.dtype, device="meta")
    return private.wrap(value, private.make_spec(x.device_mesh, tuple(map(kept, x.placements)), like))
