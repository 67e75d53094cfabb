"""An optimizer's states and the options of its groups, by the model's names, as checkpoints have them.

state.NAME.KEY    what the optimizer keeps for a parameter: a DTensor of its layout, a tensor, a number
NAME              the options of the group that a parameter is in
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer

from shardwright.pcg.errors import CheckpointError

Groups = Mapping[str, Mapping[str, Any]]
"""The options of each parameter's group, by the parameter's name."""
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # each stage has a list of its own parameters
_STATE = "state."


def check_parameters(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise `CheckpointError` for an optimizer with a parameter that is not the model's."""
    names, groups = _names(model), [] if optimizer is None else optimizer.param_groups
    if any(parameter not in names for group in groups for parameter in group["params"]):
        raise CheckpointError(
            "the optimizer has a parameter that is none of the compiled model's; make it of parallel.parameters()"
        )


def flat(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Any], Groups]:
    """Return an optimizer's states, and the options of its groups; nothing where there is no optimizer.

    Raises `CheckpointError` for a parameter that is not the model's, and for states that are lists of tensors.
    """
    states, groups, names = dict[str, Any](), dict[str, Mapping[str, Any]](), _names(model)
    if optimizer is None:
        return states, groups
    check_parameters(model, optimizer)
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            groups[name := names[parameter]] = options
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, (list, dict, tuple)):
                    what = f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__}"
                    raise CheckpointError(f"{what}; save its state_dict() apart")
                states[f"{_STATE}{name}.{key}"] = value
    return states, groups


@contextmanager
def room_for(model: nn.Module, optimizer: Optimizer | None, saved: Collection[str]) -> Generator[dict[str, Any]]:
    """Yield room for the saved states of an optimizer, which are its own then. If an error follows, all is as before.

    torch fills an optimizer by a step of length 0 without gradients. States of parameters that had none are dropped.
    """
    if optimizer is None:
        yield {}
        return
    before, gradients = dict(optimizer.state), [(p, p.grad) for p in model.parameters()]
    optimizer.state.clear()
    for parameter, _ in gradients:
        parameter.grad = None
    had, names = {name.removeprefix(_STATE).rpartition(".")[0] for name in saved}, _names(model)
    try:
        if had and any(group["params"] for group in optimizer.param_groups):
            get_optimizer_state_dict(model, optimizer, options=_FLAT)
        for parameter in list(optimizer.state):
            if names.get(parameter) not in had:
                del optimizer.state[parameter]
        yield flat(model, optimizer)[0]
    except BaseException:
        optimizer.state.clear()
        optimizer.state.update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        raise


def check_groups(model: nn.Module, optimizer: Optimizer | None, saved: Groups) -> None:
    """Raise `CheckpointError` if a parameter's group was not saved, or a group's parameters had different options."""
    names = _names(model)
    for number, group in enumerate(optimizer.param_groups if optimizer is not None and saved else ()):
        own = [names[parameter] for parameter in group["params"]]
        for name in own:
            if name not in saved:
                raise CheckpointError(f"the optimizer that was saved did not have {name}; use the same ones")
            if not equal(saved[name], saved[own[0]]):
                raise CheckpointError(
                    f"{own[0]} and {name} are in one group of the optimizer (number {number}), and were saved with "
                    "other options; make the same groups"
                )


def put(model: nn.Module, optimizer: Optimizer, states: Mapping[str, Any], groups: Groups) -> None:
    """Give an optimizer what was read: options of groups, and states that are no tensors, not read in place."""
    names = _names(model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            group.update(groups.get(name, {}))
            own = optimizer.state.get(parameter, {})
            own.update({key: states[f"{_STATE}{name}.{key}"] for key in own})


def equal(a: object, b: object) -> bool:
    """Return whether nests of tensors and plain values are equal."""
    match a, b:
        case Tensor(), Tensor():
            return torch.equal(a, b)
        case Mapping(), Mapping():
            return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
        case list(), list():
            return len(a) == len(b) and all(map(equal, a, b))
        case _:
            return a == b


def _names(model: nn.Module) -> dict[Tensor, str]:
    """Return the first name of each parameter."""
    return {parameter: name for name, parameter in model.named_parameters()}
