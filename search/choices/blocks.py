"""The operators that are worth splitting in blocks.

A slice into q, k and v wants its operand as `S(d, 3)`; the projection that made it gives `S(d)` when its output factor
is split, unless it is split in three blocks, "o/3". Wishes travel from readers to producers, and blocked results from
producers to readers, through every operator that can hold them. A wish counts only if its split helps to divide the
work of some contraction. No operator is named here: blocks come from factor strings alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardwright.pcg.choice import Choices, Split
from shardwright.pcg.factors import Signature
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layout, S
from shardwright.pcg.order import postorder

MAX_BLOCKED = 3
"""Splits in blocks per operator, the most wanted first."""


def blocked_choices(graph: Graph, constants: frozenset[str]) -> Mapping[str, Choices]:
    """Return, for every operator, the splits in blocks that its neighbours can use."""
    splits_of: dict[str, dict[tuple[int, int], None]] = defaultdict(dict)
    signatures = {n.name: _signature(graph, n) for n in graph.nodes if _splittable(n, constants)}
    useful = _Useful(graph, signatures)
    blocked: dict[str, set[Layout]] = defaultdict(set)
    for node in reversed(graph.nodes):
        if node.name in signatures:
            signature, mine = signatures[node.name], splits_of[node.name]
            _refine(signature, [signature.result], blocked[node.name], mine)
            splits = [operands for operands, result in _all_splits(signature, mine) if useful(node, result)]
            for position, name in enumerate(node.inputs):
                blocked[name] |= {operands[position] for operands in splits if _is_blocked(operands[position])}
    for node in graph.nodes:
        if node.name in constants and node.row is not None:
            blocked[node.name] = {x for x in _of_pieces(graph.signature(node)) if useful(node, x)}
        if node.name in signatures:
            signature = signatures[node.name]
            for name, dims in zip(node.inputs, signature.operands, strict=True):
                if blocked[name]:
                    _refine(signature, [dims], blocked[name], splits_of[node.name])
            results = {result for _, result in _all_splits(signature, splits_of[node.name])}
            blocked[node.name] |= {x for x in results if _is_blocked(x) and useful(node, x)}
    return {
        name: tuple(Split(signatures[name].factors[f].name, blocks) for f, blocks in list(choices)[:MAX_BLOCKED])
        for name, choices in splits_of.items()
        if choices
    }


def _splittable(node: Node, constants: frozenset[str]) -> bool:
    """Return whether a node may be split in blocks: it must work alike on any part, so it draws no random numbers."""
    return node.row is not None and node.name not in constants and not node.row.random


def _signature(graph: Graph, node: Node) -> Signature:
    """Return the signature; the factor that the operator counts positions along is fixed: its parts are consecutive."""
    signature, row = graph.signature(node), node.row
    counted = row.offset if row is not None else None
    factors = tuple(replace(f, role="fixed") if f.name == counted else f for f in signature.factors)
    return replace(signature, factors=factors)


def _refine(
    signature: Signature,
    tensors: Sequence[tuple[tuple[int, ...], ...]],
    layouts: set[Layout],
    blocked_splits: dict[tuple[int, int], None],
) -> None:
    """Add each (factor, blocks) whose split gives one of these blocked layouts and is no plain split."""
    for layout in sorted(layouts):
        for dims in tensors:
            before = 1
            for f in dims[layout.dim]:
                factor = signature.factors[f]
                blocks, rest = divmod(layout.blocks, before)
                if rest == 0 and 1 < blocks < factor.size and factor.size % blocks == 0 and factor.role != "fixed":
                    blocked_splits[f, blocks] = None
                before *= factor.size


def _of_pieces(signature: Signature) -> Iterator[Layout]:
    """Yield the layouts of a result whose pieces, as those of two concatenated batches, are each split."""
    factors = signature.factors
    for dim, members in enumerate(signature.result):
        roles = [factors[f].role for f in members]
        if roles == ["fixed", "map"]:
            yield S(dim, factors[members[0]].size)


def _is_blocked(layout: Layout) -> bool:
    return layout.is_shard and layout.blocks > 1


_Value = tuple[str, Layout]
"""A node's result in a layout."""


class _Useful:
    """A test of whether a result in a layout helps to divide the work of a contraction, its own or a later one's."""

    def __init__(self, graph: Graph, signatures: Mapping[str, Signature]) -> None:
        self.graph, self.signatures = graph, signatures
        self._known: dict[_Value, bool] = {}
        self._further: dict[_Value, list[_Value]] = {}

    def __call__(self, node: Node, result: Layout) -> bool:
        return self._at_once(node, result) or self._later((node.name, result))

    def _at_once(self, node: Node, result: Layout) -> bool:
        return (node.row is not None and node.row.contraction) or result.kind == "P"

    def _later(self, value: _Value) -> bool:
        for each in postorder([value], lambda v: () if v in self._known else self._follow(v)):
            if each not in self._known:
                self._known[each] = any(self._known[further] for further in self._follow(each))
        return self._known[value]

    def _follow(self, value: _Value) -> list[_Value]:
        """Return the readers' results that decide about the value; none where the answer is known."""
        if value not in self._further:
            readers = dict.fromkeys(self.graph.users[value[0]])
            results = [result for reader in readers for result in self._held(reader, *value)]
            if any(self._at_once(self.graph.by_name[name], layout) for name, layout in results):
                self._known[value], results = True, []
            self._further[value] = results
        return self._further[value]

    def _held(self, reader: str, name: str, layout: Layout) -> Iterator[_Value]:
        """Yield the results of a reader when it is split so that it takes the value in this layout."""
        if reader not in self.signatures:
            return
        signature, node = self.signatures[reader], self.graph.by_name[reader]
        blocked_splits: dict[tuple[int, int], None] = {}
        dims = [d for n, d in zip(node.inputs, signature.operands, strict=True) if n == name]
        _refine(signature, dims, {layout}, blocked_splits)
        for operands, result in _all_splits(signature, blocked_splits):
            if any(n == name and x == layout for n, x in zip(node.inputs, operands, strict=True)):
                yield reader, result


def _all_splits(
    signature: Signature, blocked_splits: Mapping[tuple[int, int], None]
) -> list[tuple[tuple[Layout, ...], Layout]]:
    plain = [signature.split_layouts(i) for i, f in enumerate(signature.factors) if f.role != "fixed" and f.size > 1]
    return plain + [signature.refined(f, blocks).split_layouts(f) for f, blocks in blocked_splits]
