"""Mixtures of experts as models write them, lifted to rows that compute each token by itself.

Libraries sort the rows of a batch by their expert, multiply every group by its matrix, and put the rows back. No row of
the sorted batch belongs to a known part of the batch, so it could not be split. Equations remove the order.
Let p be the order in which the entries of a vector of experts e are sorted, and x[p] the rows of x in that order:

    grouped_mm(x[p], w, ends of e) = expert_linear(x, w, e)[p]      row i of group j is one of expert j
    f(x[p], y[p], …)               = f(x, y, …)[p]                  where f works on every row alike
    x[p // k]                      = x'[p]                          where x' has each row of x k times, one by one
    x[p][q]                        = x                              where q is the inverse of p
    y[p // k] += x[p]              = y[t] += Σ_i x[t·k + i]         in whatever order the rows of a token are added

An order is carried along, as in the second equation, until one of the last two removes it; other readers of rows in
order get them by an `index`. The result has `expert_linear`, and where two of them make the network of an expert,
whose results are added up by weights, `experts` (`pcg.capture.networks`). The equations are proven in
`verifier.routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

from shardwright.pcg.attrs import Attr, Attrs
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.capture.networks import with_networks
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape
from shardwright.pcg.graph import Graph, Node

_PLACES = ("argmax", "sort_indices", "topk_indices")
"""Operators that give places, which are not negative.

A histogram would leave negative numbers out, and an order would put them first.
"""
_SAME_NUMBERS = ("cast", "detach", "permute", "reshape", "slice")


def per_token(graph: Graph) -> Graph:
    """Return the graph with its routed experts as rows that compute each token by itself."""
    if not any(node.op == "grouped_mm" for node in graph.nodes):
        return graph
    return with_networks(_Orders(graph).graph())


# ---- orders ----


@dataclass(frozen=True)
class _Ordered:
    """Rows in an order of entries of the shape `lead`; `rows` has these dimensions first, or 1 in their place."""

    rows: str
    order: str
    lead: Shape


class _Orders:
    """A copy of a graph, in which `ordered` nodes are rows without their order, until a reader needs it."""

    def __init__(self, graph: Graph) -> None:
        self.source, self.types, self.b = graph, graph.types, GraphBuilder()
        self.names: dict[str, str] = {}
        self.ordered: dict[str, _Ordered] = {}

    def graph(self) -> Graph:
        for node in self.source.nodes:
            self.b.at(node.name, node.source)
            if (ordered := self._in_order(node)) is not None:
                self.ordered[node.name] = ordered
            else:
                self.names[node.name] = (
                    self._put_back(node) or self._added(node) or self.b.copied(node, [*map(self._name, node.inputs)])
                )
        return self.b.graph([(key, self._name(name)) for key, name in self.source.outputs])

    def _name(self, name: str) -> str:
        """Return a node's name in the copy; rows in an order are sorted for it now."""
        if name not in self.names:
            held = self.ordered[name]
            flat = self.b.op("reshape", self._wide(held), shape=self.types[name].shape)
            self.names[name] = self.b.op("index", flat, self._name(held.order), dim=0)
        return self.names[name]

    def _wide(self, held: _Ordered) -> str:
        """Return the rows with one for each entry."""
        return self.b.op("expand", held.rows, shape=(*held.lead, *self.b.shape(held.rows)[len(held.lead) :]))

    def _node(self, name: str) -> Node:
        return self.source.by_name[name]

    # ---- what comes in order ----

    def _in_order(self, node: Node) -> _Ordered | None:
        """Return the node's result as rows in an order, if one of the equations applies."""
        if node.op == "sort_values":
            return self._sorted(node)
        if node.op in ("index", "gather") and node.attr("dim") == 0 and len(node.inputs) == 2:
            rows, places = node.inputs
            if node.op == "index" and self._is_order(order := self._node(places)):
                return self._started(rows, order, self._lead(order))
            if (order := self._tokens_in_order(places)) is not None:
                return self._repeated(rows, order, self.types[node.name].shape)
        if node.op == "grouped_mm":
            return self._multiplied(node)
        return self._commuted(node)

    def _is_order(self, node: Node) -> bool:
        return node.op == "sort_indices" and not node.attr("descending") and len(self.types[node.name].shape) == 1

    def _lead(self, order: Node) -> Shape:
        """Return the shape of the ordered entries before they became one dimension: tokens, and entries per token."""
        entries = self._node(order.inputs[0])
        return self.types[entries.inputs[0] if entries.op == "reshape" else entries.name].shape

    def _sorted(self, node: Node) -> _Ordered | None:
        """Return the entries themselves, in their order."""
        readers = map(self._node, self.source.users[node.inputs[0]])
        order = next((n for n in readers if self._is_order(n) and n.attrs == node.attrs), None)
        return order and self._started(node.inputs[0], order, self._lead(order))

    def _started(self, name: str, order: Node, lead: Shape) -> _Ordered | None:
        """Return x[p]: rows that get an order."""
        shape = self.types[name].shape
        if name in self.ordered or shape[0] != prod(lead):
            return None
        return _Ordered(self.b.op("reshape", self._name(name), shape=(*lead, *shape[1:])), order.name, lead)

    def _tokens_in_order(self, name: str) -> Node | None:
        """Return the order p of places p // k: one per row or, for `gather`, one per element of a row."""
        node, count = self._node(name), self.types[name].shape[:1]
        while node.op in ("expand", "reshape") and self.types[node.inputs[0]].shape[:1] == count:
            node = self._node(node.inputs[0])
        if node.op != "floor_divide" or not self._is_order(order := self._node(node.inputs[0])):
            return None
        times = self._node(node.inputs[1])
        return order if times.op == "full" and times.attr("value") == self._lead(order)[-1] else None

    def _repeated(self, name: str, order: Node, result: Shape) -> _Ordered | None:
        """Return x[p // k]: a token for each of its k entries."""
        *tokens, _ = lead = self._lead(order)
        shape = self.types[name].shape
        if name in self.ordered or shape[0] != prod(tokens) or result != (prod(lead), *shape[1:]):
            return None
        return _Ordered(self.b.op("reshape", self._name(name), shape=(*tokens, 1, *shape[1:])), order.name, lead)

    def _commuted(self, node: Node) -> _Ordered | None:
        """Return f(x[p], …) in order p, if the factor string shows that the operator works on every row by itself."""
        held = [self.ordered.get(name) for name in node.inputs]
        orders = {(one.order, one.lead) for one in held if one is not None}
        row = node.row
        if len(orders) != 1 or row is None or row.random:
            return None
        signature = self.source.signature(node)
        rows = signature.result[:1]
        if not rows or len(rows[0]) != 1 or signature.factors[rows[0][0]].role != "map":
            return None
        for one, dims in zip(held, signature.operands, strict=True):
            having = [members for members in dims if rows[0][0] in members]
            if having != (list(dims[:1]) if one is not None else []) or (one is not None and dims[:1] != rows):
                return None
        ((order, lead),) = orders
        several = not row.pointwise and len(held) - held.count(None) > 1
        inputs = [
            self._name(name) if one is None else self._wide(one) if several else one.rows
            for one, name in zip(held, node.inputs, strict=True)
        ]
        own = self.b.shape(inputs[0])[: len(lead)] if held and held[0] is not None else ()
        with suppress(GraphError):  # the operator takes no further dimensions
            return _Ordered(self.b.op(node.op, *inputs, **_shifted(dict(node.attrs), own)), order, lead)
        return None

    def _multiplied(self, node: Node) -> _Ordered | None:
        """Return grouped_mm(x[p], w, ends) in order p: each row with the matrix of its expert."""
        x, w, ends = node.inputs
        held = self.ordered.get(x)
        if held is None or w in self.ordered:
            return None
        entries = self._node(held.order).inputs[0]
        if self._counted(ends, self.types[w].shape[0]) != entries or not self._are_places(entries):
            return None
        index = self.b.op("reshape", self._name(entries), shape=held.lead)
        return _Ordered(self.b.op("expert_linear", held.rows, self._name(w), index), held.order, held.lead)

    def _counted(self, ends: str, num_experts: int) -> str | None:
        """Return the entries whose cumulative histogram `ends` is: how many are 0, at most 1, and so on."""
        total = self._uncast(ends)
        counts = self._uncast(total.inputs[0]) if total.op == "cumsum" else total
        if counts.op != "histc" or [counts.attr(x) for x in ("bins", "low", "high")] != [
            num_experts,
            0,
            num_experts - 1,
        ]:
            return None
        entries = self._uncast(counts.inputs[0])
        return entries.inputs[0] if entries.op == "sort_values" else entries.name

    def _uncast(self, name: str) -> Node:
        node = self._node(name)
        return self._uncast(node.inputs[0]) if node.op == "cast" else node

    def _are_places(self, name: str) -> bool:
        node = self._node(name)
        return self._are_places(node.inputs[0]) if node.op in _SAME_NUMBERS else node.op in _PLACES

    # ---- what is put back ----

    def _put_back(self, node: Node) -> str | None:
        """Return x[p][q] without an order, where q is the inverse of p."""
        held = self.ordered.get(node.inputs[0]) if node.op == "index" and node.attr("dim") == 0 else None
        if held is None or len(node.inputs) != 2 or self._inverted(self._node(node.inputs[1])) != held.order:
            return None
        return self.b.op("reshape", self._wide(held), shape=self.types[node.name].shape)

    def _added(self, node: Node) -> str | None:
        """Return y[p // k] += x[p] as a sum; its places are all tokens, counted from 0."""
        if node.op != "scatter_sum" or node.attr("dim") != 0:
            return None
        places, rows = node.inputs
        held, order = self.ordered.get(rows), self._tokens_in_order(places)
        if held is None or order is None or held.order != order.name:
            return None
        if self.types[node.name].shape != (prod(held.lead[:-1]), *self.types[rows].shape[1:]):
            return None
        total = self.b.op("sum", self._wide(held), dims=(len(held.lead) - 1,), keepdim=False)
        return self.b.op("reshape", total, shape=self.types[node.name].shape)

    def _inverted(self, node: Node) -> str:
        """Return the order that the node is the inverse of; "" if there is none."""
        if self._is_order(node):
            return node.inputs[0]
        if node.op != "index_put":
            return ""
        _, order, numbers = node.inputs
        (count,), places = self.types[order].shape, self._node(numbers)
        counted = places.op == "arange" and (places.attr("start"), places.attr("step")) == (0, 1)
        return order if counted and self.types[node.name].shape == (count,) else ""


def _shifted(attrs: Attrs, lead: Shape) -> dict[str, Attr]:
    """Return the attributes for a first operand that has the dimensions `lead` in place of its first."""
    more = max(len(lead) - 1, 0)

    def moved(dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(d for dim in dims for d in (range(more + 1) if dim == 0 else [dim + more]))

    change: dict[str, Callable[[Any], Attr]] = {
        "dim": lambda dim: dim + more if lead else dim,
        "dims": moved,
        "shape": lambda shape: (*lead, *shape[1:]) if lead else shape,
    }
    return {key: change[key](value) if key in change else value for key, value in attrs.items()}
