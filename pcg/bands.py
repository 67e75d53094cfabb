"""Bands of attention: how far before and after its own position a query sees keys, read from how a mask is made.

A mask that is made of positions, as of a sliding window or of blocks, is a comparison of affine forms a·q + b·k + c of
the positions q of a query and k of a key. Each value of the mask's graph is bounded: integers by such a form with a
range of c, truth values by the differences k - q at which they can hold, and numbers by those at which they can be more
than -inf. The bounds are sound for any operands: what is not known is not bounded. So no pair of a query and a key is
visible outside the band; inside, the mask decides.

A band is derived wherever it is used, and never stored, so it cannot be wrong for a changed graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, inf
from typing import NamedTuple

from shardwright.pcg.attrs import Attrs, integer, integers
from shardwright.pcg.choice import axes_along
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import R, S, positions
from shardwright.pcg.parallel import COMBINE, PARTITION, REPLICATE
from shardwright.pcg.ring import Ring
from shardwright.pcg.types import is_float

MASK = 3
"""The operand of attention that says which pairs are visible."""
_INTEGERS = ("int32", "int64")
"""Dtypes in which positions do not overflow."""


class Band(NamedTuple):
    """The differences k - q between the positions of a key and of a query, from `first` to `last`; none if less."""

    first: float = -inf
    last: float = inf

    def __and__(self, other: Band) -> Band:
        return Band(max(self.first, other.first), min(self.last, other.last))

    def __or__(self, other: Band) -> Band:
        """Return the smallest band that has both."""
        if self.is_empty or other.is_empty:
            return other if self.is_empty else self
        return Band(min(self.first, other.first), max(self.last, other.last))

    @property
    def is_empty(self) -> bool:
        return self.first > self.last

    def sees(self, queries: range, keys: range) -> bool:
        """Return whether the difference of some pair within these ends is in the band."""
        return not (self & Band(keys[0] - queries[-1], keys[-1] - queries[0])).is_empty


ALL, NONE = Band(), Band(inf, -inf)


class _Affine(NamedTuple):
    """Integers queries · q + keys · k + c, with c from `least` to `most`."""

    queries: Fraction
    keys: Fraction
    least: Fraction
    most: Fraction

    @property
    def is_constant(self) -> bool:
        return not self.queries and not self.keys and self.least == self.most

    def __add__(self, other: object) -> _Affine:
        assert isinstance(other, _Affine)
        return _Affine(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, factor: object) -> _Affine:
        assert isinstance(factor, Fraction)
        ends = sorted((self.least * factor, self.most * factor))
        return _Affine(self.queries * factor, self.keys * factor, *ends)

    def __sub__(self, other: _Affine) -> _Affine:
        return self + other * Fraction(-1)

    def at_least(self, bound: int) -> Band:
        """Return where it can be so much."""
        slope, missing = self.keys, bound - self.most
        if self.queries != -slope:
            return ALL
        if not slope:
            return ALL if missing <= 0 else NONE
        return Band(first=ceil(missing / slope)) if slope > 0 else Band(last=floor(missing / slope))


class _Truth(NamedTuple):
    """Where a truth value can be true, and where it can be false."""

    true: Band
    false: Band

    def __invert__(self) -> _Truth:
        return _Truth(self.false, self.true)

    def __and__(self, other: _Truth) -> _Truth:
        return _Truth(self.true & other.true, self.false | other.false)

    def __or__(self, other: _Truth) -> _Truth:
        return ~(~self & ~other)


class _Size(NamedTuple):
    """The absolute value of integers."""

    of: _Affine


_Bound = _Affine | _Size | _Truth | Band
"""Of integers; of absolute values of these; of truth values; of numbers, where they can be more than -inf."""


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
        self.graph, self.known = graph, dict[tuple[str, _View], _Bound | None]()

    def shown(self, name: str, view: _View) -> Band:
        """Return where a mask can show a key."""
        bound = self.bound(name, view)
        if isinstance(bound, _Truth):
            return bound.true
        return bound if isinstance(bound, Band) else ALL

    def bound(self, name: str, view: _View) -> _Bound | None:
        """Return the bound of a value; None: nothing is known."""
        shape = self.graph.types[name].shape
        view = view.moved(lambda dim, start: (dim, start) if shape[dim] > 1 else None)
        if (name, view) not in self.known:
            self.known[name, view] = self._bound(self.graph.by_name[name], view)
        return self.known[name, view]

    def _bound(self, node: Node, view: _View) -> _Bound | None:
        attrs, dtype = dict(node.attrs), self.graph.types[node.name].dtype
        if node.op in (PARTITION, COMBINE, REPLICATE, "contiguous", "detach"):
            return self.bound(node.inputs[0], view)
        if node.op == "full":
            return _constant(attrs, dtype)
        if node.op == "arange":
            return _counted(attrs, self.graph.types[node.name].shape[0], view) if dtype in _INTEGERS else None
        if node.op == "cast" and not _keeps(self.graph.types[node.inputs[0]].dtype, dtype):
            return None
        if (inner := self._of_operand(node, attrs, view)) is not None:
            return self.bound(node.inputs[0], inner)
        if node.op not in _POINTWISE or (dtype not in (*_INTEGERS, "bool") and node.op != "where"):
            return None
        return _POINTWISE[node.op]([self.bound(name, self._broadcast(name, node, view)) for name in node.inputs])

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
    return (is_float(before) and is_float(after)) or before == after or {before, after} <= set(_INTEGERS)


def _constant(attrs: Attrs, dtype: str) -> _Bound | None:
    value = attrs["value"]
    if dtype == "bool":
        return _Truth(ALL, NONE) if value else _Truth(NONE, ALL)
    assert isinstance(value, int | float)
    if is_float(dtype):
        return NONE if value == -inf else ALL
    if dtype not in _INTEGERS:
        return None
    return _Affine(Fraction(0), Fraction(0), Fraction(value), Fraction(value))


def _counted(attrs: Attrs, size: int, view: _View) -> _Affine:
    """Return the bound of start, start + step, …"""
    first, step = Fraction(integer(attrs, "start")), Fraction(integer(attrs, "step"))
    slopes = [step if own is not None else Fraction(0) for own in view]
    at = next((start for own in view if own is not None for start in [own[1]]), None)
    ends = [first + step * at] * 2 if at is not None else sorted([first, first + step * (size - 1)])
    return _Affine(*slopes, *ends)


def _difference(operands: Sequence[_Bound | None]) -> _Affine | None:
    x, y = operands
    return x - y if isinstance(x, _Affine) and isinstance(y, _Affine) else None


def _compared(operands: Sequence[_Bound | None], bound: int, sign: int = 1) -> _Truth | None:
    """Return the bound of sign · (x - y) ≥ bound.

    |x| is the larger one of x and -x: it is so much if one of them is, and no more if both are not.
    """
    for place, operand in enumerate(operands):
        if isinstance(operand, _Size):
            signed = (operand.of, operand.of * Fraction(-1))
            a, b = (_compared([*operands[:place], x, *operands[place + 1 :]], bound, sign) for x in signed)
            if a is None or b is None:
                return None
            return a & b if (place == 1) == (sign > 0) else a | b
    if (found := _difference(operands)) is None:
        return None
    own = found * Fraction(sign)
    return _Truth(own.at_least(bound), (own * Fraction(-1)).at_least(1 - bound))


def _equal(operands: Sequence[_Bound | None]) -> _Truth | None:
    if (found := _difference(operands)) is None:
        return None
    return _Truth(found.at_least(0) & (found * Fraction(-1)).at_least(0), ALL)


def _unequal(operands: Sequence[_Bound | None]) -> _Truth | None:
    return None if (found := _equal(operands)) is None else ~found


def _truths(operands: Sequence[_Bound | None]) -> list[_Truth]:
    return [x if isinstance(x, _Truth) else _Truth(ALL, ALL) for x in operands]


def _both(operands: Sequence[_Bound | None]) -> _Truth:
    x, y = _truths(operands)
    return x & y


def _either(operands: Sequence[_Bound | None]) -> _Truth:
    x, y = _truths(operands)
    return x | y


def _other(operands: Sequence[_Bound | None]) -> _Truth:
    (x,) = _truths(operands)
    return ~x


def _where(operands: Sequence[_Bound | None]) -> _Bound | None:
    """Return the bound of a choice between truth values, or between numbers of which some are -inf."""
    condition, x, y = operands
    (c,) = _truths([condition])
    if isinstance(x, _Truth) or isinstance(y, _Truth):
        a, b = _truths([x, y])
        return _Truth((c.true & a.true) | (c.false & b.true), (c.true & a.false) | (c.false & b.false))
    if isinstance(x, Band) or isinstance(y, Band):
        a, b = (own if isinstance(own, Band) else ALL for own in (x, y))
        return (c.true & a) | (c.false & b)
    return None


def _sum(operands: Sequence[_Bound | None]) -> _Affine | None:
    x, y = operands
    return x + y if isinstance(x, _Affine) and isinstance(y, _Affine) else None


def _absolute(operands: Sequence[_Bound | None]) -> _Size | None:
    (x,) = operands
    return _Size(x) if isinstance(x, _Affine) else None


def _product(operands: Sequence[_Bound | None]) -> _Affine | None:
    for x, y in (operands, operands[::-1]):
        if isinstance(x, _Affine) and isinstance(y, _Affine) and y.is_constant:
            return x * y.least
    return None


def _quotient(operands: Sequence[_Bound | None]) -> _Affine | None:
    """Return the bound of ⌊x / d⌋, which is at most (d - 1) / d less than x / d."""
    x, y = operands
    if not isinstance(x, _Affine) or not isinstance(y, _Affine) or not y.is_constant or y.least <= 0:
        return None
    exact = x * (1 / y.least)
    return exact._replace(least=exact.least - (y.least - 1) / y.least)


_POINTWISE: Mapping[str, Callable[[Sequence[_Bound | None]], _Bound | None]] = {
    "add": _sum, "sub": _difference, "mul": _product, "floor_divide": _quotient, "abs": _absolute,
    "ge": lambda x: _compared(x, 0), "gt": lambda x: _compared(x, 1),
    "le": lambda x: _compared(x, 0, -1), "lt": lambda x: _compared(x, 1, -1), "eq": _equal, "ne": _unequal,
    "bitwise_and": _both, "bitwise_or": _either, "logical_not": _other, "where": _where,
}  # fmt: skip
