"""Rules for in-place updates of DTensors, of some optimizers, that torch lacks: each rank updates its own parts."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.lowering import private, private_dtensors
from shardwright.pcg.errors import ShardwrightError

_FUSED = tuple(
    f"_fused_{name}_{overload}" for name in ("sgd", "adam", "adamw", "adagrad") for overload in ("", ".tensor_lr")
)
_OF_LISTS = (*_FUSED, "_foreach_copy_")
"""Operators that update each tensor of a list, element by element, by the tensors at its place in other lists."""


def update_parts() -> None:
    """Install the rules in this process: for lists of DTensors, one value under a mask, and one number everywhere."""
    for name in _OF_LISTS:
        private_dtensors.on_dtensors(name, _update)
    private_dtensors.on_dtensors("index_put_", _put)
    private_dtensors.on_dtensors("fill_.Tensor", _fill)


def _update(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)) and x and isinstance(x[0], DTensor)]
    for target, *sources in zip(*lists, strict=True):
        for source in sources:
            if (source.placements, source.shape) != (target.placements, target.shape):
                raise ShardwrightError(
                    f"{op}: a tensor {list(source.shape)} with placements {source.placements} updates one "
                    f"{list(target.shape)} with placements {target.placements}; expected equal ones; redistribute it"
                )
    parts, named = [*map(_part, args)], {name: _part(x) for name, x in kwargs.items()}
    if str(op).removeprefix("aten.").removesuffix(".default") not in _FUSED:
        return op(*parts, **named)
    with dense([*parts, *named.values()]):
        return op(*parts, **named)


@contextmanager
def dense(arguments: Sequence[object]) -> Generator[None]:
    """Put copies in place of the tensors of lists that have gaps, as parts with padding have; write them back then.

    The fused kernels take memory without gaps for granted: those for CPUs go on through it and write what lies between.
    """
    lists = [x for x in arguments if isinstance(x, list)]
    gaps = [
        (values, at, x) for values in lists for at, x in enumerate(values) if x is not None and not x.is_contiguous()
    ]
    for values, at, x in gaps:
        values[at] = x.contiguous()
    yield
    for values, at, x in gaps:
        x.copy_(values[at])


def _part(x: Any) -> Any:  # noqa: ANN401
    if isinstance(x, (list, tuple)):
        return [_part(each) for each in x]
    return private_dtensors.part_if_any(x)


def _put(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Write one value where a mask is set, as `Rprop` does; leave all other cases to torch."""
    x, indices, value, *others = args
    mask = indices[0]
    if others or not isinstance(x, DTensor) or not isinstance(mask, DTensor):
        return private_dtensors.as_torch_does(op, args, kwargs)
    if len(indices) > 1 or mask.dtype != torch.bool or mask.shape != x.shape or value.numel() > 1:
        return private_dtensors.as_torch_does(op, args, kwargs)
    op(private.unwrap(x), [private.unwrap(mask.redistribute(placements=x.placements))], _part(value), **kwargs)
    return x


def _fill(op: private.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Write one number everywhere, as `x[...] = 7.0` does."""
    x, value = args
    op(_part(x), value.full_tensor().detach() if isinstance(value, DTensor) else value, **kwargs)
    return x
