"""Bands of attention: how far before and after its own position a query sees keys, read from how a mask is made.

A mask that is made of positions, as of a sliding window or of blocks, is a comparison of affine forms of them. Each
value of the mask's graph is bounded (`bounds`). So no pair of a query and a key is visible outside the band; inside,
the mask decides.

A band is derived wherever it is used, and never stored, so it cannot be wrong for a changed graph. What the values of a
buffer show is written on its leaf (`shown`), and compared with them where the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import NamedTuple

from shardwright.pcg.attrs import Attrs, integer, integers
from shardwright.pcg.bounds import ALL, INTEGERS, POINTWISE, Affine, Band, Bound, Truth, constant
from shardwright.pcg.node import Node
from shardwright.pcg.parallel import COMBINE, PARTITION, REPLICATE
from shardwright.pcg.shown import bound_of
from shardwright.pcg.types import TensorType, is_float

MASK = 3
"""The operand of attention that says which pairs are visible."""


class _View(NamedTuple):
    """The dimensions of a value along which q and k are counted, and the index of the first; None: of size 1.

    `unchanged`: a mask has the value's own elements, and at least as many keys as queries.
    """

    queries: tuple[int, int] | None
    keys: tuple[int, int] | None
    unchanged: bool = False

    def moved(self, place: Callable[[int, int], tuple[int, int] | None]) -> _View:
        queries, keys = (None if own is None else place(*own) for own in (self.queries, self.keys))
        return self._replace(queries=queries, keys=keys)


class Bands:
    """The bands of a graph's attentions, read from how it makes values. Moves between devices change no value."""

    def __init__(self, by_name: Mapping[str, Node], types: Mapping[str, TensorType]) -> None:
        self.by_name, self.types = by_name, types
        self.known = dict[tuple[str, _View], Bound | None]()

    def of(self, node: Node) -> Band:
        """Return the keys that queries of an attention can see, as differences of positions; all, if none is known."""
        causal = Band(last=0) if dict(node.attrs).get("causal") else ALL
        if len(node.inputs) <= MASK:
            return causal
        shape = self.types[node.inputs[MASK]].shape
        queries, wide = (len(shape) - 2, 0) if len(shape) > 1 else None, len(shape) > 1 and shape[-2] <= shape[-1]
        return causal & self.shown(node.inputs[MASK], _View(queries, (len(shape) - 1, 0), wide))

    def shown(self, name: str, view: _View) -> Band:
        """Return where a mask can show a key."""
        bound = self.bound(name, view)
        if isinstance(bound, Truth):
            return bound.true
        return bound if isinstance(bound, Band) else ALL

    def bound(self, name: str, view: _View) -> Bound | None:
        """Return the bound of a value; None: nothing is known."""
        shape = self.types[name].shape
        view = view.moved(lambda dim, start: (dim, start) if shape[dim] > 1 else None)
        if (name, view) not in self.known:
            self.known[name, view] = self._bound(self.by_name[name], view)
        return self.known[name, view]

    def _bound(self, node: Node, view: _View) -> Bound | None:
        attrs, dtype = dict(node.attrs), self.types[node.name].dtype
        if node.op in (PARTITION, COMBINE, REPLICATE, "contiguous", "detach"):
            return self.bound(node.inputs[0], view)
        if node.op in ("buffer", "constant"):
            return self._of_leaf(node, attrs, view)
        if node.op == "full":
            return constant(attrs, dtype)
        if node.op == "arange":
            return _counted(attrs, self.types[node.name].shape[0], view) if dtype in INTEGERS else None
        if node.op == "cast" and not _keeps(self.types[node.inputs[0]].dtype, dtype):
            return None
        if (inner := self._of_operand(node, attrs, view)) is not None:
            return self.bound(node.inputs[0], inner)
        if node.op not in POINTWISE or (dtype not in (*INTEGERS, "bool") and node.op != "where"):
            return None
        view = view._replace(unchanged=False)
        return POINTWISE[node.op]([self.bound(name, self._broadcast(name, node, view)) for name in node.inputs])

    def _of_leaf(self, node: Node, attrs: Attrs, view: _View) -> Bound | None:
        """Return the bound of a leaf whose last two dimensions are queries and keys."""
        ndim = len(self.types[node.name].shape)
        if view.queries is None or view.keys is None or (view.queries[0], view.keys[0]) != (ndim - 2, ndim - 1):
            return None
        return bound_of(attrs, view.queries[1], view.keys[1], unchanged=view.unchanged)

    def _broadcast(self, name: str, node: Node, view: _View) -> _View:
        own, whole = self.types[name].shape, self.types[node.name].shape
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
        before, after = self.types[node.inputs[0]].shape, self.types[node.name].shape
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
    slopes = [step if own is not None else Fraction(0) for own in (view.queries, view.keys)]
    at = next((own[1] for own in (view.queries, view.keys) if own is not None), None)
    ends = [first + step * at] * 2 if at is not None else sorted([first, first + step * (size - 1)])
    return Affine(*slopes, *ends)
