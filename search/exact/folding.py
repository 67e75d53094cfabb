"""Repeated blocks of a model, cut down to a few for a search that looks at many ways to run it.

Consecutive blocks ("model.layers.3") that are equal up to names, each reading what the one before gives, are a *run*.
Constants that several blocks read, such as tables of positions, belong to no block. A folded graph keeps the first
block of a run and says how often it occurs: costs and bytes count as often, and a value must leave each occurrence in
the layout in which it came in. So a plan of a folded graph is a plan of the whole graph in which equal blocks are laid
out alike: `unfolded` gives every copy the choices of the block that stands for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shardwright.pcg.analysis import constant_nodes, read_again
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.step.parameters import module_block
from shardwright.search.choices.problem import Problem
from shardwright.search.effort import WHOLE, Effort

MIN_TIMES = 4
"""The length from which runs are folded; beside a longer run, which decides about memory, one less is enough."""
_KINDS = ("node", "storage", "hub")


class Repeated(NamedTuple):
    """A block that stands for several.

    blocks    all of them, in order
    carried   pairs: a value that the first block reads, and the value that each block gives to the next in its place
    """

    blocks: tuple[str, ...]
    carried: tuple[tuple[str, str], ...]

    @property
    def block(self) -> str:
        return self.blocks[0]

    @property
    def times(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True)
class Folded:
    """A graph with its runs folded.

    Attributes:
        home: the repeated block of every node that lies in one, parameters included.
        alike: the parameters that were left out, each with the one that stands for it.
        copies: for each block that stands for several, one table per copy, in order: the copy's names of the block's
            nodes and of the values that the block reads of the one before it.
        last: the values that are read behind a run, each with its name in the run's last block.
        effort: how much of it a search tries, by its size.
    """

    graph: Graph
    repeated: tuple[Repeated, ...] = ()
    home: Mapping[str, str] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    last: Mapping[str, str] = field(default_factory=dict)
    effort: Effort = WHOLE

    @cached_property
    def repeats(self) -> Mapping[str, int]:
        """The number of occurrences of each block."""
        return {r.block: r.times for r in self.repeated}

    @cached_property
    def constants(self) -> frozenset[str]:
        """The result of `constant_nodes`, which all problems of the graph need."""
        return constant_nodes(self.graph)

    @cached_property
    def read_again(self) -> set[str]:
        """The result of the function of this name."""
        return read_again(self.graph)

    def times(self, name: str) -> int:
        """Return how often a node occurs."""
        return self.repeats.get(self.home.get(name, ""), 1)


class _Block(NamedTuple):
    """The operators from the first to the last of a block, and the leaves that nobody else reads."""

    name: str
    nodes: tuple[Node, ...]
    leaves: tuple[Node, ...]

    @property
    def own(self) -> tuple[Node, ...]:
        return (*self.leaves, *self.nodes)


def fold(graph: Graph, copies: int = 1) -> Folded:
    """Return the graph with the first `copies` blocks of every run; the last of these stands for the rest."""
    whole, graph = graph, shared_first(graph)
    repeated, dropped = list[Repeated](), set[str]()
    renamed, home, alike = dict[str, str](), dict[str, str](), dict[str, str]()
    called = dict[str, Sequence[Mapping[str, str]]]()
    found = list(_runs(graph))
    least = MIN_TIMES - any(len(run) >= MIN_TIMES for run in found)
    for run in found:
        if len(run) < max(least, copies + 1):
            continue
        for number, block in enumerate(run[:copies]):
            stands_for = run[number : number + 1] if number < copies - 1 else run[number:]
            carried = tuple(_carried(run[number], run[number + 1]))
            repeated.append(Repeated(tuple(b.name for b in stands_for), carried))
            home |= dict.fromkeys((n.name for n in block.own), block.name)
            called[block.name] = list(_names(block, run[number : number + len(stands_for)], carried))
        end = run[copies - 1]
        dropped |= {n.name for block in run[copies:] for n in block.own}
        renamed |= {b.name: a.name for a, b in zip(end.nodes, run[-1].nodes, strict=True)}
        for block in run[copies:]:
            alike |= {b.name: a.name for a, b in zip(end.leaves, block.leaves, strict=True)}
    if not repeated:
        return Folded(whole)
    nodes = tuple(
        replace(n, inputs=tuple(renamed.get(i, i) for i in n.inputs)) for n in graph.nodes if n.name not in dropped
    )
    outputs = tuple((key, renamed.get(name, name)) for key, name in graph.outputs)
    runs = tuple(r._replace(carried=tuple((renamed.get(a, a), b) for a, b in r.carried)) for r in repeated)
    copied = {
        block: [{renamed.get(a, a): b for a, b in names.items()} for names in each] for block, each in called.items()
    }
    last = {own: name for name, own in renamed.items()}
    return Folded(Graph(nodes, outputs, graph.mesh), runs, home, alike, copied, last)


def shared_first(graph: Graph) -> Graph:
    """Return the graph with the constants that several blocks read before the blocks, as parts of none.

    Capture leaves them in the first block that reads them, which is then like no other block.
    """
    constants = constant_nodes(graph)
    home = {n.name: module_block(f"{n.source.module}.") for n in graph.nodes if not n.is_leaf}
    shared = set[str]()
    for node in reversed(graph.nodes):
        if node.name in constants and (own := home.get(node.name)) is not None:
            users = graph.users[node.name]
            if any(user in shared for user in users) or (own and any(home[user] != own for user in users)):
                shared.add(node.name)
    if not any(home[name] for name in shared):
        return graph
    leaves, first, rest = list[Node](), list[Node](), list[Node]()
    for node in graph.nodes:
        of = first if node.name in shared else leaves if node.is_leaf else rest
        of.append(replace(node, source=replace(node.source, module="")) if of is first else node)
    return Graph((*leaves, *first, *rest), graph.outputs, graph.mesh)


def _runs(graph: Graph) -> Iterator[list[_Block]]:
    """Yield maximal sequences of equal blocks, in order."""
    run, key = list[_Block](), None
    for block, before in _blocks(graph):
        found = _signature(graph, block, run[-1] if run else None)
        follows = run and before == run[-1].name and found is not None
        if not (follows and (key is None or key == found)):
            yield from _closed(graph, run)
            run, key = [], None
        elif follows:
            key = found
        run.append(block)
    yield from _closed(graph, run)


def _closed(graph: Graph, run: list[_Block]) -> Iterator[list[_Block]]:
    """Yield a run, if only its last block gives values to anyone but the next block.

    The first block may read a value without gradient, where each block gives the next one a value with a gradient. Then
    the first block is a run of its own.
    """
    if len(run) > 1 and any(graph.types[a] != graph.types[b] for a, b in _carried(run[0], run[1])):
        yield run[:1]
        run = run[1:]
    results = {name for _, name in graph.outputs}
    for number, block in enumerate(run[:-1]):
        mine = {n.name for n in block.own} | {n.name for n in run[number + 1].own}
        if any(n.name in results or not mine.issuperset(graph.users[n.name]) for n in block.own):
            return
    if run:
        yield run


def _blocks(graph: Graph) -> Iterator[tuple[_Block, str]]:
    """Yield the blocks whose operators lie side by side, each with the name of the block right before it, or ""."""
    operators = [node for node in graph.nodes if not node.is_leaf]
    names = [module_block(f"{node.source.module}.") for node in operators]
    first, last = dict[str, int](), dict[str, int]()
    for i, name in enumerate(names):
        first.setdefault(name, i)
        last[name] = i
    end, before = 0, ""
    for name in first:
        if not name:
            continue
        start, stop = first[name], last[name] + 1
        if start < end or any(n not in ("", name) for n in names[start:stop]):
            before, end = "", max(end, stop)
            continue
        nodes = tuple(operators[start:stop])
        inside = {n.name for n in nodes}
        read = dict.fromkeys(i for n in nodes for i in n.inputs if graph.by_name[i].op in ("parameter", "buffer"))
        leaves = tuple(graph.by_name[i] for i in read if inside.issuperset(graph.users[i]))
        yield _Block(name, nodes, leaves), before if start == end else ""
        end, before = stop, name


def _signature(graph: Graph, block: _Block, before: _Block | None) -> Hashable | None:
    """Return a key, equal for blocks that compute the same from the block before; None if that is of another kind."""
    if before is None or [_bare(n) for n in block.own] != [_bare(n) for n in before.own]:
        return None
    number, previous = ({n.name: i for i, n in enumerate(b.own)} for b in (block, before))

    def place(name: str) -> Hashable:
        return ("own", number[name]) if name in number else ("before", previous.get(name, name))

    return tuple(tuple(map(place, n.inputs)) for n in block.nodes)


def _bare(node: Node) -> Hashable:
    return node.op, tuple((key, value) for key, value in node.attrs if key not in ("seed", "target"))


def _carried(block: _Block, after: _Block) -> Iterator[tuple[str, str]]:
    """Yield each value that a block reads from outside, with the value that it gives to the next one in its place."""
    inside, found = {n.name for n in block.own}, dict[str, str]()
    for mine, other in zip(block.nodes, after.nodes, strict=True):
        for a, b in zip(mine.inputs, other.inputs, strict=True):
            if b in inside and a not in inside:
                found.setdefault(a, b)
    yield from found.items()


def _names(block: _Block, alike: Sequence[_Block], carried: Sequence[tuple[str, str]]) -> Iterator[Mapping[str, str]]:
    """Yield, for each equal block, its names of the nodes of `block` and of the values read of the block before."""
    before = {name: name for name, _ in carried}
    for other in alike:
        own = {a.name: b.name for a, b in zip(block.own, other.own, strict=True)}
        yield before | own
        before = {name: own[after] for name, after in carried}


# ---- from the folded graph to the whole one ----


def unfolded(problem: Problem, folded: Folded, graph: Graph) -> Problem | None:
    """Return the problem of a whole graph, for `materialize`: its names lead to variables of the `folded` one's.

    So the two problems have the same solutions. The folded graph's names may differ from the problem's. None where more
    than names differs, or where the first of equal blocks alone has operators that no parameter reaches.
    """
    if (alike := _equal_names(folded.graph, problem.graph)) is None:
        return None
    own = {node.name: node.name for node in graph.nodes} | dict(_stands_for(folded))
    own = {name: alike[of] for name, of in own.items() if of in alike}
    handed_on = {name: alike[of] for name, of in _handed_on(folded)}
    known = problem.index
    index = {(kind, name): known[kind, of] for name, of in own.items() for kind in _KINDS if (kind, of) in known}
    index |= {("hub", name): known["hub", of] for name, of in handed_on.items() if ("hub", of) in known}
    domains = {name: problem.domains[of] for name, of in own.items() if of in problem.domains}
    constants = constant_nodes(graph)
    if any(not (node.is_leaf or node.name in constants or node.name in domains) for node in graph.nodes):
        return None
    closures = {name: problem.closures[of] for name, of in own.items() if of in problem.closures}
    return replace(problem, graph=graph, index=index, domains=domains, closures=closures)


def _equal_names(graph: Graph, other: Graph) -> Mapping[str, str] | None:
    """Return, for each name in a graph, the name in the other graph that computes the same; None if they differ."""
    if graph is other:
        return {node.name: node.name for node in graph.nodes}
    found, ahead = dict[str, str](), [(a, b) for (_, a), (_, b) in zip(graph.outputs, other.outputs, strict=True)]
    while ahead:
        a, b = ahead.pop()
        if a in found:
            if found[a] != b:
                return None
            continue
        one, two = graph.by_name[a], other.by_name[b]
        if (one.op, one.attrs, len(one.inputs)) != (two.op, two.attrs, len(two.inputs)):
            return None
        found[a] = b
        ahead += zip(one.inputs, two.inputs, strict=True)
    return found if len(set(found.values())) == len(found) else None


def _stands_for(folded: Folded) -> Iterator[tuple[str, str]]:
    """Yield the nodes of all copies of blocks, each with the node that stands for it."""
    for block, copies in folded.copies.items():
        for names in copies:
            yield from ((name, of) for of, name in names.items() if folded.home.get(of) == block)


def _handed_on(folded: Folded) -> Iterator[tuple[str, str]]:
    """Yield each value that a copy gives to the next, with the first copy's input, whose layouts it takes.

    Values that their own copy reads too are left out.
    """
    users, home = folded.graph.users, folded.home
    for repeated in folded.repeated:
        for before, after in repeated.carried:
            if not any(home.get(user) == repeated.block for user in users[after]):
                yield from ((names[before], before) for names in folded.copies[repeated.block][1:])
