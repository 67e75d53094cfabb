"""A graph of the same results whose batch has more rows, so that devices can share it evenly.

    7 rows ──repeat one──▶ 8 rows ──each by itself──▶ 8 rows ──the sum of 7──▶ loss

Rows that repeat others are added to the inputs, and each operator is followed by its factor string. Where it works on
each row by itself, it works on more rows. Where it sums over rows, the added ones are masked: they have no part in a
sum, and so in no gradient. What sees rows together in any other way (a maximum, a sort, a matrix of pairs, an operator
without a row) is given the true rows alone. So sums, counts of targets and statistics are those of the true batch, and
no constant that the model made of its size is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from shardwright.pcg.attrs import Attr
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Factor, Signature
from shardwright.pcg.graph import Graph
from shardwright.pcg.node import Node
from shardwright.pcg.row import LocalShapes, Row

_TARGETS = {"cross_entropy_sum": 1}
"""The operand of classes, of which the attribute `ignore_index` is none, of operators that are sums but not linear."""


class Place(NamedTuple):
    """The place of rows in a dimension of `before` × rows × others elements."""

    dim: int
    before: int = 1


class _Way(NamedTuple):
    """How an operator works on more rows: along a factor, of which rows are `inside` blocks apart."""

    factor: int
    inside: int
    places: tuple[Place | None, ...]
    result: Place | None


def with_rows(graph: Graph, size: int, to: int) -> Graph:
    """Return a serial graph of the same results, in which the `size` rows of its inputs become `to` rows.

    The inputs and the outputs keep their shapes.
    """
    return _Remainder(graph, size, to).done()


class _Remainder:
    def __init__(self, graph: Graph, size: int, to: int) -> None:
        self._graph, self._size, self._to = graph, size, to
        self._made = GraphBuilder()
        self._true = dict[str, str]()  # nodes of true rows, by name in the given graph
        self._more = dict[str, tuple[str, Place]]()  # nodes of more rows

    def done(self) -> Graph:
        for node in self._graph.nodes:
            self._made.at(node.name, node.source)
            shape = self._graph.types[node.name].shape
            if node.is_leaf:
                self._true[node.name] = self._made.again(node, ())
                if node.op == "input" and shape and shape[0] % self._size == 0:
                    self._widened(node.name, Place(0))
            elif (row := node.row) is None or (way := self._way(node, row)) is None:
                self._true[node.name] = self._made.again(node, [self._of_true_rows(name) for name in node.inputs])
            elif row.random:
                self._drawn(node, way)
            else:
                self._carried_on(node, row, way)
        return self._made.graph([(key, self._of_true_rows(name)) for key, name in self._graph.outputs])

    # ---- values in both forms ----

    def _of_true_rows(self, name: str) -> str:
        """Return a value without added rows."""
        if name not in self._true:
            node, place = self._more[name]
            self._true[name] = self._resized(node, place, self._to, self._size)
        return self._true[name]

    def _widened(self, name: str, place: Place) -> str:
        """Return a value with rows added at a place."""
        node, at = self._more.get(name, ("", None))
        if at != place:
            node = self._resized(self._of_true_rows(name), place, self._size, self._to)
            self._more.setdefault(name, (node, place))
        return node

    def _resized(self, node: str, place: Place, size: int, to: int) -> str:
        """Return a node of this graph with `to` rows: the first of its `size` rows, repeated where there are more."""
        shape, dim, made = self._made.shape(node), place.dim, self._made
        ahead, behind = shape[:dim], shape[dim + 1 :]
        others = shape[dim] // (place.before * size)
        apart = node
        if place.before * others > 1:
            dim, apart = dim + 1, made.op("reshape", node, shape=(*ahead, place.before, size, others, *behind))
        if to < size:
            cut = made.op("slice", apart, dim=dim, start=0, stop=to, step=1)
        else:
            rows = made.op("arange", start=0, stop=size, step=1, dtype="int64")
            copies = made.op("concat", *[rows] * -(-to // size), dim=0)
            cut = made.op("index", apart, made.op("slice", copies, dim=0, start=0, stop=to, step=1), dim=dim)
        return made.op("reshape", cut, shape=(*ahead, place.before * to * others, *behind))

    def _masked(self, node: str, place: Place, instead: float) -> str:
        """Return a node of more rows with another value in place of the added ones."""
        kind, made = self._made.types[node], self._made
        others = kind.shape[place.dim] // (place.before * self._to)
        parts = [made.op("full", shape=(n,), value=value, dtype="bool")
                 for n, value in ((self._size, True), (self._to - self._size, False))]  # fmt: skip
        is_true = made.op("reshape", made.op("concat", *parts, dim=0), shape=(1, self._to, 1))
        spread = made.op("expand", is_true, shape=(place.before, self._to, others))
        beside = [1] * len(kind.shape)
        beside[place.dim] = kind.shape[place.dim]
        return made.op("where", made.op("reshape", spread, shape=tuple(beside)), node, made.scalar(instead, kind.dtype))

    # ---- operators ----

    def _carried_on(self, node: Node, row: Row, way: _Way) -> None:
        """Append an operator that works on more rows, along a factor."""
        inputs = [
            self._of_true_rows(name) if place is None else self._widened(name, place)
            for name, place in zip(node.inputs, way.places, strict=True)
        ]
        if way.result is None:
            for i in _masks(node, row, self._graph, way):
                place = way.places[i]
                assert place is not None
                instead = dict(node.attrs)["ignore_index"] if node.op in _TARGETS else 0
                assert isinstance(instead, int)
                inputs[i] = self._masked(inputs[i], place, instead)
        signature = self._enlarged(self._graph.signature(node), way)
        made = self._made.op(node.op, *inputs, **self._attributes(node, row, signature))
        if way.result is None:
            self._true[node.name] = made
        else:
            self._more[node.name] = made, way.result

    def _drawn(self, node: Node, way: _Way) -> None:
        """Append dropout: the true rows' mask, as one process draws it, with rows added to it."""
        kind, (operand,) = self._graph.types[node.name], node.inputs
        ones = self._made.op("full", shape=kind.shape, value=1.0, dtype=kind.dtype)
        mask, place = self._made.again(node, [ones]), way.result
        assert place is not None
        more = self._resized(mask, place, self._size, self._to)
        self._more[node.name] = self._made.op("mul", self._widened(operand, place), more), place

    def _way(self, node: Node, row: Row) -> _Way | None:
        """Return how an operator works on more rows, or None where it needs the true rows alone."""
        signature = self._graph.signature(node)
        for name, dims in zip(node.inputs, signature.operands, strict=True):
            if name not in self._more or (found := self._factor(signature, dims, self._more[name][1])) is None:
                continue
            factor, inside = found
            places = tuple(_place(signature, own, factor, inside) for own in signature.operands)
            way = _Way(factor, inside, places, _place(signature, signature.result, factor, inside))
            return way if self._is_right(node, row, signature, way) else None
        return None

    def _factor(self, signature: Signature, dims: Sequence[Sequence[int]], place: Place) -> tuple[int, int] | None:
        """Return the factor that holds the rows at a place of an operand, and how many blocks it has before them."""
        before = 1
        for factor in dims[place.dim]:
            size = signature.factors[factor].size
            inside, rest = divmod(place.before, before)
            if rest == 0 and size % (inside * self._size) == 0 and before * size >= place.before * self._size:
                return factor, inside
            before *= size
        return None

    def _is_right(self, node: Node, row: Row, signature: Signature, way: _Way) -> bool:
        """Return whether an operator gives the same on true rows where the factor has more, or sums them alone."""
        factor = signature.factors[way.factor]
        if factor.role == "fixed" or (row.random and node.op != "dropout"):
            return False
        if way.result is None and not _masks(node, row, self._graph, way):
            return False
        more = self._enlarged(signature, way)
        try:
            again = row.signature(list(map(more.shape_of, more.operands)), self._attributes(node, row, more))
        except GraphError:
            return False
        return again.result_shape == more.result_shape

    def _enlarged(self, signature: Signature, way: _Way) -> Signature:
        """Return a signature whose factor has more rows."""
        factors = list[Factor](signature.factors)
        own = factors[way.factor]
        factors[way.factor] = replace(own, size=own.size // self._size * self._to)
        return replace(signature, factors=tuple(factors))

    def _attributes(self, node: Node, row: Row, more: Signature) -> dict[str, Attr]:
        whole = LocalShapes.whole(self._graph.signature(node))
        large = LocalShapes.whole(more)
        shapes = LocalShapes(whole.operands, whole.result, large.operands, large.result)
        return dict(row.localize({k: v for k, v in node.attrs if k != "seed"}, shapes))


def _place(signature: Signature, dims: Sequence[Sequence[int]], factor: int, inside: int) -> Place | None:
    """Return the place of rows in a tensor of these dimensions; None where it does not have them."""
    for dim, members in enumerate(dims):
        if factor in members:
            before = members[: list(members).index(factor)]
            return Place(dim, prod(signature.factors[f].size for f in before) * inside)
    return None


def _masks(node: Node, row: Row, graph: Graph, way: _Way) -> tuple[int, ...]:
    """Return the operands to mask so that a sum over rows is one of true rows; () if there are none."""
    if node.op in _TARGETS:
        return (_TARGETS[node.op],)
    dtypes = [graph.types[name].dtype for name in node.inputs]
    sets = row.partial_sets(dtypes, dict(node.attrs))
    return next((own for own in sets if all(way.places[i] is not None for i in own)), ())
