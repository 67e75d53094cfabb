"""The choice of what is padded: dimensions of parameters, for factors that no number of devices divides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.pcg.graph import Graph
from shardwright.pcg.node import Node
from shardwright.pcg.padding.laws import FINITE, may_stretch
from shardwright.pcg.padding.longer import appended
from shardwright.pcg.padding.stretches import Padding, Stretch, holders, of_dims, within

MOST_PADDING = 1 / 4
"""The largest share of its size by which a factor is padded."""


def paddings(graph: Graph, num_parts: int) -> tuple[Padding, ...]:
    """Return the dimensions of parameters to pad, so that `num_parts` devices can split what they cannot as it is.

    Those are factors of contractions, lookups and losses for which all padding begins at parameters. A factor that
    would grow by more than `MOST_PADDING` is padded for fewer parts, or not at all.
    """
    stretches, refused = dict[tuple[str, int], Stretch](), set[tuple[str, int]]()
    search = _Origins(graph)
    for node in graph.nodes:
        for factor, factor_stretch in _uneven(graph, node, num_parts):
            for padding in search.of_factor(node, factor, factor_stretch) or ():
                key = padding.target, padding.dim
                if stretches.setdefault(key, padding.stretch) != padding.stretch:
                    refused.add(key)
    known = {key: Padding(*key, stretch) for key, stretch in stretches.items() if key not in refused}
    while more := _partners(graph, search, known):
        known |= more
    return tuple(known.values())


_Known = Mapping[tuple[str, int], Padding]


def _partners(graph: Graph, search: _Origins, known: _Known) -> _Known:
    """Return the paddings of further parameters, to which zeros would be appended for each use otherwise."""
    places = appended(graph, tuple(known.values())) if known else ()
    origins = (padding for place in places for padding in search.of(*place) or ())
    return {(padding.target, padding.dim): padding for padding in origins if (padding.target, padding.dim) not in known}


def _uneven(graph: Graph, node: Node, num_parts: int) -> Iterator[tuple[int, Stretch]]:
    """Yield the factors of heavy work that the parts do not divide."""
    row = node.row
    if row is None or node.op not in FINITE or not (row.contraction or row.lookup or row.products is not None):
        return
    signature = graph.signature(node)
    for number, factor in enumerate(signature.factors):
        stretch = Stretch(1, factor.size, _padded_size(factor.size, num_parts), 1)
        if stretch.padded > stretch.size and may_stretch(node, row, signature, number, stretch):
            yield number, stretch


def _padded_size(size: int, num_parts: int) -> int:
    """Return the size for the most parts that divide `num_parts` and need no more than `MOST_PADDING`."""
    for parts in range(num_parts, 1, -1):
        padded = -(-size // parts) * parts
        if num_parts % parts == 0 and padded - size <= MOST_PADDING * size:
            return padded
    return size


class _Origins:
    """The parameters at which the padding of a value begins."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._known = dict[tuple[str, int, Stretch], tuple[Padding, ...] | None]()

    def of(self, name: str, dim: int, stretch: Stretch) -> tuple[Padding, ...] | None:
        """Return them; None where the padding of this dimension would begin elsewhere too."""
        key = name, dim, stretch
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._found(self.graph.by_name[name], dim, stretch)
        return self._known[key]

    def _found(self, node: Node, dim: int, stretch: Stretch) -> tuple[Padding, ...] | None:
        if node.is_complex and dim == len(self.graph.types[node.name].shape) - 1:
            return None
        if node.op == "parameter":
            return (Padding(str(node.attr("target")), dim, stretch),)
        if (row := node.row) is None:
            return None
        signature = self.graph.signature(node)
        place = within(signature.result[dim], signature, stretch)
        if place is None or not may_stretch(node, row, signature, *place):
            return None
        return self.of_factor(node, *place)

    def of_factor(self, node: Node, factor: int, start: Stretch) -> tuple[Padding, ...] | None:
        """Return them for an operator of which a factor is stretched."""
        signature, all_origins = self.graph.signature(node), list[Padding]()
        for position in holders(signature, factor):
            for at, stretch in (of_dims(signature.operands[position], signature, {factor: start}) or {}).items():
                origins = self.of(node.inputs[position], at, stretch)
                if origins is None:
                    return None
                all_origins += origins
        return tuple(all_origins) or None
