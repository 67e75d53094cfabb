"""A graph of the same results whose batch has more rows, so that devices can share it evenly.

    7 rows ──repeat one──▶ 8 rows ──each by itself──▶ 8 rows ──the sum of 7──▶ loss

The padding is copies of rows, so it is finite wherever the rows are, and any operator may work on it row by row. Where
rows are summed, it is masked: it has no part in a sum, and so in no gradient. What sees rows together in any other way
(a maximum, a sort, an operator without a row) is given the true rows alone. So sums, counts of targets and statistics
are those of the true batch, and no constant that the model made of its size is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.pcg.factors import Signature
from shardwright.pcg.graph import Graph
from shardwright.pcg.node import Node
from shardwright.pcg.padding.laws import knows_positions
from shardwright.pcg.padding.longer import Padder, Value
from shardwright.pcg.padding.stretches import Stretch, holders
from shardwright.pcg.row import Row

_TARGETS = {"cross_entropy_sum": 1}
"""The operand of classes, of which the attribute `ignore_index` is none, of operators that are sums but not linear."""


def with_rows(graph: Graph, size: int, to: int) -> Graph:
    """Return a serial graph of the same results, in which the `size` rows of its inputs become `to` rows.

    The inputs and the outputs keep their shapes.
    """
    return _Rows(graph, size, to).run()


class _Rows(Padder):
    def __init__(self, graph: Graph, size: int, to: int) -> None:
        super().__init__(graph, ())
        self._size, self._to = size, to

    def leaf(self, node: Node) -> None:
        """Append a leaf; the padding begins at inputs of so many rows, or of several for each."""
        super().leaf(node)
        shape = self.graph.types[node.name].shape
        if node.op == "input" and shape and shape[0] % self._size == 0:
            rows = Stretch(1, self._size, self._to, shape[0] // self._size)
            self.longer[node.name] = self.filled(node.name, {0: rows})

    def allows(self, node: Node, row: Row, signature: Signature, factor: int, stretch: Stretch) -> bool:
        """Return whether an operator works on rows one by one, or sums them."""
        role = signature.factors[factor].role
        is_sum = role == "sum" and bool(self._masks(node, row, signature, factor))
        return (role == "map" or is_sum) and not row.random and not knows_positions(row, signature, factor, stretch)

    def stretched(self, node: Node) -> bool:
        """Append an operator on more rows; of dropout, the true rows' mask as one process draws it, with more rows."""
        if node.op != "dropout" or node.inputs[0] not in self.longer:
            return super().stretched(node)
        kind, operand = self.graph.types[node.name], self.longer[node.inputs[0]]
        ones = self.b.op("full", shape=kind.shape, value=1.0, dtype=kind.dtype)
        mask = self.fill(self.b.copied(node, [ones]), operand.stretches)
        name = self.b.op("mul", operand.name, mask.name)
        self.longer[node.name] = Value(name, operand.stretches)
        return True

    def masked(
        self, node: Node, row: Row, signature: Signature, stretched: Mapping[int, Stretch], operands: list[Value]
    ) -> list[Value]:
        """Mask the rows of operands of which there is a sum."""
        for factor in stretched:
            for i in self._masks(node, row, signature, factor) if signature.factors[factor].role == "sum" else ():
                fill = dict(node.attrs)["ignore_index"] if node.op in _TARGETS else 0
                assert isinstance(fill, int)
                operands[i] = self.refilled(operands[i], fill)
        return operands

    def _masks(self, node: Node, row: Row, signature: Signature, factor: int) -> tuple[int, ...]:
        """Return the operands to mask so that a sum over rows is one of true rows; () if there are none."""
        if node.op in _TARGETS:
            return (_TARGETS[node.op],)
        dtypes = [self.graph.types[name].dtype for name in node.inputs]
        sets, there = row.partial_sets(dtypes, dict(node.attrs)), holders(signature, factor)
        return next((masks for masks in sets if set(masks) <= set(there)), ())

    def padded_as(self, name: str, stretches: Mapping[int, Stretch]) -> Value:
        """Return a value with exactly these stretches; one that has none yet is made once for all operators."""
        value = super().padded_as(name, stretches)
        if stretches:
            self.longer.setdefault(name, value)
        return value

    def fill(self, longer: str, stretches: Mapping[int, Stretch]) -> Value:
        """Append copies of rows to a new node."""
        for dim, s in stretches.items():
            shape = self.b.shape(longer)
            rows = self.b.op("arange", start=0, stop=s.size, step=1, dtype="int64")
            copies = self.b.op("concat", *[rows] * -(-s.padded // s.size), dim=0)
            places = self.b.op("slice", copies, dim=0, start=0, stop=s.padded, step=1)
            unfolded = self.b.op("reshape", longer, shape=(*shape[:dim], s.outer, s.size, s.inner, *shape[dim + 1 :]))
            more = self.b.op("index", unfolded, places, dim=dim + 1)
            longer = self.b.op("reshape", more, shape=(*shape[:dim], s.after, *shape[dim + 1 :]))
        return Value(longer, stretches)
