"""Numbers of DTensors are those of the whole tensor: read by `.item()`, `float` or `if`, norms, and extremes.

torch keeps what each rank adds, as a *partial* DTensor, and sums it up when another operator needs it; a number that is
read is the summand of one rank, and norms that ranks have parts of are added up as if they were sums. So a norm and an
extreme is combined at once here. An extreme keeps a NaN, whichever rank has it: gloo drops those that are not on the
first.
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
"""Operators that give one, and the order of the norm that ranks combine theirs as."""
Dims = frozenset[int]


def reduce_whole() -> None:
    """From now on in this process, numbers, norms and extremes of DTensors are those of the whole tensor."""
    private_dtensors.on_dtensors("_local_scalar_dense", _read)
    private_dtensors.on_dtensors("_foreach_norm.Scalar", _norms)
    for name in ("linalg_vector_norm", *_EXTREMES):
        private_dtensors.on_dtensors(name, _reduce)


def all_extreme(x: Tensor, group: dist.ProcessGroup | None = None, *, least: bool = False) -> Tensor:
    """The largest of each element over a group's ranks, or the least; NaN where any rank has one."""
    sign = -1 if least else 1
    if not x.is_floating_point():
        found = x.to(torch.int64) * sign
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return (found * sign).to(x.dtype)
    lost = x.isnan()
    sent = torch.stack([(x * sign).masked_fill(lost, float("-inf")), lost.to(x.dtype)])
    dist.all_reduce(sent, dist.ReduceOp.MAX, group)
    return (sent[0] * sign).masked_fill(sent[1] > 0, float("nan"))


# ---- numbers ----


def _read(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """The number that a DTensor of one element is. Every rank of its mesh takes part, where they have summands."""
    (tensor,) = args
    return op(_whole(tensor), **kwargs)


def _whole(tensor: DTensor) -> Tensor:
    if any(not isinstance(placement, (Partial, Replicate)) for placement in tensor.placements):
        return tensor.full_tensor().detach()
    axes = enumerate(tensor.placements)
    return reduce(lambda value, at: _summed(value, at[1], tensor, at[0]), axes, private.unwrap(tensor).detach())


def _summed(value: Tensor, placement: Placement, tensor: DTensor, axis: int) -> Tensor:
    """A value of which the ranks of an axis have summands, or others of which it is the extreme."""
    if not isinstance(placement, Partial):
        return value
    if placement.reduce_op in ("max", "min"):
        return all_extreme(value, tensor.device_mesh.get_group(axis), least=placement.reduce_op == "min")
    return private_dtensors.reduced(placement, value, tensor.device_mesh, axis)


# ---- norms and extremes ----


def _reduce(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DTensor:
    """A norm or an extreme, over some dimensions or all."""
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
    """Of many tensors; those that lie on the same axes are combined together."""
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
    """The axes of the mesh that these dimensions are split along."""
    return tuple(axis for axis, placement in enumerate(x.placements) if _dim(placement) in dims)


def _dim(placement: Placement) -> int | None:
    return None if isinstance(placement, Replicate) else placement.dim  # pyright: ignore[reportAttributeAccessIssue]


def _combined(value: Tensor, order: float, group: dist.ProcessGroup) -> Tensor:
    """The norm of the norms that a group's ranks have."""
    if abs(order) == math.inf:
        return all_extreme(value, group, least=order < 0)
    total = value.double() ** order if order else value.double()
    dist.all_reduce(total, group=group)
    return (total ** (1 / order) if order else total).to(value.dtype)


def _laid_out(value: Tensor, x: DTensor, dims: Dims, *, keepdim: bool) -> DTensor:
    """What is left of x without these dimensions, or with size 1 in their place."""
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
