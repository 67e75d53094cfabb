"""Foreign calls inside a region that backward makes again: they are made once, in forward.

A foreign part may count its calls, or draw where nobody sees it. So its results are kept, and so is what its own
autograd saves; all else in the region is made again from these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright.lowering.store.foreign import ForeignCalls

_Made = tuple[list[tuple[Tensor, bool]], Tensor | None]
"""The results of a call, each with whether autograd follows it, and the generator's state after the call."""


class Once:
    """The foreign calls of one run of a region. `pack`, `unpack`: how values are kept outside of regions."""

    def __init__(
        self,
        foreign: Any,  # noqa: ANN401
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        generator: torch.Generator | None,
    ) -> None:
        self.foreign, self.hooks, self.generator = foreign, (pack, unpack), generator
        self.made: list[_Made] = []

    def call(self, name: str, number: int, *operands: Tensor) -> tuple[Tensor, ...]:
        with saved_tensors_hooks(*self.hooks):
            results = self.foreign.call(name, number, *operands)
        state = None if self.generator is None else self.generator.get_state()
        self.made.append(([(x.detach(), x.requires_grad) for x in results], state))
        return results

    def again(self) -> Again:
        """Return what takes the place of the calls where the region is made again."""
        return Again(iter(self.made), self.generator)


class Again:
    """The results of foreign calls, in order, for a region that is made again."""

    def __init__(self, made: Iterator[_Made], generator: torch.Generator | None) -> None:
        self.made, self.generator = made, generator

    def call(self, name: str, number: int, *operands: Tensor) -> tuple[Tensor, ...]:
        results, state = next(self.made)
        if self.generator is not None and state is not None:
            self.generator.set_state(state)
        return tuple(x.detach().requires_grad_(follows) for x, follows in results)  # so that as much is saved as before


def calls_foreign(operand: object) -> bool:
    """Return whether an operand of a region is what makes foreign calls, also where `torch.compile` leaves it alone."""
    return isinstance(operand, ForeignCalls) or isinstance(getattr(operand, "item", None), ForeignCalls)
