"""The statements of a program in order: the actions of forward, as far as they are written as code.

* The statements of one block of the model form a part, as do the statements that backward recomputes together. Parts
  become functions.
* A node that is absorbed by another node runs where the other is written; blocks that it frees are freed there, too.
* A value leaves for the host after the region that makes it, as a region runs again. So does the mark of a value at
  which backward fetches others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from shardwright.lowering.text.expressions import Expressions
from shardwright.lowering.text.outside import Outside
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.chunk import Occurrence
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.operation import Region
from shardwright.pcg.step.verbs import Verb


class Statement(NamedTuple):
    """An action as a line of the program, by its verb: run, start, draw, await, free, offload, release or arrive.

    `name`: of a node, or a block's number. Before the backward of an "arrive", values arrive from the host; a "release"
    stands after its node.
    """

    verb: Verb
    name: str | int


class TextPart(NamedTuple):
    """Consecutive statements of one block of the model ("": none), or of one region that backward recomputes."""

    module: str
    region: Region | None
    body: tuple[Statement | TextPart, ...]


def statements(graph: Graph, code: Expressions, boundary: Outside) -> list[Statement | TextPart]:
    """Return the statements of the forward function, except those that fetch leaves, constants and sums."""
    return _Writer(graph, code, boundary).run()


def flat(items: Iterable[Statement | TextPart]) -> Iterator[Statement]:
    """Yield all statements, including those inside parts."""
    for item in items:
        if isinstance(item, TextPart):
            yield from flat(item.body)
        else:
            yield item


def drawn_ahead(graph: Graph, items: Iterable[Statement | TextPart]) -> set[str]:
    """Return the dropouts whose masks are drawn in statements of their own."""
    seeds = {graph.by_name[str(s.name)].attr("seed") for s in flat(items) if s.verb == "draw"}
    return {n.name for n in graph.nodes if n.is_random and n.attr("seed") in seeds}


class _Placed(NamedTuple):
    """A statement, with its block and its region."""

    block: str
    region: Region | None
    statement: Statement


class _Writer:
    def __init__(self, graph: Graph, code: Expressions, boundary: Outside) -> None:
        self.graph, self.code, self.outside = graph, code, boundary
        self.written = {node.name for node in code.written}
        self.written_into = {inner: name for name, fused in code.fused.items() for inner in fused.absorbed}
        self.made = {pair.operations[-1]: pair.made for pair in code.pairs.values()}
        self.written_into |= {n: pair.made[-1] for pair in code.pairs.values() for n in pair.operations}
        self.position = {node.name: number for number, node in enumerate(graph.nodes)}
        self.later: dict[str, list[int]] = {}  # the blocks that are freed where a node is written
        self.there: set[str] = set()
        self.found: list[_Placed] = []
        self.place: tuple[str, Region | None] = ("", None)
        self.waiting = deque[_Placed]()  # statements about values whose region goes on, or which are not written yet

    def run(self) -> list[Statement | TextPart]:
        chunk, arriving = self.outside.chunk, self.outside.arriving
        for occurrence, actions in zip(chunk.occurrences, self.outside.actions.forward, strict=True):
            self.place = occurrence.operation.block, occurrence.operation.region
            self._write_waiting(self.place[1])
            released = False
            for action in actions:
                match action.verb:
                    case "await":
                        self._write("await", action.number)
                    case "free":
                        self._free(action.number)
                    case "draw":
                        self._write("draw", chunk.occurrences[action.number].operation.name)
                    case "run" | "start":
                        self._run(action.verb, occurrence.operation.name)
                    case "offload":
                        self._wait(action.verb, chunk.occurrences[chunk.allocations[action.number].writers[-1]])
                    case "release":
                        released = True
                    case _:
                        pass  # the runtime gathers ahead; the first reader of a sum waits for it
            if occurrence.number in arriving:
                self._wait("arrive", occurrence)
            if released:
                self._wait("release", occurrence)
            self._write_waiting(self.place[1])
        self._write_waiting(None)
        return _parts(self.found)

    def _wait(self, verb: Verb, occurrence: Occurrence) -> None:
        """Write a statement about an operation's value once the value is there, and no region that makes it goes on."""
        name, region = occurrence.operation.name, occurrence.operation.region
        statement = Statement(verb, self.written_into.get(name, name))
        self.waiting.append(_Placed(occurrence.operation.block, region, statement))

    def _write_waiting(self, now: Region | None) -> None:
        """Write what waits, in order, as far as no region of it is the one that goes on `now`."""
        while self.waiting:
            block, region, statement = self.waiting[0]
            is_there = statement.verb == "release" or statement.name in self.there
            if not is_there or (region is not None and region == now):
                return
            whole = region is not None and region.results is Fate.KEPT
            self.found.append(_Placed("" if whole else block, None, statement))
            self.waiting.popleft()

    def _write(self, verb: Verb, name: str | int) -> None:
        self.found.append(_Placed(*self.place, Statement(verb, name)))

    def _run(self, verb: Verb, name: str) -> None:
        """Write an operation; those of a pair, all at the last of them."""
        if name in self.code.in_pairs and name not in self.made:
            return
        for made in self.made.get(name, (name,)):
            if made in self.written:
                self._write(verb, made)
            self.there.add(made)
            for block in self.later.pop(made, ()):
                self._write("free", block)

    def _free(self, block: int) -> None:
        """Free a block: now, or, if readers of it were absorbed by other nodes, after the last of these is written."""
        chunk = self.outside.chunk
        readers = (o.operation.name for o in chunk.occurrences if block in chunk.blocks_of(o))
        pending = {self.written_into[name] for name in readers if name in self.written_into} - self.there
        if pending:
            self.later.setdefault(max(pending, key=lambda name: self.position[name]), []).append(block)
        else:
            self._write("free", block)


def _parts(placed_items: Sequence[_Placed]) -> list[Statement | TextPart]:
    """Group statements into parts: blocks, and regions within them."""
    items = list[Statement | TextPart]()
    for block, placed in groupby(placed_items, key=lambda p: p.block):
        items_of_block = list[Statement | TextPart]()
        whole = None
        for region, inner in groupby(placed, key=lambda p: p.region):
            body = tuple(p.statement for p in inner)
            if region is None or region.results is Fate.KEPT:
                whole = region or whole
                items_of_block += body
            else:
                items_of_block.append(TextPart(block, region, body))
        items += _then_freed(TextPart(block, whole, tuple(items_of_block))) if block else items_of_block
    return items


def _then_freed(part: TextPart) -> Iterator[Statement | TextPart]:
    """Yield a part, and after it the blocks that it frees last.

    So a function's text does not depend on whether a gathered block stays for backward.
    """
    gathers = [place for place, item in enumerate(part.body) if isinstance(item, Statement) and item.verb == "await"]
    start = gathers[-1] if gathers else 0
    freed = [item for item in part.body[start:] if isinstance(item, Statement) and item.verb == "free"]
    yield part._replace(body=(*part.body[:start], *(item for item in part.body[start:] if item not in freed)))
    yield from freed
