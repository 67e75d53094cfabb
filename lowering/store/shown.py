"""Masks in buffers show no more than a plan was made for: compared before each step.

A plan may leave out keys that the values of a mask hid as the model was captured (`pcg.shown`). Values may be written
in ways that torch does not count, such as through `.data`, so no step goes without the comparison: of nearly all
elements, one pass over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from shardwright.lowering.private import FakeTensor
from shardwright.lowering.store.storage import Held, Slices, part_of
from shardwright.pcg.attrs import integers
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.node import Node
from shardwright.pcg.shown import FINITE, HIDES, LEAST, SHOWS

TILE_ROWS = 256
"""The number of queries whose keys outside of a band are compared at once."""


class ShownMasks:
    """The leaves of a graph that say what their values show, with these."""

    def __init__(self, graph: Graph, held: Mapping[str, Held], constants: Mapping[str, Tensor]) -> None:
        """Compare the constants, which do not change. Raises as `check` does."""
        read = [node for node in graph.nodes if node.is_leaf and SHOWS in dict(node.attrs)]
        self._buffers = [(n, held[str(n.attr("target"))]) for n in read if str(n.attr("target")) in held]
        for node in read:
            if (value := constants.get(str(node.attr("target")))) is not None:
                _compare(node, value, value.shape)

    def check(self) -> None:
        """Raise a `PlanError` if a mask shows a key that the plan leaves out."""
        for node, held in self._buffers:
            _compare(node, held.trimmed(held.inside.detach()), held.outside.shape, held.slices)


def _compare(node: Node, values: Tensor, shape: torch.Size, slices: Slices = ()) -> None:
    for what in _beyond(node, values, shape, slices):
        raise PlanError(
            f"{node.op} {node.attr('target')!r} {what}, but the plan leaves out keys that its values hid when the "
            "model was captured; plan again, with these values"
        )


def _beyond(node: Node, values: Tensor, shape: torch.Size, slices: Slices) -> Iterator[str]:
    """Yield what this rank's part of a mask of some shape shows, or hides, and should not."""
    if isinstance(values, FakeTensor) or not values.numel():  # a dry run has no values
        return
    attrs = dict(node.attrs)
    rows, columns = (_places(shape, dim, slices) for dim in (len(shape) - 2, len(shape) - 1))
    for name, verb in ((SHOWS, "shows"), (HIDES, "hides")):
        if name not in attrs or (band := integers(attrs, name)) == (1 - shape[-2], shape[-1] - 1):
            continue
        visible, least, hidden = values, float("-inf"), LEAST
        if values.dtype == torch.bool:
            visible, least, hidden = (values if name == SHOWS else ~values).view(torch.uint8), 0, 0
        most = _most_outside(visible, rows, columns, band, least)
        if not most <= hidden:  # nor is NaN
            yield f"{verb} an element outside of the band {band[0]} to {band[1]}"
        elif FINITE not in attrs and most > least:
            yield "hides by a number that is no -inf"
    if FINITE in attrs:
        at = np.searchsorted(columns, rows)
        here = np.flatnonzero(columns[np.minimum(at, len(columns) - 1)] == rows)
        if len(here) and not values[..., torch.from_numpy(here), torch.from_numpy(at[here])].amin() > LEAST:
            yield "hides a query from its own key by a number that is no -inf"


def _places(shape: torch.Size, dim: int, slices: Slices) -> np.ndarray:
    """Return the indices along a dimension that this rank's part has."""
    return part_of(torch.arange(shape[dim]), [(axis, 0, blocks) for axis, d, blocks in slices if d == dim]).numpy()


def _most_outside(values: Tensor, rows: np.ndarray, columns: np.ndarray, band: tuple[int, ...], least: float) -> Tensor:
    """Return the largest of the values [..., rows, columns] outside of the band; `least`, if there are none.

    Of some rows at a time: keys that all of them have outside are read once, and places are compared for the others.
    """
    (first, last), most = band, [values.new_full((), least)]
    for at in range(0, len(rows), TILE_ROWS):
        tile, own = values[..., at : at + TILE_ROWS, :], rows[at : at + TILE_ROWS]
        begin, end = np.searchsorted(columns, [own[0] + first, own[-1] + last + 1]).tolist()
        apart = columns[begin:end] - own[:, None]
        inside = torch.from_numpy((apart >= first) & (apart <= last)).to(values.device)
        parts = tile[..., :begin], tile[..., begin:end].masked_fill(inside, least), tile[..., max(begin, end) :]
        most += [part.amax() for part in parts if part.numel()]
    return torch.stack(most).amax()
