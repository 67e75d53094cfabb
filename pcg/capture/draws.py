"""Draws without memory find the states of their generators, and leave the generators where they are.

    draw ──▶ the state of its generator: as the last draw left it, as an older one did, or a new one

Each draw puts a mark into its generator: a state that no generator has by itself. It says which draw was the last, also
where a constructor keeps states and puts them back.
"""

from __future__ import annotations

import hashlib
from itertools import count

import torch
from torch import Generator, Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

_MARKS = count(1)
"""Numbers of marks, of all records: one in a block may find the marks of the block around it."""


class Draws:
    """The draws of a record."""

    def __init__(self) -> None:
        self._last = dict[Generator, int]()  # the step that drew
        self._marks = dict[bytes, tuple[int, Tensor]]()  # the step before each, and the state if nothing had been drawn

    def found(self, generator: Generator, number: int) -> Tensor | int | None:
        """Return the state in which a step finds its generator, and mark it.

        None: as its last draw leaves it; a number: as the draw of that step leaves its generator.
        """
        last = self._last.get(generator)
        self._last[generator] = number
        with unset_fake_temporarily():
            state = generator.get_state()
            after, began = self._marks.get(_key(state), (None, state))
            self._mark(generator, number, began)
        if after is None:
            return state
        return None if after == last else after

    def put_back(self) -> None:
        """Put generators where they would be if nothing had been drawn."""
        for generator in self._last:
            _, began = self._marks.get(_key(generator.get_state()), (None, None))
            if began is not None:
                generator.set_state(began)

    def _mark(self, generator: Generator, number: int, began: Tensor) -> None:
        if generator.device.type == "cpu":  # its state is 24 bytes, of them 8 for the seed, and MT19937's numbers
            mark = began.clone()
            mark.view(torch.int64)[3:5] = torch.tensor([next(_MARKS), number])
            generator.set_state(mark)
            self._marks[_key(generator.get_state())] = number, began


def _key(state: Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
