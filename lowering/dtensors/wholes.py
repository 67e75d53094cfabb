"""Errors, with the remedy, for reads of DTensors that need the whole tensor; torch's own errors name none.

They cover sizes that depend on values (a mask, `nonzero`), conversions to a list, an array or text, and comparisons of
whole tensors. For `argmax` and `argmin` of a tensor in blocks, the whole tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwright.lowering import private, private_dtensors
from shardwright.pcg.errors import ShardwrightError

_OF_WHOLES = "nonzero nonzero_numpy masked_select _unique2 unique_dim unique_consecutive allclose"
_METHODS = ("tolist", "numpy", "__format__")


def name_remedies() -> None:
    """Replace these operators and methods in this process, for DTensors on meshes of ours."""
    for name in _OF_WHOLES.split():
        private_dtensors.on_dtensors(name, _refuse)
    private_dtensors.on_dtensors("index.Tensor", _index)
    for name in ("argmax", "argmin"):
        private_dtensors.on_dtensors(name, _of_whole)
    for name in _METHODS:
        setattr(DTensor, name, _method(name))


def _refuse(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    x = next(x for x in (*args, *kwargs.values()) if isinstance(x, DTensor))
    raise ShardwrightError(_message(private_dtensors.name_of(op).strip("_"), x))


def _index(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Refuse `x[indices]` if a mask or a plain tensor among the indices would need all of x."""
    indices = [index for index in args[1] if index is not None]
    if any(index.dtype == torch.bool or not (isinstance(index, DTensor) or index.numel() == 1) for index in indices):
        x = next(x for x in (args[0], *indices) if isinstance(x, DTensor))
        raise ShardwrightError(_message("x[a mask or a tensor of indices]", x))
    return private_dtensors.as_torch_does(op, args, kwargs)


def _of_whole(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Compute `argmax` or `argmin` of the gathered tensor if x is laid in blocks, for which torch has no rule."""
    x, *others = args
    if not any(map(private.is_strided, x.placements)):
        return private_dtensors.as_torch_does(op, args, kwargs)
    value = op(x.full_tensor().detach(), *others, **kwargs)
    everywhere = tuple(Replicate() for _ in x.placements)
    return private.wrap(value, private.make_spec(x.device_mesh, everywhere, value))


def _method(name: str) -> Any:  # noqa: ANN401
    torchs = getattr(DTensor, name)

    def method(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not private_dtensors.is_ours(tensor.device_mesh) or args == ("",):
            return torchs(tensor, *args, **kwargs)
        what = f"the format {args[0]!r}" if name == "__format__" else f".{name}()"
        raise ShardwrightError(_message(what, tensor))

    method.__name__ = name
    return method


def _message(what: str, x: Tensor) -> str:
    assert isinstance(x, DTensor)
    number = " (of one number: x.item())" if x.numel() == 1 else ""
    return (
        f"{what}: x is a DTensor {list(x.shape)} with placements {x.placements}, of which each rank holds a part; use "
        f"x.full_tensor(){number} instead of x, on every rank"
    )
