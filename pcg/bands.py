"""Bands of attention: how far before and after its own position a query sees keys, read from how a mask is made.

A mask that is made of positions, as of a sliding window or of blocks, is a comparison of affine forms of them. Each
value of the mask's graph is bounded (`bounds`). So no pair of a query and a key is visible outside the band; inside,
the mask decides.

A band is derived wherever it is used, and never stored, so it cannot be wrong for a changed graph.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from shardwright.pcg.attrs import Attrs, integer, integers
from shardwright.pcg.bounds import ALL, INTEGERS, POINTWISE, Affine, Band, Bound, Truth, constant
from shardwright.pcg.choice import axes_along
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import R, S, positions
from shardwright.pcg.parallel import COMBINE, PARTITION, REPLICATE
from shardwright.pcg.ring import Ring
from shardwright.pcg.types import is_float

MASK = 3
"""The operand of attention that says which pairs are visible."""


class _View(NamedTuple):
    """The dimensions of a value along which q and k are counted, and the index of the first; None: of size 1."""

    queries: tuple[int, int] | None
    keys: tuple[int, int] | None

    def moved(self, place: Callable[[int, int], tuple[int, int] | None]) -> _View:
        return _View(*(None if own is None else place(*own) for own in self))


def band_of(graph: Graph, node: Node) -> Band:
    """Return the keys that queries of an attention can see, as differences of positions; of all, if none is known."""
    causal = Band(last=0) if dict(node.attrs).get("causal") else ALL
    if len(node.inputs) <= MASK:
        return causal
    ndim = len(graph.types[node.inputs[MASK]].shape)
    shown = _Reader(graph).shown(node.inputs[MASK], _View((ndim - 2, 0) if ndim > 1 else None, (ndim - 1, 0)))
    return causal & shown


def seen_around(graph: Graph, node: Node, axis: int) -> tuple[int, int] | None:
    """Return how many devices before its own, and how many after, a device sees keys of in a ring, at most.

    None: it sees keys of all. `axis`: along which keys travel.
    """
    band, size, ring = band_of(graph, node), graph.mesh.sizes[axis], node.split[axis]
    assert isinstance(ring, Ring)
    if band == ALL:
        return None
    along, sizes = tuple(axes_along(node.split, ring.queries)), graph.mesh.sizes
    digits = tuple(S(0, choice.blocks) if i in along else R for i, choice in enumerate(node.split))
    extents = {factor.name: factor.size for factor in graph.signature(node).factors}

    def queries(own: int) -> range:
        ends = [[own if i == axis else n * (size - 1) for i, size in enumerate(sizes)] for n in (0, 1)]
        first, last = (positions(extents[ring.queries], digits, sizes, at) for at in ends)
        return range(extents[ring.queries]) if first is None or last is None else range(first[0], last[-1] + 1)

    whole = range(extents[ring.keys])
    part = len(whole) // size
    keys = tuple(whole[i * part :][:part] if ring.blocks == 1 else whole[i::size] for i in range(size))
    seen = _parts_seen(band, tuple(map(queries, range(size))), keys)
    return None if min(seen) >= size - 1 else seen


@lru_cache(maxsize=256)
def _parts_seen(band: Band, queries: tuple[range, ...], keys: tuple[range, ...]) -> tuple[int, int]:
    apart = [own - other for own, q in enumerate(queries) for other, k in enumerate(keys) if band.sees(q, k)]
    return max([0, *apart]), max([0, *(-n for n in apart)])


class _Reader:
    """Reads bounds of values from how a graph makes them. Moves between devices change no value."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.known = graph, dict[tuple[str, _View], Bound | None]()

    def shown(self, name: str, view: _View) -> Band:
        """Return where a mask can show a key."""
        bound = self.bound(name, view)
        if isinstance(bound, Truth):
            return bound.true
        return bound if isinstance(bound, Band) else ALL

    def bound(self, name: str, view: _View) -> Bound | None:
        """Return the bound of a value; None: nothing is known."""
        shape = self.graph.types[name].shape
        view = view.moved(lambda dim, start: (dim, start) if shape[dim] > 1 else None)
        if (name, view) not in self.known:
            self.known[name, view] = self._bound(self.graph.by_name[name], view)
        return self.known[name, view]

    def _bound(self, node: Node, view: _View) -> Bound | None:
        attrs, dtype = dict(node.attrs), self.graph.types[node.name].dtype
        if node.op in (PARTITION, COMBINE, REPLICATE, "contiguous", "detach"):
            return self.bound(node.inputs[0], view)
        if node.op == "full":
            return constant(attrs, dtype)
        if node.op == "arange":
            return _counted(attrs, self.graph.types[node.name].shape[0], view) if dtype in INTEGERS else None
        if node.op == "cast" and not _keeps(self.graph.types[node.inputs[0]].dtype, dtype):
            return None
        if (inner := self._of_operand(node, attrs, view)) is not None:
            return self.bound(node.inputs[0], inner)
        if node.op not in POINTWISE or (dtype not in (*INTEGERS, "bool") and node.op != "where"):
            return None
        return POINTWISE[node.op]([self.bound(name, self._broadcast(name, node, view)) for name in node.inputs])

    def _broadcast(self, name: str, node: Node, view: _View) -> _View:
        own, whole = self.graph.types[name].shape, self.graph.types[node.name].shape
        lacking = len(whole) - len(own)
        return view.moved(
            lambda dim, start: (dim - lacking, start) if dim >= lacking and own[dim - lacking] > 1 else None
        )

    def _of_operand(self, node: Node, attrs: Attrs, view: _View) -> _View | None:
        """Return the view of the only operand by which an operator that moves its elements has this one."""
        if node.op in ("expand", "cast"):
            return self._broadcast(node.inputs[0], node, view)
        if node.op == "permute":
            dims = integers(attrs, "dims")
            return view.moved(lambda dim, start: (dims[dim], start))
        if node.op == "slice" and integer(attrs, "step") == 1:
            cut, first = integer(attrs, "dim"), integer(attrs, "start")
            return view.moved(lambda dim, start: (dim, start + first * (dim == cut)))
        if node.op == "reshape":
            return self._reshaped(node, view)
        return None

    def _reshaped(self, node: Node, view: _View) -> _View | None:
        """Return the view before dimensions of size 1 were added or left out."""
        before, after = self.graph.types[node.inputs[0]].shape, self.graph.types[node.name].shape
        wide, places = [d for d, n in enumerate(before) if n > 1], [d for d, n in enumerate(after) if n > 1]
        if [before[d] for d in wide] != [after[d] for d in places]:
            return None
        return view.moved(lambda dim, start: (wide[places.index(dim)], start))


def _keeps(before: str, after: str) -> bool:
    """Return whether a cast keeps bounds: integers and truth values stay, and -inf does."""
    return (is_float(before) and is_float(after)) or before == after or {before, after} <= set(INTEGERS)


def _counted(attrs: Attrs, size: int, view: _View) -> Affine:
    """Return the bound of start, start + step, …"""
    first, step = Fraction(integer(attrs, "start")), Fraction(integer(attrs, "step"))
    slopes = [step if own is not None else Fraction(0) for own in view]
    at = next((start for own in view if own is not None for start in [own[1]]), None)
    ends = [first + step * at] * 2 if at is not None else sorted([first, first + step * (size - 1)])
    return Affine(*slopes, *ends)
