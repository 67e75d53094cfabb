"""Optimizers of torch that update element by element: each rank updates its parts as plain tensors.

    torch.optim.AdamW.step ──lists of DTensors──▶ torch.optim.adam.adam, on lists of parts

An operator on a DTensor costs some ten times what it costs on a plain tensor, and more for each new shape. States stay
DTensors, and so do the names and layouts of checkpoints.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from shardwright.lowering import private, private_dtensors
from shardwright.lowering.dtensors.updates import dense

_FUNCTIONS = "adadelta adagrad adam adamax asgd nadam radam rmsprop rprop sgd"
"""The functions behind torch's optimizers; each stands in the module of its name."""
_LIKE = "zeros_like full_like empty_like"
"""The operators that make states."""

Lists = Sequence[list[Any]]
"""Of an update: parameters, gradients, states; an empty list is a state that the optimizer does not keep."""


def update_as_parts() -> None:
    """Install this in this process, for lists that begin with one of our DTensors."""
    for name in _FUNCTIONS.split():
        module = importlib.import_module(f"torch.optim.{name}")
        setattr(module, name, _on_parts(getattr(module, name)))
    for name in _LIKE.split():
        private_dtensors.on_dtensors(name, _like)


def _on_parts(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def on_parts(*args: Any, **kwargs: Any) -> None:
        lists = [x for x in args if isinstance(x, list)]
        if torch.compiler.is_compiling() or kwargs.get("differentiable") or not _is_by_part(lists):
            return function(*args, **kwargs)
        parts = [list(map(private_dtensors.part_if_any, values)) for values in lists]
        with dense(parts if kwargs.get("fused") else []):
            function(*parts, *args[len(lists) :], **kwargs)
        _hand_back(lists, parts)
        increment_version([x for x in lists[0] if isinstance(x, DTensor)])  # else autograd takes them for unwritten
        return None

    return on_parts


def _is_by_part(lists: Lists) -> bool:
    """Return whether all that belongs to one of our parameters has its layout, or is a number."""
    specs = list(map(private_dtensors.spec_if_any, lists[0] if lists else ()))  # none: they are given by name
    first = next((spec for spec in specs if spec is not None), None)
    if first is None or not private_dtensors.is_ours(first.mesh):
        return False
    return all(_go_with(values, specs) for values in lists[1:] if values)


def _go_with(values: list[Any], specs: list[private.DTensorSpec | None]) -> bool:
    own_specs = list(map(private_dtensors.spec_if_any, values))
    return own_specs == specs or all(map(_goes_with, values, own_specs, specs))


def _goes_with(x: Tensor | None, spec: private.DTensorSpec | None, of_parameter: private.DTensorSpec | None) -> bool:
    if x is None or spec is of_parameter:
        return True
    if spec is None or of_parameter is None:
        return spec is None and x.ndim == 0
    return (spec.placements, spec.shape, spec.mesh) == (of_parameter.placements, of_parameter.shape, of_parameter.mesh)


def _hand_back(lists: Lists, parts: Lists) -> None:
    """Put states that the update has made into the lists, as DTensors."""
    for values, made in zip(lists[1:], parts[1:], strict=True):
        for at, x in enumerate(values):
            if x is None and made[at] is not None:
                parameter = lists[0][at]
                is_sharded = isinstance(parameter, DTensor)
                values[at] = private.wrap(made[at], private.spec_of(parameter)) if is_sharded else made[at]


def _like(op: private.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Make a part of the same shape and dtype; leave all other cases to torch."""
    x, *others = args
    spec, options = private.spec_of(x), {name for name, value in kwargs.items() if value not in (None, False)}
    if (
        options - {"memory_format"}
        or kwargs.get("memory_format", torch.preserve_format) != torch.preserve_format
        or any(placement.is_partial() for placement in spec.placements)
    ):
        return private_dtensors.as_torch_does(op, args, kwargs)
    return private.wrap(op(private.unwrap(x), *others, **kwargs), spec)
