"""Both sides of placement rules as parallel graphs, which are run device by device.

It shares only the rule with the generator and the proofs: graphs are built and typed by `pcg`, at pairwise distinct
sizes, on integers (in float64, so sums and products are exact). Rules that are added to one graph share it, so equal
subterms are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from shardwright.pcg.choice import WHOLE, Choice, Choices, Split
from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import Graph, Node, fits, infer, leaf, make_attrs
from shardwright.pcg.interpret import Array
from shardwright.pcg.layout import Layout, Layouts, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.offers import offered
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import PARALLEL_OPS, REPLICATE
from shardwright.pcg.types import TensorType
from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.attributes import CONSTANTS
from shardwright.substitutions.terms import Term, Variable
from shardwright.verifier.falsifiers.instances import index_limit, index_ranges

_FREE = (29, 23, 19, 17, 13, 11, 7, 5, 3, 2)


@dataclass
class Devices:
    """A parallel graph to which sides of rules are added, with the data of its leaves."""

    mesh: Mesh
    rng: np.random.Generator
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    data: dict[str, Array] = field(default_factory=dict)
    _known: dict[object, str] = field(default_factory=dict)

    def add(self, rule: Equation) -> list[tuple[str, str]]:
        """Add a rule; return both sides of every root, as nodes' names. Raises `GraphError` if a side is ill-typed."""
        error: GraphError | None = None
        for order in product((False, True), repeat=2):  # a convolution's kernel must fit into its image
            try:
                return self._sides(rule, self.sizes(rule, *order))
            except GraphError as caught:
                error = error or caught
        assert error is not None
        raise error

    def sizes(self, rule: Equation, ascending: bool = False, falling: bool = False) -> dict[str, Any]:
        """Return pairwise distinct sizes; those in the guard are multiples of the degrees, growing unless `falling`."""
        unit = int(np.prod(self.mesh.sizes))
        names = list(dict.fromkeys(name for _, dims in rule.variables for name in dims.names))
        guarded = {name for condition in rule.guard for name in condition.names}
        sharded = [n for n in names if n in guarded]
        multiples = sorted(range(2, 2 + len(sharded)), reverse=falling)
        others = [n for n in names if n not in guarded]
        free = zip(others, sorted(_FREE[-len(others) :], reverse=not ascending), strict=False)
        divided = {name: unit * n for name, n in zip(sharded, multiples, strict=True)}
        return dict(CONSTANTS) | divided | dict(free)

    def _sides(self, rule: Equation, sizes: Mapping[str, Any]) -> list[tuple[str, str]]:
        indices = index_ranges(rule)
        given = {name: dims.shape(sizes) for name, dims in rule.variables}
        layouts = {name: tuple(p.at(sizes) for p in places) for name, places in rule.layouts}
        leaves = {
            name: self._variable(
                name, shape, layouts[name], index_limit(indices[name], given, sizes) if name in indices else None
            )
            for name, shape in given.items()
        }
        pairs = zip(rule.left, rule.right, strict=True)
        return [(self._term(left, leaves, sizes), self._term(right, leaves, sizes)) for left, right in pairs]

    def _term(self, term: Term, leaves: Mapping[str, str], sizes: Mapping[str, Any]) -> str:
        if isinstance(term, Variable):
            return leaves[term.name]
        operands = tuple(self._term(t, leaves, sizes) for t in term.operands)
        attrs = {k: v.text if k == "axis" else v.evaluate(sizes) for k, v in term.attrs}
        return self._node(term.op, operands, attrs)

    def _node(self, op: str, operands: tuple[str, ...], attrs: Mapping[str, Any], split: Choices = ()) -> str:
        key = (op, operands, make_attrs(**attrs), split)
        if key not in self._known:
            kinds = [self.types[name] for name in operands]
            if op not in PARALLEL_OPS and not split:
                split = self._split(op, kinds, attrs)
            self._known[key] = self._append(Node(f"t{len(self.nodes)}", op, operands, make_attrs(**attrs), split))
        return self._known[key]

    def _append(self, node: Node) -> str:
        kind = infer(node, [self.types[name] for name in node.inputs], self.mesh)
        if any(n < 1 for n in kind.shape):
            raise GraphError(f"{node}: has shape {list(kind.shape)}")
        self.types[node.name] = kind
        self.nodes.append(node)
        return node.name

    def _split(self, op: str, operands: Sequence[TensorType], attrs: Mapping[str, Any]) -> Choices:
        """Return, for every axis, the choice that requires just these layouts."""
        signature = ROWS[op].signature([t.shape for t in operands], attrs)
        choices: list[Choice] = []
        for axis, name in enumerate(self.mesh.names):
            have = tuple(t.layouts[axis] for t in operands)
            blocks = {x.blocks for x in have}
            ways = offered(ROWS[op], signature, lambda size, blocks=blocks: blocks)
            fitting = (way for way, needs, _ in ways if all(map(fits, operands, (axis,) * len(needs), needs)))
            if (choice := next(fitting, None)) is None:
                raise GraphError(f"{op} has no split for operands in {', '.join(map(str, have))} along {name!r}")
            choices.append(choice)
        return tuple(choices)

    def _variable(self, name: str, shape: tuple[int, ...], layouts: Layouts, limit: int | None) -> str:
        """Add a leaf in these layouts. Leaves are stored R or S; a partial one is a sum over a sharded dimension."""
        key = ("variable", name, shape, layouts, limit)
        if key in self._known:
            return self._known[key]
        partial = [axis for axis, x in enumerate(layouts) if x.kind == "P"]
        lead = tuple(self.mesh.sizes[axis] for axis in partial)
        stored = tuple(_stored(x, partial, axis) for axis, x in enumerate(layouts))
        dtype = "float64" if limit is None else "int64"
        made = self._append(
            leaf(f"{name}{len(self.nodes)}", "parameter" if limit is None else "input", (*lead, *shape), dtype, name,
                 grad=limit is None, layouts=stored)
        )  # fmt: skip
        drawn = self.rng.integers(-4, 5, (*lead, *shape)) if limit is None else self.rng.integers(0, limit, shape)
        self.data[made] = drawn.astype(dtype)
        if partial:
            split = tuple(_sum_split(x, partial, axis) for axis, x in enumerate(layouts))
            made = self._node("sum", (made,), {"dims": tuple(range(len(partial))), "keepdim": False}, split)
        for axis, x in zip(self.mesh.names, layouts, strict=True):
            if x.kind == "C":
                made = self._node(REPLICATE, (made,), {"axis": axis})
        self._known[key] = made
        return made

    def graph(self) -> Graph:
        return Graph(tuple(self.nodes), (), self.mesh)


def _stored(layout: Layout, partial: Sequence[int], axis: int) -> Layout:
    if layout.kind == "P":
        return S(partial.index(axis))
    return S(layout.dim + len(partial), layout.blocks) if layout.is_shard else R


def _sum_split(layout: Layout, partial: Sequence[int], axis: int) -> Choice:
    if layout.kind == "P":
        return Split(f"d{partial.index(axis)}")
    return Split(f"d{layout.dim + len(partial)}", layout.blocks) if layout.is_shard else WHOLE
