"""The parallel graph of chosen layouts: parallel operators are inserted where producers and readers disagree.

Nodes that no parameter reaches (masks, positions, labels) are built in the layout each reader wants: a slice of such
a node is the same node of sliced operands wherever its factor string allows, down to slices of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.attrs import Attr
from shardwright.pcg.choice import WHOLE, Choice, Choices, Split, indivisible
from shardwright.pcg.graph import OPAQUE, Graph, Node, Source
from shardwright.pcg.layout import C, Layout, Layouts, R, innermost
from shardwright.pcg.moves import Move, Operator, steps_of
from shardwright.pcg.optable import ROWS
from shardwright.pcg.order import postorder
from shardwright.pcg.results import handed_on
from shardwright.search.choices.domain import CertifiedSplits
from shardwright.search.choices.problem import Problem, Solution
from shardwright.search.choices.reshard import can_hold, replicated
from shardwright.search.exact.folding import Tie


def materialize(problem: Problem, solution: Solution, certified: CertifiedSplits, ties: Sequence[Tie] = ()) -> Graph:
    """Return the validated parallel graph of a solution. Its erasure is the problem's graph.

    A move lies where the value is made. `ties`: those of a folded graph; what its blocks hand on is moved in every
    occurrence of the block that reads it, so such a move lies where the value is read.
    """
    return _Materializer(problem, solution, certified, ties).run().validate()


class _Materializer:
    def __init__(self, problem: Problem, solution: Solution, certified: CertifiedSplits, ties: Sequence[Tie]) -> None:
        self.problem, self.solution, self.certified = problem, solution, certified
        self.handed = {tie.after for tie in ties}
        self.given = {name: [tie.after for tie in ties if tie.before == name] for name in {tie.before for tie in ties}}
        self.graph, self.mesh = problem.graph, problem.mesh
        self.constants = constant_nodes(self.graph)
        self.nodes: dict[str, Node] = {}
        self.made: dict[tuple[str, Layouts], str] = {}
        self.splits: dict[tuple[str, Layouts], _ConstantSplits] = {}  # of constants
        self.whole = replicated(len(self.mesh))

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if node.name in self.constants:
                if node.is_leaf or node.op == OPAQUE or node.is_random:
                    self._constant(node.name, self.whole)
                continue
            if node.op == "parameter":
                self._parameter(node)
            else:
                self._operator(node)
        results = handed_on(self.graph, self.mesh)
        outputs = tuple((key, self._at(name, results.get(name, self.whole))) for key, name in self.graph.outputs)
        return Graph(tuple(self.nodes.values()), outputs, self.mesh)

    # ---- nodes ----

    def _append(self, node: Node) -> str:
        name, count = node.name, 1
        while name in self.nodes:
            name, count = f"{node.name}.{count}", count + 1
        self.nodes[name] = node if name == node.name else replace(node, name=name)
        return name

    def _chosen(self, kind: str, name: str) -> Layouts | None:
        return self.problem.chosen(self.solution.choices, kind, name)

    def _parameter(self, node: Node) -> None:
        layouts = self._chosen("storage", node.name) or self.whole
        self.made[node.name, layouts] = self._append(_with_layouts(node, layouts))

    def _operator(self, node: Node) -> None:
        domain = self.problem.domains[node.name]
        choice = self.solution.choices[self.problem.index["node", node.name]]
        needs = zip(node.inputs, domain.operands[choice], strict=True)
        inputs = tuple([self._at(name, need, node) for name, need in needs])
        name = self._append(_split(node, inputs, domain.splits[choice]))
        self.made[node.name, domain.result[choice]] = name

    # ---- resharding ----

    def _at(self, name: str, need: Layouts, reader: Node | None = None) -> str:
        """Return the value of a serial node in the layouts that a reader needs."""
        if name in self.constants:
            return self._constant(name, tuple(R if x.kind == "C" else x for x in need))
        closure = self.problem.closures[name]
        need = closure.plain(need)
        if (name, need) in self.made:
            return self.made[name, need]
        start = self._chosen("storage" if self.graph.by_name[name].op == "parameter" else "node", name)
        assert start is not None
        hub = closure.plain(self._chosen("hub", name) or start)
        to_hub, from_hub = closure.path(start, hub), closure.path(hub, need)
        made, read = self.graph.by_name[name].source, reader.source if reader else None
        is_moved = name in self.handed or any(self._chosen("node", n) != hub for n in self.given.get(name, ()))
        is_tied = name in self.handed or name in self.given
        first, then = (read if moved and read else made for moved in (is_moved, is_tied))
        return self._walk(name, start, [*to_hub, *from_hub], [first] * len(to_hub) + [then] * len(from_hub))

    def _walk(self, name: str, state: Layouts, path: Sequence[Move], sources: Sequence[Source]) -> str:
        """Append the operators of a whole path, and return its end; moves that were priced apart are not fused."""
        current = self.made[name, state]
        for move, steps, source in zip(path, steps_of(path, self.mesh), sources, strict=True):
            state = (*state[: move.axis], move.after, *state[move.axis + 1 :])
            if (name, state) in self.made:
                current = self.made[name, state]
                continue
            current = self._run(current, steps, source)
            self.made[name, state] = current
        return current

    def _run(self, operand: str, steps: Sequence[Operator], source: Source) -> str:
        for op, attrs in steps:
            name = f"{operand}.{op}_{dict(attrs)['axis']}"
            operand = self._append(Node(name, op, (operand,), attrs, (), source))
        return operand

    # ---- constants ----

    def _constant(self, name: str, need: Layouts) -> str:
        """Return a node that no parameter reaches, in layouts made of R and S."""
        for value in postorder([(name, need)], lambda value: () if value in self.made else self._operands(*value)):
            if value not in self.made:
                self.made[value] = self._make_constant(*value)
        return self.made[name, need]

    def _operands(self, name: str, need: Layouts) -> list[tuple[str, Layouts]]:
        """Return the values, with their layouts, that a constant in these layouts is made of."""
        node = self.graph.by_name[name]
        if self._may_split(node):
            _, got, wanted = self._splits(node, need)
            return [] if (name, got) in self.made else list(zip(node.inputs, wanted, strict=True))
        return [(name, self.whole)] if need != self.whole else [(i, self.whole) for i in node.inputs]

    def _make_constant(self, name: str, need: Layouts) -> str:
        node = self.graph.by_name[name]
        if self._may_split(node):
            split, got, wanted = self._splits(node, need)
            if (name, got) not in self.made:
                inputs = tuple(self.made[i, w] for i, w in zip(node.inputs, wanted, strict=True))
                self.made[name, got] = self._append(_split(node, inputs, split))
            return self._sliced(self.made[name, got], got, need)
        if need != self.whole:
            return self._sliced(self.made[name, self.whole], self.whole, need)
        if node.is_leaf:
            return self._append(_with_layouts(node, ()))
        inputs = tuple(self.made[i, self.whole] for i in node.inputs)
        return self._append(_split(node, inputs, (WHOLE,) * len(self.mesh)))

    def _may_split(self, node: Node) -> bool:
        return not (node.is_leaf or node.op == OPAQUE or node.is_random)

    def _splits(self, node: Node, need: Layouts) -> _ConstantSplits:
        """Return how the operator of a constant is split."""
        if (node.name, need) not in self.splits:
            kinds = [self.graph.types[i] for i in node.inputs]
            shapes, certified = tuple(kind.shape for kind in kinds), self.certified(node, kinds)
            splits = _constant_splits(node.op, node.attrs, shapes, certified, need, self.mesh.sizes)
            self.splits[node.name, need] = splits
        return self.splits[node.name, need]

    def _sliced(self, operand: str, have: Layouts, need: Layouts) -> str:
        """Slice along the axes that are still whole, outermost shard first."""
        axes = [a for a in range(len(need)) if have[a] != need[a]]
        path = [Move(axis, R, need[axis]) for axis in sorted(axes, key=lambda a: (need[a].dim, need[a].blocks, a))]
        for steps in steps_of(path, self.mesh):
            operand = self._run(operand, steps, self.nodes[operand].source)
        return operand


_ConstantSplits = tuple[Choices, Layouts, list[Layouts]]
"""The split of a constant, the layouts of its result and those of its operands."""


@lru_cache(maxsize=1 << 14)
def _constant_splits(
    op: str,
    attrs: tuple[tuple[str, Attr], ...],
    shapes: tuple[tuple[int, ...], ...],
    certified: frozenset[Choice],
    need: Layouts,
    sizes: tuple[int, ...],
) -> _ConstantSplits:
    """Return the split on every axis where a certified factor gives the needed shard; the rest is sliced later."""
    signature = ROWS[op].signature(shapes, dict(attrs))
    splits, operands, reached = list[Choice](), [list[Layout]() for _ in shapes], list[Layout]()
    for layout in need:
        factor = next((i for i, f in enumerate(signature.factors) if f.role == "map" and f.name in certified
                       and signature.split_layouts(i)[1] == layout), None)  # fmt: skip
        needs = signature.split_layouts(factor)[0] if factor is not None else (R,) * len(shapes)
        splits.append(Split(signature.factors[factor].name) if factor is not None else WHOLE)
        reached.append(layout if factor is not None else R)
        for mine, x in zip(operands, needs, strict=True):
            mine.append(R if x == C else x)
    wanted, got = [tuple(x) for x in operands], tuple(reached)
    held = all(can_hold(s, w, sizes) for s, w in zip(shapes, wanted, strict=True))
    if not held or indivisible(signature, splits, sizes) is not None or not _can_slice(got, need):
        whole = replicated(len(sizes))
        return (WHOLE,) * len(need), whole, [whole] * len(shapes)
    return tuple(splits), got, wanted


def _can_slice(have: Layouts, need: Layouts) -> bool:
    """Return whether the missing shards can be sliced off one by one without touching the shards that are there."""
    state = have
    axes = [a for a in range(len(need)) if have[a] != need[a]]
    for axis in sorted(axes, key=lambda a: (need[a].dim, need[a].blocks, a)):
        state = (*state[:axis], need[axis], *state[axis + 1 :])
        if not innermost(state, axis):
            return False
    return True


def _split(node: Node, inputs: tuple[str, ...], split: Choices) -> Node:
    """Return the same operator with these inputs, split; an opaque one is never split."""
    return Node(node.name, node.op, inputs, node.attrs, split if node.op != OPAQUE else (), node.source)


def _with_layouts(node: Node, layouts: Layouts) -> Node:
    texts = tuple(map(str, layouts))
    attrs = tuple([(key, texts if key == "layouts" else value) for key, value in node.attrs])
    return Node(node.name, node.op, node.inputs, attrs, node.split, node.source)
