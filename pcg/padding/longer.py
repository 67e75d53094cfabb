"""The graph with padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.pcg.attrs import Attr
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Signature
from shardwright.pcg.graph import Graph
from shardwright.pcg.node import PADDED_FROM, Node
from shardwright.pcg.padding.laws import NEUTRAL, gives_zeros, is_neutral, may_stretch
from shardwright.pcg.padding.stretches import Padding, Stretch, holders, of_dims, padded_shape, within
from shardwright.pcg.row import LocalShapes, Row
from shardwright.pcg.types import is_float


@dataclass(frozen=True, slots=True)
class Value:
    """A value with padding: its node, by dimension its stretches, and whether all of its padding is zero."""

    name: str
    stretches: Mapping[int, Stretch]
    is_zero: bool = False


def padded(graph: Graph, begins: Sequence[Padding]) -> Graph:
    """Return the serial graph in which these dimensions of parameters are padded, and what follows from them.

    It computes what `graph` computes. Raises `GraphError` where a parameter has other sizes.
    """
    return Padder(graph, begins).run() if begins else graph


def appended(graph: Graph, begins: Sequence[Padding]) -> list[tuple[str, int, Stretch]]:
    """Return where zeros are appended in `padded(graph, begins)`: the value of `graph`, the dimension, the stretch."""
    padder = Padder(graph, begins)
    padder.run()
    return padder.appended


class Padder:
    """A walk through a graph that appends the graph with padding: here of parameters, with zeros."""

    def __init__(self, graph: Graph, begins: Iterable[Padding]) -> None:
        self.graph, self.b = graph, GraphBuilder()
        self.begins = dict[str, dict[int, Stretch]]()
        for padding in begins:
            self.begins.setdefault(padding.target, {})[padding.dim] = padding.stretch
        self.whole = dict[str, str]()
        """By node of the graph: the new node that gives the same value, where there is one yet."""
        self.longer = dict[str, Value]()
        """By node of the graph: its value with padding, if it has one."""
        self.appended = list[tuple[str, int, Stretch]]()
        """Where zeros were appended to a value for the sake of the other operands of an operator."""

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.b.at(node.name, node.source)
            if node.is_leaf:
                self.leaf(node)
            elif not self.stretched(node):
                self.whole[node.name] = self.b.copied(node, [self.trimmed(i) for i in node.inputs])
        return self.b.graph([(key, self.trimmed(name)) for key, name in self.graph.outputs])

    # ---- what is padded ----

    def leaf(self, node: Node) -> None:
        """Append a leaf, whose padding may begin here."""
        stretches = self.begins.get(str(node.attr("target")), {}) if node.op == "parameter" else {}
        shape = self.graph.types[node.name].shape
        if any(dim >= len(shape) or s.before != shape[dim] for dim, s in stretches.items()):
            raise GraphError(f"{node}: shape {list(shape)} cannot be padded as {stretches}; make the plan again")
        if stretches and all(s.is_suffix for s in stretches.values()):
            attrs = {**dict(node.attrs), "shape": padded_shape(shape, stretches), PADDED_FROM: shape}
            name = self.b.copied(replace(node, attrs=tuple(sorted(attrs.items()))), ())
            self.longer[node.name] = Value(name, stretches, is_zero=True)
            return
        self.whole[node.name] = self.b.copied(node, ())
        if stretches:
            self.longer[node.name] = self.filled(node.name, stretches)

    def allows(self, node: Node, row: Row, signature: Signature, factor: int, stretch: Stretch) -> bool:
        """Return whether a factor of an operator may be stretched."""
        return may_stretch(node, row, signature, factor, stretch)

    def masked(
        self, node: Node, row: Row, signature: Signature, stretched: Mapping[int, Stretch], operands: list[Value]
    ) -> list[Value]:
        """Fill the padding of operands where a law needs another value there than there is."""
        for factor in stretched:
            linear = [i for i in holders(signature, factor) if (i,) in row.linear_in]
            if is_neutral(node, signature, factor):
                position, _, fill = NEUTRAL[node.op]
                operands[position] = self.refilled(operands[position], fill)
            elif signature.factors[factor].role == "sum" and not any(operands[i].is_zero for i in linear):
                operands[linear[0]] = self.refilled(operands[linear[0]], 0.0)
        return operands

    def fill(self, longer: str, stretches: Mapping[int, Stretch]) -> Value:
        """Append padding to a new node: zeros."""
        for dim, s in stretches.items():
            shape = self.b.shape(longer)
            longer = self.in_blocks(longer, dim, s, "pad")
            longer = self.b.op("reshape", longer, shape=(*shape[:dim], s.after, *shape[dim + 1 :]))
        return Value(longer, stretches, is_zero=True)

    # ---- operators ----

    def stretched(self, node: Node) -> bool:
        """Append an operator on values with padding; return whether a law lets it."""
        row = node.row
        if row is None or not any(i in self.longer for i in node.inputs):
            return False
        signature = self.graph.signature(node)
        stretched = self._factors(node, row, signature)
        if not stretched:
            return False
        wanted = [of_dims(dims, signature, stretched) for dims in signature.operands]
        result = of_dims(signature.result, signature, stretched)
        if result is None or any(stretches is None for stretches in wanted):
            return False
        operands = [self.padded_as(name, stretches or {}) for name, stretches in zip(node.inputs, wanted, strict=True)]
        attrs = self._attributes(node, row, signature, operands, result)
        if attrs is None:
            return False
        operands = self.masked(node, row, signature, stretched, operands)
        name = self.b.op(node.op, *(value.name for value in operands), **attrs)
        if result:
            zero = gives_zeros(row, signature, stretched, [i for i, value in enumerate(operands) if value.is_zero])
            self.longer[node.name] = Value(name, result, is_zero=zero)
        else:
            self.whole[node.name] = name
        return True

    def _factors(self, node: Node, row: Row, signature: Signature) -> dict[int, Stretch]:
        """Return the factors that the operands' padding stretches, and that a law lets be stretched."""
        stretches, bad = dict[int, Stretch](), set[int]()
        for position, name in enumerate(node.inputs):
            for dim, stretch in self.longer[name].stretches.items() if name in self.longer else ():
                place = within(signature.operands[position][dim], signature, stretch)
                if place is None:
                    continue
                factor, inner = place
                if stretches.setdefault(factor, inner) != inner or not self.allows(node, row, signature, factor, inner):
                    bad.add(factor)
        return {factor: stretch for factor, stretch in stretches.items() if factor not in bad}

    def _attributes(
        self, node: Node, row: Row, signature: Signature, operands: Sequence[Value], result: Mapping[int, Stretch]
    ) -> dict[str, Attr] | None:
        """Return the attributes of the operator at the longer sizes; None where it is another operator there."""
        shapes = tuple(self.b.shape(value.name) for value in operands)
        old = tuple(self.graph.types[name].shape for name in node.inputs)
        whole = padded_shape(signature.result_shape, result)
        try:
            attrs = dict(row.localize(dict(node.attrs), LocalShapes(old, signature.result_shape, shapes, whole)))
            return attrs if row.signature(shapes, attrs).result_shape == whole else None
        except GraphError:
            return None

    # ---- values ----

    def trimmed(self, name: str) -> str:
        """Return the node that gives the value of the graph."""
        if name not in self.whole:
            value = self.longer[name]
            trimmed, shape = value.name, self.b.shape(value.name)
            for dim, s in value.stretches.items():
                trimmed = self.in_blocks(trimmed, dim, s, "slice")
                shape = (*shape[:dim], s.before, *shape[dim + 1 :])
                trimmed = self.b.op("reshape", trimmed, shape=shape)
            self.whole[name] = trimmed
        return self.whole[name]

    def padded_as(self, name: str, stretches: Mapping[int, Stretch]) -> Value:
        """Return a value with exactly these stretches."""
        padded = self.longer.get(name)
        if padded is not None and padded.stretches == stretches:
            return padded
        self.appended += [(name, *stretch) for stretch in stretches.items()]
        return self.filled(name, stretches)

    def filled(self, name: str, stretches: Mapping[int, Stretch]) -> Value:
        """Return a value of the graph with padding."""
        return self.fill(self.trimmed(name), stretches)

    def in_blocks(self, name: str, dim: int, s: Stretch, op: str) -> str:
        """Return a value trimmed or padded, with the blocks of a dimension as a dimension of their own."""
        shape, extent = self.b.shape(name), s.inner * (s.padded if op == "slice" else s.size)
        if not s.is_suffix:
            name, dim = self.b.op("reshape", name, shape=(*shape[:dim], s.outer, extent, *shape[dim + 1 :])), dim + 1
        if op == "slice":
            return self.b.op("slice", name, dim=dim, start=0, stop=s.size * s.inner, step=1)
        pads = [0] * (2 * len(self.b.shape(name)))
        pads[2 * dim + 1] = (s.padded - s.size) * s.inner
        return self.b.op("pad", name, pads=tuple(pads), value=self._number(name, 0.0))

    def _number(self, name: str, value: float) -> float:
        """Return a number in the kind of numbers that a value has."""
        dtype = self.b.types[name].dtype
        return value if is_float(dtype) else dtype != "bool" and int(value)

    def refilled(self, value: Value, fill: float) -> Value:
        """Return a value with all of its padding filled with one number."""
        name, shape = value.name, self.b.shape(value.name)
        for dim, s in value.stretches.items():
            place = self.b.op("arange", start=0, stop=s.padded, step=1, dtype="int64")
            inside = self.b.op("lt", place, s.size)
            inside = self.b.op("reshape", inside, shape=(1, s.padded, 1))
            inside = self.b.op("expand", inside, shape=(s.outer, s.padded, s.inner))
            inside = self.b.op("reshape", inside, shape=(s.after, *(1 for _ in shape[dim + 1 :])))
            name = self.b.op("where", inside, name, self._number(name, fill))
        return replace(value, name=name, is_zero=fill == 0)
