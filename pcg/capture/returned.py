"""A model's results: a nest of tensors and plain values, which a program fills with tensors of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardwright.pcg.errors import CaptureError

_PLAIN = bool, int, float, str, type(None)


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a nest, by its number."""

    number: int


class Returned:
    """The form of what a model returns. `nest` has slots in place of its tensors; `size` is how many there are."""

    def __init__(self) -> None:
        self.nest: object = None
        self.size = 0

    def taken(self, result: object) -> tuple[torch.Tensor, ...]:
        """Remember the form of a result; return its tensors. Raises `CaptureError` for other leaves, or no tensor."""
        leaves, spec = tree_flatten(result)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        odd = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_PLAIN))]
        if any(tensor.is_complex() for tensor in tensors):
            raise CaptureError("the model returns complex numbers, which no program gives; return torch.view_as_real")
        if odd or not tensors:
            what = f"a {type(odd[0]).__name__}" if odd else "no tensor"
            raise CaptureError(
                f"the model returns {what}, which no program gives; return nests of tensors and plain values "
                "(transformers models: use_cache=False)"
            )
        numbers, self.size = iter(range(len(tensors))), len(tensors)
        self.nest = tree_unflatten(
            [Slot(next(numbers)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )
        return tensors

    def filled(self, tensors: Sequence[torch.Tensor]) -> object:
        """Return a result of this form with these tensors."""
        return tree_map_only(Slot, lambda slot: tensors[slot.number], self.nest)
