"""An optimizer's states that lie in the host's memory between updates.

    on the host ──fetch lot k + 1──▶ on the device: update of lot k ──return──▶ on the host

A step updates parameters in lots. States of two lots are on the device at a time: those that are updated, and those
that arrive meanwhile. Torch's optimizers update each parameter by itself, so weights and states are equal to the bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.lowering import private, private_dtensors
from shardwright.lowering.runtime.host import Host, Wait
from shardwright.pcg.arguments import SECONDS, Argument, checked
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.step.optimizers import AT_ONCE_BYTES

BY_PARAMETER = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""The optimizers of `torch.optim` that update each parameter by itself."""

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Group = dict[str, Any]
Lot = list[tuple[Group, Tensor]]
"""Parameters that are updated together, each with its group's options."""


@checked(
    ShardwrightError,
    optimizer=Argument((Optimizer,), "an optimizer of torch, made of parallel.parameters()"),
    timeout_s=SECONDS,
)
def on_host(optimizer: AnyOptimizer, *, timeout_s: float = 600.0) -> AnyOptimizer:
    """Keep an optimizer's states in the host's memory from now on, and return the optimizer.

    Its steps copy them to the device and back, lot by lot, beside the updates. Groups, hooks, scalers, its `state_dict`
    and checkpoints stay as they are. Plan with `optimizer="adam@host"`, so that time and memory are predicted for it.
    Call it before a scheduler of learning rates is made of the optimizer.

    Args:
        optimizer: Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop or SGD of torch.
        timeout_s: seconds after which a copy that has not ended is an error, on a CPU.

    Raises:
        ShardwrightError: the optimizer may look at several parameters at a time, is `differentiable`, or has its states
            there already.
        MachineError: in a step, if the host has no memory left, or a copy takes too long.
    """
    steps = {inspect.unwrap(getattr(torch.optim, name).step) for name in BY_PARAMETER}
    if inspect.unwrap(type(optimizer).step) not in steps:
        raise ShardwrightError(
            f"on_host: {type(optimizer).__name__} may look at several parameters at a time; expected one of "
            f"{', '.join(BY_PARAMETER)} of torch.optim; leave its states on the device"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ShardwrightError(
            f"on_host: {type(optimizer).__name__}(differentiable=True) has a gradient through its states, which copies "
            "would cut; leave them on the device"
        )
    if hasattr(optimizer.step, "on_host"):
        raise ShardwrightError("on_host: the states of this optimizer are on the host already; call it once")
    update = _InLots(optimizer, timeout_s)

    def step(_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        update()
        return loss

    with_hooks: Any = Optimizer.profile_hook_step(step)
    with_hooks.on_host = True
    optimizer.step = MethodType(with_hooks, optimizer)
    optimizer.register_load_state_dict_post_hook(lambda _: update.park())
    update.park()
    return optimizer


class _InLots:
    """The update of an optimizer, lot by lot."""

    def __init__(self, optimizer: Optimizer, timeout_s: float) -> None:
        self.optimizer, self.timeout_s = optimizer, timeout_s
        self.step: Callable[[Optimizer], object] = type(optimizer).step.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        self._hosts = dict[torch.device, Host]()

    def __call__(self) -> None:
        """Update all parameters that have gradients."""
        lots = list(_lots(self.optimizer))
        fetched, returned = self._fetch(lots[0]) if lots else None, list[Wait]()
        for number, lot in enumerate(lots):
            _wait(returned)
            arriving = self._fetch(lots[number + 1]) if number + 1 < len(lots) else None
            assert fetched is not None
            _wait(fetched.waits)
            fetched.put(self.optimizer)
            self._update(lot)
            returned, fetched = self._return(lot, fetched), arriving
        _wait(returned)
        self._finish()

    def park(self) -> None:
        """Bring all states to the host that are on a device."""
        every = [(group, p) for group in self.optimizer.param_groups for p in group["params"]]
        _wait([wait for p in every for wait in self._return([p], _Fetched())])
        self._finish()

    def _update(self, lot: Lot) -> None:
        groups, members = self.optimizer.param_groups, {id(p) for _, p in lot}
        self.optimizer.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) in members]} for group in groups
        ]
        try:
            self.step(self.optimizer)
        finally:
            self.optimizer.param_groups = groups

    def _fetch(self, lot: Lot) -> _Fetched:
        """Launch the copies of a lot's states to its parameters' devices."""
        fetched = _Fetched()
        for _, p in lot:
            for key, there in _tensors(self.optimizer, p):
                source = private_dtensors.part_if_any(there)
                here = torch.empty_like(source, device=_part(p).device)
                fetched.waits.append(self._host(p).link.copy(here, source))
                fetched.states.append((p, key, there, here))
        return fetched

    def _return(self, lot: Lot, fetched: _Fetched) -> list[Wait]:
        """Launch the copies of a lot's states to the host, where those that were fetched have a place already."""
        places, waits = {(id(p), key): x for p, key, x, _ in fetched.states if x.device.type == "cpu"}, list[Wait]()
        for _, p in lot:
            for key, now in list(_tensors(self.optimizer, p)):
                host, source = self._host(p), private_dtensors.part_if_any(now)
                there = places.get((id(p), key))
                if there is None:
                    there = _like(now, _room(host, source))
                waits.append(host.link.copy(private_dtensors.part_if_any(there), source))
                self.optimizer.state[p][key] = there
        return waits

    def _host(self, p: Tensor) -> Host:
        device = _part(p).device
        if device not in self._hosts:
            self._hosts[device] = Host(device, self.timeout_s)
        return self._hosts[device]

    def _finish(self) -> None:
        """Keep the process waiting for the copies: it may read states of the host next, as a checkpoint does."""
        for host in self._hosts.values():
            host.link.finish()


class _Fetched:
    """States that are on their way to a device: the parameter, the key, the state on the host, and the copy."""

    def __init__(self) -> None:
        self.states: list[tuple[Tensor, str, Tensor, Tensor]] = []
        self.waits: list[Wait] = []

    def put(self, optimizer: Optimizer) -> None:
        """Give the copies to the optimizer."""
        for p, key, there, here in self.states:
            optimizer.state[p][key] = _like(there, here)


def _lots(optimizer: Optimizer) -> Iterator[Lot]:
    """Yield the parameters that have gradients in lots of `AT_ONCE_BYTES`, or of one larger parameter."""
    lot, num_bytes = Lot(), 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            if lot and num_bytes + _part(p).nbytes > AT_ONCE_BYTES:
                yield lot
                lot, num_bytes = Lot(), 0
            lot.append((group, p))
            num_bytes += _part(p).nbytes
    if lot:
        yield lot


def _tensors(optimizer: Optimizer, p: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the states of a parameter that are worth a copy: dense tensors of several elements."""
    for key, value in optimizer.state.get(p, {}).items():
        if isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 1:
            yield key, value


def _part(p: Tensor) -> Tensor:
    return private_dtensors.part_if_any(p)


def _like(state: Tensor, part: Tensor) -> Tensor:
    """Return a part of a state as what the state is: a DTensor, or a plain tensor."""
    return private.wrap(part, private.spec_of(state)) if isinstance(state, DTensor) else part


def _room(host: Host, part: Tensor) -> Tensor:
    """Return memory of the host for a part."""
    strides = torch.empty_like(part, device="meta").stride()
    buffer = host.take(part.nbytes)
    return torch.empty(0, dtype=part.dtype).set_(buffer.untyped_storage(), 0, part.size(), strides)


def _wait(waits: list[Wait]) -> None:
    for wait in waits:
        wait()
