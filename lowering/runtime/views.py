"""Views of memory that comes and goes: gathered again, recomputed, or fetched from the host.

Autograd keeps a view in place of a tensor. A view of complex numbers may lie in memory of real ones, and torch's lazy
conjugates and negations are bits of a view that its place does not show.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """The place of a tensor in its memory. `offset` and `stride` count elements of its own dtype."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: Tensor) -> View:
        place = tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return View(*place, tensor.is_conj(), tensor.is_neg())

    def on(self, memory: Tensor) -> Tensor:
        """Return the same numbers of other memory, that of a tensor of any dtype."""
        if self.dtype == memory.dtype:
            found = memory.as_strided(self.size, self.stride, self.offset)
        else:
            found = torch.empty(0, dtype=self.dtype, device=memory.device)
            found.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        found = found.conj() if self.is_conj else found
        return -found if self.is_neg else found
