"""The reducer: it sums autograd's gradients over mesh axes while backward still runs, and hands them over.

A large gradient is summed in place; small ones are packed into flat buckets. Both are *units*. Units are launched in
the same order on every rank, each as soon as it and all before it are complete. At the end of backward, units that
unused parameters left open are filled with zeros. Then all units are waited for, and every gradient goes to its `Held`.

If a step has several microbatches, autograd adds up their gradients. The sums over ranks run in the backward of the
last microbatch, whose gradients are added to the sums so far. No gradient is handed over earlier, so a step that fails
leaves none behind.

Gradients may be sent in another dtype (`reduce_dtype`): a unit is cast when it is launched, and its sum is cast back.
So each rank's gradient is rounded once, for all its microbatches together; the rounding of sums is the library's.

They may be sent encoded: then a sum has two legs (`EncodedSum`). The second one of a unit is launched after the first
one of the next, as the list of actions says, or at the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from shardwright.lowering import private
from shardwright.lowering.ranks.movement import Axis, EncodedSum, launch_sum
from shardwright.lowering.store.storage import Held
from shardwright.pcg.encodings import Encoding, room
from shardwright.pcg.step.buckets import LARGE_BYTES

Finished = tuple[Held, Tensor, Tensor | None]
"""A parameter, its gradient, and the same as a DTensor, if there is one."""


class Unit(NamedTuple):
    """A (possibly merged) axis, the parameters whose gradients are summed over it together, and how they are sent."""

    axis: Axis
    members: Sequence[Held]
    dtype: torch.dtype
    encoding: Encoding | None = None


class _Unit:
    """A unit: gradients that are summed together."""

    def __init__(self, unit: Unit) -> None:
        self.axis, self.members, self.dtype, self.encoding = unit._replace(members=list(unit.members))
        self.packed = len(self.members) > 1 or _num_bytes(self.members[0]) < LARGE_BYTES
        self.home = self._flat() if self.packed else None
        views = self.home[1] if self.home is not None else []
        self.at_home = [
            held.wrap(view) if held.shares(view) else None
            for held, view in zip(self.members, views, strict=bool(views))
        ]
        self.reset()

    def reset(self) -> None:
        self.buffer: Tensor | None = None
        self.sent: Tensor | None = None
        self.views: list[Tensor] = []
        self.arrived: list[bool] = []
        self.earlier: list[Tensor | None] = [None] * len(self.members)
        self.work: Any = None

    def put_aside(self) -> None:
        """Set aside the sums of earlier microbatches, so that the arrival of the last one's gradients is noticed."""
        self.earlier = [_take_gradient(held.inside) for held in self.members]

    @property
    def complete(self) -> bool:
        return all(held.inside.grad is not None for held in self.members)

    @property
    def begun(self) -> bool:
        gradients = (*self.earlier, *(held.inside.grad for held in self.members))
        return any(gradient is not None for gradient in gradients)

    def launch(self, *, at_home: bool) -> None:
        """Take the members' gradients and start to sum them; `at_home`: in the bucket's own memory, if that is free."""
        gradients = private.add_all(self.earlier, [_take_gradient(held.inside) for held in self.members])
        self.earlier = [None] * len(self.members)
        self.arrived = [gradient is not None for gradient in gradients]
        if self.packed:
            self._pack(gradients, at_home)
        else:
            assert gradients[0] is not None
            self.buffer = gradients[0].contiguous()
            self.views = [self.buffer]
        del gradients  # they lie in the buffer; free them before more memory is allocated
        assert self.buffer is not None
        self.sent = self.buffer.to(self.dtype)
        self.work = launch_sum(self.sent, self.axis, self.encoding)

    def spread(self) -> None:
        """Send the sum of this rank's piece to all ranks, if gradients are sent encoded and this has not been done."""
        if isinstance(self.work, EncodedSum):
            self.work.send_back()

    def finish(self) -> Iterator[Finished]:
        self.work.wait()
        assert self.buffer is not None
        assert self.sent is not None
        if self.sent is not self.buffer:
            self.buffer.copy_(self.sent)
        self.sent = None
        own = self.at_home if self.home is not None and self.buffer is self.home[0] else [None] * len(self.members)
        for held, gradient, wrapped, arrived in zip(self.members, self.views, own, self.arrived, strict=True):
            if arrived:
                yield held, gradient, wrapped

    def _pack(self, gradients: Sequence[Tensor | None], at_home: bool) -> None:
        """Pack gradients into the bucket's own memory, unless gradients that the user still holds lie in it."""
        free = at_home and all(held.outside.grad is None for held in self.members)
        self.buffer, self.views = self.home if free and self.home is not None else self._flat()
        with torch.no_grad():
            if self.encoding is not None:  # what lies between members; a sum with a NaN has left one there
                self.buffer.zero_()
            private.copy_all(self.views, gradients)

    def _flat(self) -> tuple[Tensor, list[Tensor]]:
        """Return memory for all members, and each member's view of it."""
        first, sizes = self.members[0].inside, [held.inside.numel() for held in self.members]
        rooms = sizes if self.encoding is None else [room(size) for size in sizes]
        total = sum(rooms) if self.encoding is None else room(sum(rooms), self.axis.size)
        flat = torch.empty(total, dtype=first.dtype, device=first.device)
        parts = zip(flat[: sum(rooms)].split(rooms), sizes, self.members, strict=True)
        return flat, [part[:size].view(held.inside.shape) for part, size, held in parts]


class Reducer:
    """The way of every parameter's gradient from autograd to its `Held`.

    Hooks are few, as each costs microseconds: one on each large gradient, and one on the last gradient of a bucket.
    """

    def __init__(
        self, units: Iterable[Unit], trained: Iterable[Held], spread: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Make the units, in the order in which backward completes them.

        `trained`: all parameters that get a gradient, summed or not. `spread`: the units whose sums go on to all ranks
        right after another unit is launched, by the number of that one.
        """
        self.units, self.spread_after = [_Unit(unit) for unit in units], spread or {}
        self.summed = {id(held.inside) for unit in self.units for held in unit.members}
        self.held = {id(held.inside): held for held in trained}
        self.direct = [held for key, held in self.held.items() if key not in self.summed]
        self.at_end: list[Callable[[], None]] = []
        self.kept: list[Finished] | None = None
        self.hold_back: Callable[[Finished], bool] = lambda finished: False
        self.running, self.in_backward, self.next = False, False, 0
        self.first = self.last = True
        for unit in self.units:
            unit.members[-1].inside.register_post_accumulate_grad_hook(lambda leaf: self._launch_complete())

    def watch(self, *roots: GradientEdge, first: bool = True, last: bool = True) -> None:
        """Watch for the start of a backward from `roots`, the results of a step's first, last or other microbatch.

        With the first microbatch, a step that did not end is forgotten.
        """
        if first and self.running:
            self._forget()
            for held in self.held.values():
                held.inside.grad = None
        self.first, self.last = first, last
        if last and not first:
            for unit in self.units:
                unit.put_aside()
        for root in roots:
            root.node.register_prehook(lambda gradients: self._begin())

    def deliver(self, leaf: Tensor, gradient: Tensor) -> None:
        """Accept a gradient that does not come from autograd."""
        if id(leaf) not in self.summed and self.first and self.last:
            self._hand_over([(self.held[id(leaf)], gradient, None)])
            return
        leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
        if id(leaf) in self.summed:
            self._launch_complete()

    @contextmanager
    def keeping(self, kept: list[Finished]) -> Generator[None]:
        """Collect finished gradients in a list, instead of giving them to their parameters."""
        self.kept = kept
        try:
            yield
        finally:
            self.kept = None

    def hand_over(self, finished: Iterable[Finished]) -> None:
        """Give gradients to their parameters, or collect them under `keeping`."""
        if self.kept is not None:
            self.kept += finished
            return
        for held, gradient, wrapped in finished:
            held.accept_gradient(gradient, wrapped)

    def _hand_over(self, finished: Iterable[Finished]) -> None:
        self.hand_over(one for one in finished if not self.hold_back(one))

    def _begin(self) -> None:
        self.running = True
        if not self.in_backward:
            self.in_backward = True
            private.after_backward(self.finish)

    def _launch_complete(self) -> None:
        while self.last and self.next < len(self.units) and self.units[self.next].complete:
            self._launch(self.next)
            self.next += 1

    def _launch(self, number: int) -> None:
        self.units[number].launch(at_home=self.kept is None)
        for earlier in self.spread_after.get(number, ()):
            self.units[earlier].spread()

    def finish(self) -> None:
        """End a backward; at the end of a step's last one, launch incomplete units, wait, and hand gradients over."""
        for callback in self.at_end:
            callback()
        self.in_backward = False
        if not self.last:
            return
        for number, unit in enumerate(self.units):
            if unit.work is None and unit.begun:
                self._launch(number)
        for unit in self.units:
            unit.spread()
        gradients = [(held, _take_gradient(held.inside), None) for held in self.direct]
        self._hand_over((held, gradient, none) for held, gradient, none in gradients if gradient is not None)
        for unit in self.units:
            if unit.work is not None:
                self._hand_over(unit.finish())
        for unit in self.units:
            if unit.begun:  # delivered twice: two forwards, one backward
                unit.launch(at_home=self.kept is None)
                self._hand_over(unit.finish())
        self._forget()

    def _forget(self) -> None:
        self.running, self.in_backward, self.next = False, False, 0
        for unit in self.units:
            unit.reset()


def _take_gradient(leaf: Tensor) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _num_bytes(held: Held) -> int:
    return held.inside.numel() * held.inside.element_size()
