"""The statements of a program in order: the actions of forward, and what they need to be written as code.

* Nodes that depend on nothing (masks, positions) are computed once, in a function of their own.
* Leaves are read right before their first use.
* A node that is written into another runs where that one is written; what is freed after it, is freed there.
* Masks are drawn in the order in which the single process draws them, each once, whatever the order of the dropouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from shardwright.lowering.expressions import Expressions
from shardwright.lowering.outside import Outside
from shardwright.pcg.attrs import integer
from shardwright.pcg.graph import Graph


class Statement(NamedTuple):
    """One thing to write. `name` is a node, or for gather and free the number of a block."""

    kind: Literal["node", "constant", "start", "wait", "gather", "free", "draw"]
    name: str | int


def statements(graph: Graph, code: Expressions, outside: Outside, results: Sequence[str]) -> list[Statement]:
    """The statements of the forward function, which returns `results`."""
    return _Writer(graph, code, outside).run(results)


def drawn_ahead(graph: Graph, found: Sequence[Statement]) -> set[str]:
    """The dropouts whose masks are drawn in statements of their own."""
    seeds = {graph.by_name[str(s.name)].attr("seed") for s in found if s.kind == "draw"}
    return {n.name for n in graph.nodes if n.is_random and n.attr("seed") in seeds}


class _Writer:
    def __init__(self, graph: Graph, code: Expressions, outside: Outside) -> None:
        self.graph, self.code, self.outside = graph, code, outside
        self.written = {node.name for node in code.written}
        self.written_into = {inner: name for name, fused in code.fused.items() for inner in fused.absorbed}
        self.position = {node.name: number for number, node in enumerate(graph.nodes)}
        self.later: dict[str, list[Statement]] = {}  # what is freed where a node is written
        nodes = (graph.by_name[occurrence.operation.name] for occurrence in outside.chunk.occurrences)
        self.seeds = {n.name: integer(dict(n.attrs), "seed") for n in nodes if n.is_random}
        self.drawn: set[int] = set()
        self.there: set[str] = set()
        self.started: set[str] = set()
        self.found: list[Statement] = []

    def run(self, results: Sequence[str]) -> list[Statement]:
        chunk = self.outside.chunk
        for occurrence, own in zip(chunk.occurrences, self.outside.actions.forward, strict=True):
            for action in own:
                match action.verb:
                    case "await":
                        self.there.update(p.result for p in chunk.blocks[action.number].parameters)
                        self.found.append(Statement("gather", action.number))
                    case "free":
                        self._free(action.number)
                    case "run" | "start":
                        self._run(occurrence.operation.name, early=action.verb == "start")
                    case _:
                        pass  # the runtime gathers ahead; a sum is waited for by what reads it
        for name in results:
            self._fetch(name)
        return self.found

    def _run(self, name: str, *, early: bool) -> None:
        if name not in self.written:
            return
        for read in self.code.reads(self.graph.by_name[name]):
            self._fetch(read)
        self._draw(name)
        self.found.append(Statement("start" if early else "node", name))
        (self.started if early else self.there).add(name)
        self.found += self.later.pop(name, ())

    def _free(self, block: int) -> None:
        """Where all that reads the block is written: now, or where the last of it is written into another node."""
        chunk = self.outside.chunk
        readers = (o.operation.name for o in chunk.occurrences if block in chunk.blocks_of(o))
        pending = {self.written_into[name] for name in readers if name in self.written_into} - self.there
        if pending:
            last = max(pending, key=lambda name: self.position[name])
            self.later.setdefault(last, []).append(Statement("free", block))
        else:
            self.found.append(Statement("free", block))

    def _fetch(self, name: str) -> None:
        """Whatever a statement reads that no earlier one has made."""
        if name in self.there:
            return
        kind = "wait" if name in self.started else "constant" if name in self.outside.operations.once else "node"
        self.found.append(Statement(kind, name))
        self.there.add(name)

    def _draw(self, name: str) -> None:
        """Before a dropout, draw what the single process has drawn by then; and its own mask, if others share it."""
        if name not in self.seeds:
            return
        seed = self.seeds[name]
        shared = Counter(self.seeds.values())[seed] > 1
        for other, its in sorted(self.seeds.items(), key=lambda item: item[1]):
            if its not in self.drawn and (its < seed or (its == seed and shared)):
                self.drawn.add(its)
                self.found.append(Statement("draw", other))
        self.drawn.add(seed)
