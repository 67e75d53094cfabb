"""Sums parameters' gradients over mesh axes while the backward is still running.

A large gradient is summed in place; small ones are packed into flat buckets. Both are *units*. Units are launched in
one fixed order on every rank, each as soon as it and all before it are complete, and waited for in a callback at the
end of the backward, where units that unused parameters left open are completed with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering import private
from shardwright.lowering.movement import Axis
from shardwright.lowering.storage import Held

LARGE_BYTES = 1 << 18
"""Gradients of this size are summed in place: copying them would cost more than another launch."""
BUCKET_BYTES = 4 << 20
"""A bucket is closed when it has reached this size."""


@dataclass(frozen=True)
class Member:
    """A parameter and the (possibly merged) axis that its gradient is summed over; None: not at all."""

    held: Held
    axis: Axis | None


class _Unit:
    """Gradients that are summed by one collective."""

    def __init__(self, axis: Axis, members: Sequence[Held]) -> None:
        self.axis, self.members = axis, list(members)
        self.packed = len(self.members) > 1 or _num_bytes(self.members[0]) < LARGE_BYTES
        self.home = self._flat() if self.packed else None
        self.reset()

    def reset(self) -> None:
        self.buffer: Tensor | None = None
        self.views: list[Tensor] = []
        self.arrived: set[int] = set()
        self.work: Any = None

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.members)

    def put(self, slot: int, gradient: Tensor) -> None:
        self.arrived.add(slot)
        if not self.packed:
            self.buffer = gradient.contiguous()
            return
        if self.buffer is None:
            self._open()
        self.views[slot].copy_(gradient)

    def launch(self) -> None:
        if self.packed:
            for slot in range(len(self.members)):
                if slot not in self.arrived:
                    self.views[slot].zero_()
        self.work = dist.all_reduce(self.buffer, group=self.axis.group, async_op=True)

    def finish(self) -> None:
        self.work.wait()
        for slot in sorted(self.arrived):
            gradient = self.views[slot] if self.packed else self.buffer
            assert gradient is not None
            self.members[slot].accept_gradient(gradient)

    def _open(self) -> None:
        """Take the bucket's own memory, unless gradients that the user still holds lie in it."""
        free = all(held.outside.grad is None for held in self.members)
        self.buffer, self.views = self.home if free and self.home is not None else self._flat()

    def _flat(self) -> tuple[Tensor, list[Tensor]]:
        """Memory for all members, and each member's view of it."""
        first = self.members[0].inside
        sizes = [held.inside.numel() for held in self.members]
        flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        parts = flat.split(sizes)
        return flat, [part.view(held.inside.shape) for part, held in zip(parts, self.members, strict=True)]


class Reducer:
    """Takes each parameter's gradient from autograd and hands the sum to its `Held`."""

    def __init__(self, members: Sequence[Member]) -> None:
        """`members` in the order in which their gradients become complete."""
        self.units = _units(members)
        places = ((n, i, held) for n, unit in enumerate(self.units) for i, held in enumerate(unit.members))
        self.slots = {id(held.inside): (n, i) for n, i, held in places}
        self.held = {id(member.held.inside): member.held for member in members}
        self.at_end: list[Callable[[], None]] = []
        self.reset()
        for member in members:
            member.held.inside.register_post_accumulate_grad_hook(self._hook)

    def reset(self) -> None:
        """Forget a backward that did not end."""
        self.running, self.next = False, 0
        for unit in self.units:
            unit.reset()

    def _hook(self, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:  # a block delivers its members' gradients itself
            self.deliver(leaf, gradient)

    def begin(self) -> None:
        """Called in a backward: see to it that `_finish` runs at its end."""
        if not self.running:
            self.running = True
            private.after_backward(self._finish)

    def deliver(self, leaf: Tensor, gradient: Tensor) -> None:
        """Take a leaf's whole gradient: sum it if it has to be summed, then hand it over."""
        if id(leaf) not in self.slots:
            self.held[id(leaf)].accept_gradient(gradient)
            return
        self.begin()
        number, slot = self.slots[id(leaf)]
        self.units[number].put(slot, gradient)
        while self.next < len(self.units) and self.units[self.next].complete:
            self.units[self.next].launch()
            self.next += 1

    def _finish(self) -> None:
        """At the end of the backward: launch what is incomplete, wait, hand over."""
        for callback in self.at_end:
            callback()
        used = [unit for unit in self.units if unit.arrived]
        for unit in used:
            if unit.work is None:
                unit.launch()
        for unit in used:
            unit.finish()
        self.reset()


def _units(members: Sequence[Member]) -> list[_Unit]:
    """Members in the order in which their gradients come, as units in the order in which they become complete."""
    open_: dict[tuple[str, torch.dtype], list[Held]] = {}
    units: list[_Unit] = []
    axes: dict[str, Axis] = {}

    def close(key: tuple[str, torch.dtype]) -> None:
        units.append(_Unit(axes[key[0]], open_.pop(key)))

    for member in members:
        if member.axis is None:
            continue
        axes[member.axis.name] = member.axis
        if _num_bytes(member.held) >= LARGE_BYTES:
            units.append(_Unit(member.axis, [member.held]))
            continue
        key = (member.axis.name, member.held.inside.dtype)
        open_.setdefault(key, []).append(member.held)
        if sum(map(_num_bytes, open_[key])) >= BUCKET_BYTES:
            close(key)
    for key in list(open_):
        close(key)
    return units


def _num_bytes(held: Held) -> int:
    return prod(held.inside.shape) * held.inside.element_size()
