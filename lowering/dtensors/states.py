"""States that an optimizer would make as plain tensors: they are made as DTensors before its first step.

torch refuses operators on a plain tensor and a DTensor. A new optimizer is a row of `_STATES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwright.lowering import private_dtensors

Options = Mapping[str, Any]


def make_states() -> None:
    """Install this in this process, for parameters that are DTensors on meshes of ours."""
    register_optimizer_step_pre_hook(_make)


def _adafactor(gradient: Tensor, group: Options) -> dict[str, Any]:
    """Return the states of transformers' Adafactor: sums over the rows and columns of whole matrices."""
    shape, states = gradient.shape, dict[str, Any](step=0, RMS=0)
    if group["beta1"] is not None:
        states["exp_avg"] = torch.zeros_like(gradient)
    if len(shape) < 2:
        return states | {"exp_avg_sq": torch.zeros_like(gradient)}
    rows, columns = gradient.new_zeros(shape[:-1]), gradient.new_zeros(shape[:-2] + shape[-1:])
    return states | {"exp_avg_sq_row": rows, "exp_avg_sq_col": columns}


_STATES: Mapping[str, Callable[[Tensor, Options], dict[str, Any]]] = {
    "transformers.optimization.Adafactor": _adafactor,
}
"""The states of a parameter by its gradient, for optimizers by their full names."""


def _make(optimizer: Optimizer, args: tuple[object, ...], kwargs: Options) -> None:
    """Make the states of parameters that have gradients; of all, if these are the work of a closure."""
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(optimizer).__mro__)
    if (states := next((_STATES[name] for name in names if name in _STATES), None)) is None:
        return
    has_closure = any(x is not None for x in (*args[1:], *kwargs.values()))
    for group in optimizer.param_groups:
        for p in group["params"]:
            gradient = p.detach() if has_closure and p.grad is None else p.grad
            if gradient is not None and not optimizer.state[p] and isinstance(p, DTensor) and _is_ours(p):
                narrow = gradient.dtype in (torch.float16, torch.bfloat16)
                optimizer.state[p].update(states(gradient.float() if narrow else gradient, group))


def _is_ours(p: DTensor) -> bool:
    return private_dtensors.is_ours(p.device_mesh)
