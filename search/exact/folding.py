"""Repeated blocks of a model, cut down to a few for a search that looks at many ways to run it.

Consecutive blocks ("model.layers.3"), each of which reads what the one before gives, are a *chain*. Its blocks are of a
*kind* if they are equal up to names and hand the same on. Kinds may follow each other in any order: alike all along, in
runs, or with a period. Constants that several blocks read, such as tables of positions, belong to no block.

A folded graph keeps a few blocks of a chain, which are a walk over its kinds: from the kind of the first block to that
of the last one, each kind at least once, and only steps that blocks of the chain take too. It says how often each of
them occurs: costs and bytes count as often. Where an occurrence follows another one than in the walk, what is handed on
must be brought into the layout in which the walk's block reads it (`Tie`). So a plan of a folded graph is a plan of the
whole graph in which the blocks that one stands for are laid out alike: `unfolded` gives every copy the choices of the
block that stands for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from shardwright.pcg.analysis import constant_nodes, read_again
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.step.parameters import module_block
from shardwright.search.choices.problem import Problem
from shardwright.search.effort import WHOLE, Effort
from shardwright.search.exact.chains import Link, Walk, chains, walks

_KINDS = ("node", "storage", "hub")


class Repeated(NamedTuple):
    """A block that stands for several: all of them, in order."""

    block: str
    blocks: tuple[str, ...]

    @property
    def times(self) -> int:
        return len(self.blocks)


class Tie(NamedTuple):
    """Two values of a folded graph: a block's occurrences read `before`, and are given `after` in its place `times`."""

    before: str
    after: str
    times: int


@dataclass(frozen=True)
class Folded:
    """A graph with its runs folded.

    Attributes:
        repeated: the blocks that stand for several, in the order of the graph.
        ties: what occurrences of blocks are given in place of what the graph has them read.
        home: the repeated block of every node that lies in one, parameters included.
        alike: the parameters that were left out, each with the one that stands for it.
        copies: for each block that stands for several, one table per copy, in order: the copy's names of the block's
            nodes and of the values that the block reads of the one before it.
        last: the values that are read behind a chain, each with its name in the chain's last block.
        is_mixed: whether blocks that one stands for lie between those that another stands for.
        effort: how much of it a search tries, by its size.
    """

    graph: Graph
    repeated: tuple[Repeated, ...] = ()
    ties: tuple[Tie, ...] = ()
    home: Mapping[str, str] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    last: Mapping[str, str] = field(default_factory=dict)
    is_mixed: bool = False
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


def fold(graph: Graph) -> Folded:
    """Return the graph with a few blocks of every chain in place of all."""
    whole, graph = graph, shared_first(graph)
    folds = [_Fold(links, walk) for links, walk in walks(list(chains(graph)))]
    if not folds:
        return Folded(whole)
    renamed = _joined(f.renamed for f in folds)
    dropped = set[str]().union(*(f.dropped for f in folds))
    nodes = tuple(
        replace(n, inputs=tuple(renamed.get(i, i) for i in n.inputs)) for n in graph.nodes if n.name not in dropped
    )
    return Folded(
        Graph(nodes, tuple((key, renamed.get(name, name)) for key, name in graph.outputs), graph.mesh),
        tuple(repeated for f in folds for repeated in f.repeated),
        tuple(Tie(renamed.get(b, b), after, times) for f in folds for (b, after), times in f.ties.items()),
        _joined(f.home for f in folds),
        _joined(f.alike for f in folds),
        {
            block: [{renamed.get(a, a): b for a, b in names.items()} for names in each]
            for f in folds
            for block, each in f.copies.items()
        },
        _joined(f.last for f in folds),
        any(f.is_mixed for f in folds),
    )


def _joined(tables: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return dict(chain.from_iterable(table.items() for table in tables))


class _Fold:
    """A chain, and the walk that stands for it."""

    def __init__(self, links: Sequence[Link], walk: Walk) -> None:
        self.links = links
        self.kept, self.stand_in = walk
        self.is_mixed = self.stand_in != sorted(self.stand_in)

    def _of(self, place: int) -> Link:
        return self.links[self.kept[place]]

    def _alike(self) -> Iterator[tuple[Link, Link]]:
        """Yield each block with the one that stands for it."""
        yield from ((link, self._of(place)) for link, place in zip(self.links, self.stand_in, strict=True))

    @property
    def repeated(self) -> Iterator[Repeated]:
        for place in range(len(self.kept)):
            alike = (link.block.name for link, at in zip(self.links, self.stand_in, strict=True) if at == place)
            yield Repeated(self._of(place).block.name, tuple(alike))

    @property
    def ties(self) -> Mapping[tuple[str, str], int]:
        """Count how often a block is given a value in place of another one that the walk has it read."""
        times = Counter[tuple[str, str]]()
        for before, after in pairwise(self.stand_in):
            if after != before + 1:
                times.update(zip(self._of(after).read, self._of(before).given, strict=True))
        return times

    @property
    def dropped(self) -> set[str]:
        names = {self._of(place).block.name for place in range(len(self.kept))}
        return {n.name for link in self.links if link.block.name not in names for n in link.block.own}

    @property
    def renamed(self) -> dict[str, str]:
        """The values that are read in place of dropped ones, in the walk and behind it."""
        renaming = dict(
            zip((n.name for n in self.links[-1].block.nodes), (n.name for n in self._of(-1).block.nodes), strict=True)
        )
        for place in range(1, len(self.kept)):
            renaming |= zip(self._of(place).read, self._of(place - 1).given, strict=True)
        return renaming

    @property
    def last(self) -> dict[str, str]:
        return {twin.name: n.name for n, twin in zip(self.links[-1].block.nodes, self._of(-1).block.nodes, strict=True)}

    @property
    def home(self) -> dict[str, str]:
        blocks = (self._of(place).block for place in range(len(self.kept)))
        return {n.name: block.name for block in blocks for n in block.own}

    @property
    def alike(self) -> dict[str, str]:
        pairs = (
            zip(link.block.leaves, twin.block.leaves, strict=True) for link, twin in self._alike() if link is not twin
        )
        return {n.name: twin.name for n, twin in chain.from_iterable(pairs)}

    @property
    def copies(self) -> Mapping[str, Sequence[Mapping[str, str]]]:
        names_by_block = dict[str, list[Mapping[str, str]]]()
        for link, twin in self._alike():
            names = zip((n.name for n in twin.block.own), (n.name for n in link.block.own), strict=True)
            names_by_block.setdefault(twin.block.name, []).append(
                dict([*zip(twin.read, link.read, strict=True), *names])
            )
        return names_by_block


def shared_first(graph: Graph) -> Graph:
    """Return the graph with the constants that several blocks read before the blocks, as parts of none.

    Capture leaves them in the first block that reads them, which is then like no other block.
    """
    constants = constant_nodes(graph)
    home = {n.name: module_block(f"{n.source.module}.") for n in graph.nodes if not n.is_leaf}
    shared = set[str]()
    for node in reversed(graph.nodes):
        if node.name in constants and (block := home.get(node.name)) is not None:
            users = graph.users[node.name]
            if any(user in shared for user in users) or (block and any(home[user] != block for user in users)):
                shared.add(node.name)
    if not any(home[name] for name in shared):
        return graph
    leaves, first, rest = list[Node](), list[Node](), list[Node]()
    for node in graph.nodes:
        of = first if node.name in shared else leaves if node.is_leaf else rest
        of.append(replace(node, source=replace(node.source, module="")) if of is first else node)
    return Graph((*leaves, *first, *rest), graph.outputs, graph.mesh)


# ---- from the folded graph to the whole one ----


def unfolded(problem: Problem, folded: Folded, graph: Graph) -> Problem | None:
    """Return the problem of a whole graph, for `materialize`: its names lead to variables of the `folded` one's.

    So the two problems have the same solutions. The folded graph's names may differ from the problem's. None where more
    than names differs, or where the first of equal blocks alone has operators that no parameter reaches.
    """
    if (alike := _equal_names(folded.graph, problem.graph)) is None:
        return None
    origins = {node.name: node.name for node in graph.nodes} | dict(_stands_for(folded))
    origins = {name: alike[of] for name, of in origins.items() if of in alike}
    handed_on = {name: alike[of] for name, of in _handed_on(folded)}
    known = problem.index
    index = {(kind, name): known[kind, of] for name, of in origins.items() for kind in _KINDS if (kind, of) in known}
    index |= {("hub", name): known["hub", of] for name, of in handed_on.items() if ("hub", of) in known}
    domains = {name: problem.domains[of] for name, of in origins.items() if of in problem.domains}
    constants = constant_nodes(graph)
    if any(not (node.is_leaf or node.name in constants or node.name in domains) for node in graph.nodes):
        return None
    closures = {name: problem.closures[of] for name, of in origins.items() if of in problem.closures}
    return replace(problem, graph=graph, index=index, domains=domains, closures=closures)


def _equal_names(graph: Graph, other: Graph) -> Mapping[str, str] | None:
    """Return, for each name in a graph, the name in the other graph that computes the same; None if they differ."""
    if graph is other:
        return {node.name: node.name for node in graph.nodes}
    equal_to, ahead = dict[str, str](), [(a, b) for (_, a), (_, b) in zip(graph.outputs, other.outputs, strict=True)]
    while ahead:
        a, b = ahead.pop()
        if a in equal_to:
            if equal_to[a] != b:
                return None
            continue
        one, two = graph.by_name[a], other.by_name[b]
        if (one.op, one.attrs, len(one.inputs)) != (two.op, two.attrs, len(two.inputs)):
            return None
        equal_to[a] = b
        ahead += zip(one.inputs, two.inputs, strict=True)
    return equal_to if len(set(equal_to.values())) == len(equal_to) else None


def _stands_for(folded: Folded) -> Iterator[tuple[str, str]]:
    """Yield the nodes of all copies of blocks, each with the node that stands for it."""
    for block, copies in folded.copies.items():
        for names in copies:
            yield from ((name, of) for of, name in names.items() if folded.home.get(of) == block)


def _handed_on(folded: Folded) -> Iterator[tuple[str, str]]:
    """Yield each value that a copy reads of another, with what stands for it among the readings of the folded block.

    So it takes the layouts of the latter. Values that their own copy reads too are left out.
    """
    users, home, origins = folded.graph.users, folded.home, dict(_stands_for(folded))
    for block, copies in folded.copies.items():
        for names in copies:
            for before, name in names.items():
                of = origins.get(name, name)
                if home.get(before) != block and not any(home.get(user) == home.get(of) for user in users[of]):
                    yield name, before
