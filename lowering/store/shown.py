"""Masks in buffers show no more than a plan was made for: compared before the first step, and when they have changed.

A plan may leave out keys that the values of a mask hid as the model was captured (`pcg.shown`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardwright.lowering.private import FakeTensor
from shardwright.lowering.store.storage import Held, Slices, part_of
from shardwright.pcg.attrs import integers
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.node import Node
from shardwright.pcg.shown import FINITE, HIDES, LEAST, SHOWS


class ShownMasks:
    """The leaves of a graph that say what their values show, with these."""

    def __init__(self, graph: Graph, held: Mapping[str, Held], constants: Mapping[str, Tensor]) -> None:
        """Compare the constants, which do not change. Raises as `check` does."""
        read = [node for node in graph.nodes if node.is_leaf and SHOWS in dict(node.attrs)]
        self._buffers = [(n, held[str(n.attr("target"))]) for n in read if str(n.attr("target")) in held]
        self._compared = dict[str, tuple[Tensor, int]]()
        for node in read:
            if (value := constants.get(str(node.attr("target")))) is not None:
                _compare(node, value, value.shape)

    def check(self) -> None:
        """Raise a `PlanError` if a mask shows a key that the plan leaves out."""
        for node, held in self._buffers:
            before, version = self._compared.get(held.name, (None, 0))
            if before is not held.inside or version != held.inside._version:
                _compare(node, held.trimmed(held.inside.detach()), held.outside.shape, held.slices)
                self._compared[held.name] = held.inside, held.inside._version


def _compare(node: Node, values: Tensor, shape: torch.Size, slices: Slices = ()) -> None:
    for what in _beyond(node, values, shape, slices):
        raise PlanError(
            f"{node.op} {node.attr('target')!r} {what}, but the plan leaves out keys that its values hid when the "
            "model was captured; plan again, with these values"
        )


def _beyond(node: Node, values: Tensor, shape: torch.Size, slices: Slices) -> Iterator[str]:
    """Yield what this rank's part of a mask of some shape shows, or hides, and should not."""
    if isinstance(values, FakeTensor):  # a dry run has no values
        return
    attrs, (rows, columns) = dict(node.attrs), shape[-2:]
    places = [torch.arange(n, device=values.device, dtype=torch.int32) for n in (rows, columns)]
    apart = part_of((places[1] - places[0].unsqueeze(-1)).expand(shape), slices)
    visible = values if values.dtype == torch.bool else values > LEAST
    for name, where, verb in ((SHOWS, visible, "shows"), (HIDES, ~visible, "hides")):
        if name in attrs:
            first, last = integers(attrs, name)
            if (where & ((apart < first) | (apart > last))).any():
                yield f"{verb} an element outside of the band {first} to {last}"
    if attrs.get(FINITE):
        if not visible[apart == 0].all():
            yield "hides a query from its own key by a number that is no -inf"
    elif HIDES not in attrs and (~visible & (values != float("-inf"))).any():
        yield "hides by a number that is no -inf"
