"""The order in which a program's lines are written, and what is done once, early or late.

* Nodes that depend on nothing (masks, positions) are computed once, in a function of their own.
* Sums that only the batch determines (the number of targets) are launched first and waited for where they are read.
* Leaves are read right before their first use; blocks of parameters are gathered then, and freed after their last use.
* The reductions at the end that sum up the loss are left to the module.
* Masks are drawn in the order in which the single process draws them, each once, whatever the order of the dropouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.lowering.late import LOSS, summand_of_loss
from shardwright.lowering.parameters import Paths, last_readers
from shardwright.pcg.attrs import integer
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE


@dataclass(frozen=True)
class Line:
    """One thing to write. `name` is a node, or for gather and free the number of a block."""

    kind: Literal["node", "constant", "start", "wait", "gather", "free", "draw"]
    name: str | int


@dataclass(frozen=True)
class Outside:
    """What the runtime does around the program: `paths` for parameters, `inputs` for the batch, `loss_sums` at the end.

    `aliases` maps every parallel operator that is done outside to the node whose value its readers see.
    """

    paths: Paths
    inputs: Mapping[str, str]
    loss_sums: tuple[str, ...] = ()
    loss: str = ""

    @property
    def aliases(self) -> dict[str, str]:
        return {**self.inputs, **self.paths.aliases}


def find_loss_sums(graph: Graph, paths: Paths, inputs: Mapping[str, str]) -> Outside:
    """The whole division of labour between program and runtime."""
    if LOSS not in dict(graph.outputs):
        return Outside(paths, inputs)
    name, sums = summand_of_loss(graph)
    return Outside(paths, inputs, tuple(node.name for node in sums), name)


def early_sums(graph: Graph, constant: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Reductions of small values that the batch alone determines, and everything that has to come before them."""
    from_batch: set[str] = set(constant)
    sums: list[str] = []
    for node in graph.nodes:
        if node.op == "input":
            from_batch.add(node.name)
        elif node.is_leaf or node.op in (OPAQUE, COMBINE) or not all(i in from_batch for i in node.inputs):
            continue
        elif node.op == REDUCE:
            small = graph.types[node.name].num_elements == 1
            if small and node.name not in constant:
                sums.append(node.name)
        elif node.op == PARTITION or (node.op in ROWS and not ROWS[node.op].random):
            from_batch.add(node.name)
    return sums, _ancestors(graph, sums)


def _ancestors(graph: Graph, names: Iterable[str]) -> frozenset[str]:
    found: set[str] = set()
    pending = list(names)
    while pending:
        for name in graph.by_name[pending.pop()].inputs:
            if name not in found:
                found.add(name)
                pending.append(name)
    return frozenset(found)


def schedule(
    graph: Graph,
    nodes: Sequence[Node],
    reads: Mapping[str, tuple[str, ...]],
    constant: frozenset[str],
    paths: Paths,
    results: Sequence[str],
) -> list[Line]:
    """The lines of the forward function: `nodes` are those to write, `reads` what each one reads."""
    written = {node.name for node in nodes}
    sums, first = early_sums(graph, constant)
    sums = [name for name in sums if name in written]
    order = [n for n in nodes if n.name in first or n.name in sums] + [
        n for n in nodes if n.name not in first and n.name not in sums
    ]
    return _Scheduler(graph, order, reads, constant, paths, frozenset(sums)).run(results)


def drawn_ahead(graph: Graph, lines: Sequence[Line]) -> set[str]:
    """The dropouts whose masks are drawn in lines of their own."""
    seeds = {graph.by_name[str(line.name)].attr("seed") for line in lines if line.kind == "draw"}
    return {n.name for n in graph.nodes if n.op in ROWS and ROWS[n.op].random and n.attr("seed") in seeds}


class _Scheduler:
    def __init__(
        self,
        graph: Graph,
        order: Sequence[Node],
        reads: Mapping[str, tuple[str, ...]],
        constant: frozenset[str],
        paths: Paths,
        sums: frozenset[str],
    ) -> None:
        self.graph, self.order, self.reads, self.constant, self.sums = graph, order, reads, constant, sums
        self.block_of = {m.result: i for i, block in enumerate(paths.blocks) for m in block.members}
        self.freed_after = self._last_uses(paths)
        self.seeds = {n.name: integer(dict(n.attrs), "seed") for n in order if n.op in ROWS and ROWS[n.op].random}
        self.drawn: set[int] = set()
        self.lines: list[Line] = []
        self.there: set[str | int] = set()

    def run(self, results: Sequence[str]) -> list[Line]:
        for node in self.order:
            if node.is_leaf or node.name in self.constant:
                continue
            for name in self.reads[node.name]:
                self._fetch(name)
            self._draw(node)
            started = node.name in self.sums
            self.lines.append(Line("start" if started else "node", node.name))
            self.there.update(() if started else (node.name,))
            self.lines += [Line("free", block) for block in self.freed_after.get(node.name, ())]
        for name in results:
            self._fetch(name)
        return self.lines

    def _fetch(self, name: str) -> None:
        """Whatever a line reads that no earlier line has made."""
        if name in self.there:
            return
        if name in self.block_of:
            block = self.block_of[name]
            self.lines.append(Line("gather", block))
            self.there.update(m for m, b in self.block_of.items() if b == block)
            return
        kind = "wait" if name in self.sums else "constant" if name in self.constant else "node"
        self.lines.append(Line(kind, name))
        self.there.add(name)

    def _draw(self, node: Node) -> None:
        """Before a dropout, draw what the single process has drawn by then; and its own mask, if others share it."""
        if node.name not in self.seeds:
            return
        seed = self.seeds[node.name]
        shared = Counter(self.seeds.values())[seed] > 1
        for name, other in sorted(self.seeds.items(), key=lambda item: item[1]):
            if other not in self.drawn and (other < seed or (other == seed and shared)):
                self.drawn.add(other)
                self.lines.append(Line("draw", name))
        self.drawn.add(seed)

    def _last_uses(self, paths: Paths) -> dict[str, list[int]]:
        """After which node each block can be freed; those in use when the last one is gathered are kept."""
        position = {node.name: i for i, node in enumerate(self.order)}
        readers: dict[str, list[int]] = {}
        for node in self.order:
            for name in self.reads[node.name]:
                readers.setdefault(name, []).append(position[node.name])
        spans: list[tuple[int, int]] = []
        for block in paths.blocks:
            direct = [p for m in block.members for p in readers.get(m.result, [])]
            through = [position[r] for m in block.members for r in last_readers(self.graph, m.result) if r in position]
            spans.append((min(direct, default=0), max([*direct, *through], default=0)))
        last_gather = max((start for start, _ in spans), default=0)
        freed: dict[str, list[int]] = {}
        for number, (_, end) in enumerate(spans):
            if end < last_gather:
                freed.setdefault(self.order[end].name, []).append(number)
        return freed
