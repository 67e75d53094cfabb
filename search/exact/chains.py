"""Chains of blocks, the kinds of their blocks, and the walk over the kinds that stands for a chain.

Consecutive blocks ("model.layers.3"), each of which reads what the one before gives, are a chain. Its blocks are of a
*kind* if they are equal up to names and give the same to the next one. A *walk* goes from the kind of the first block
to that of the last one, over each kind at least once, by steps that blocks of the chain take too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.step.parameters import module_block

MIN_TIMES = 4
"""How often a kind occurs, at least, to be folded; beside such a one, which decides about memory, one less will do."""
_MOST_KINDS = 6
"""The most kinds of a chain for which a walk is looked for."""


class Block(NamedTuple):
    """The operators from the first to the last of a block, and the leaves that nobody else reads."""

    name: str
    nodes: tuple[Node, ...]
    leaves: tuple[Node, ...]

    @property
    def own(self) -> tuple[Node, ...]:
        return (*self.leaves, *self.nodes)


@dataclass(frozen=True)
class Link:
    """A block of a chain.

    read   the values that it reads of the block before it; of the first block, those in their place
    given  its values that the next block reads, in the order of reading; of the last block, those read outside
    kind   equal for blocks that compute the same of what they read, and give the same
    """

    block: Block
    read: tuple[str, ...]
    given: tuple[str, ...]
    kind: Hashable


class Walk(NamedTuple):
    """A walk over the kinds of a chain.

    kept      the number of the block at each place of the walk
    stand_in  for each block, the place of the one that stands for it
    """

    kept: list[int]
    stand_in: list[int]


def chains(graph: Graph) -> Iterator[list[Link]]:
    """Yield the chains of a graph: blocks right behind each other, of which only the last gives values to others."""
    results, listed = {name for _, name in graph.outputs}, list[Block]()
    for block, before in _blocks(graph):
        mine = {n.name for b in (*listed[-1:], block) for n in b.own}
        ends = listed and any(n.name in results or not mine.issuperset(graph.users[n.name]) for n in listed[-1].own)
        if ends or (listed and before != listed[-1].name):
            yield from _linked(graph, listed)
            listed = []
        listed.append(block)
    yield from _linked(graph, listed)


def _linked(graph: Graph, blocks: Sequence[Block]) -> Iterator[list[Link]]:
    """Yield blocks as a chain, from the first one that reads what another block like it does, in the same types.

    The first block may read a value without gradient, where each block gives the next one a value with a gradient.
    """
    read = [(), *(tuple(_read_of(block, before)) for before, block in pairwise(blocks))]
    bare, types = [tuple(map(_bare, block.own)) for block in blocks], graph.types
    for start, block in enumerate(blocks):
        like = next((i for i in range(start + 1, len(blocks)) if bare[i] == bare[start]), None)
        first = None if like is None else _in_place_of(block, blocks[like], read[like])
        if like is None or first is None or [types[n] for n in first] != [types[n] for n in read[like]]:
            continue
        reads = [first, *read[start + 1 :]]
        gives = [*reads[1:], tuple(_read_outside(graph, blocks[-1]))]
        rows = zip(blocks[start:], reads, gives, bare[start:], strict=True)
        yield [Link(b, r, g, (what, _reading(graph, b, r, g))) for b, r, g, what in rows]
        return


def _read_of(block: Block, before: Block) -> Iterator[str]:
    """Yield the values of the block before that a block reads, in order."""
    made = {n.name for n in before.own}
    yield from (name for name in dict.fromkeys(i for n in block.nodes for i in n.inputs) if name in made)


def _read_outside(graph: Graph, block: Block) -> Iterator[str]:
    """Yield the values of a block that are read outside of it."""
    mine, results = {n.name for n in block.own}, {name for _, name in graph.outputs}
    yield from (n.name for n in block.own if n.name in results or not mine.issuperset(graph.users[n.name]))


def _in_place_of(block: Block, other: Block, read: Sequence[str]) -> tuple[str, ...] | None:
    """Return the values that a block reads in place of those that another one like it reads; None if that differs."""
    by_name, twins = dict[str, str](), {b.name: a.name for a, b in zip(block.own, other.own, strict=True)}
    for mine, theirs in zip(block.nodes, other.nodes, strict=True):
        for a, b in zip(mine.inputs, theirs.inputs, strict=True):
            if (by_name.setdefault(b, a) if b in read else twins.get(b, b)) != a:
                return None
    return tuple(by_name[name] for name in read)


def _reading(graph: Graph, block: Block, read: Sequence[str], given: Sequence[str]) -> Hashable:
    """Return what the operators of a block read, and the places of what it gives, without names."""
    number, slot = ({name: i for i, name in enumerate(names)} for names in ([n.name for n in block.own], read))
    inputs = tuple(
        tuple(("own", number[i]) if i in number else ("before", slot[i]) if i in slot else i for i in n.inputs)
        for n in block.nodes
    )
    return inputs, tuple(graph.types[name] for name in read), tuple(number[name] for name in given)


def _blocks(graph: Graph) -> Iterator[tuple[Block, str]]:
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
        yield Block(name, nodes, leaves), before if start == end else ""
        end, before = stop, name


def _bare(node: Node) -> Hashable:
    return node.op, tuple((key, value) for key, value in node.attrs if key not in ("seed", "target"))


# ---- walks ----


def walks(chains: Sequence[Sequence[Link]]) -> Iterator[tuple[Sequence[Link], Walk]]:
    """Yield parts of chains that fewer blocks stand for, each with its walk."""
    often = any(times >= MIN_TIMES for links in chains for times in Counter(link.kind for link in links).values())
    least = MIN_TIMES - often
    for links in chains:
        for part in _frequent(links, least):
            if (walk := _walk(part)) is not None:
                yield part, walk
                continue
            runs = (list(run) for _, run in groupby(part, lambda link: link.kind))
            yield from ((run, Walk([0], [0] * len(run))) for run in runs if len(run) >= least)


def _frequent(links: Sequence[Link], least: int) -> Iterator[Sequence[Link]]:
    """Yield the longest parts of a chain in which each kind occurs at least so often."""
    often = {kind for kind, times in Counter(link.kind for link in links).items() if times >= least}
    parts = [list(part) for is_often, part in groupby(links, lambda link: link.kind in often) if is_often]
    for part in parts:
        if len(part) == len(links):
            yield part
        else:
            yield from _frequent(part, least)


def _walk(links: Sequence[Link]) -> Walk | None:
    """Return the shortest walk over the kinds of a chain; None where there are too many kinds, or no blocks for it."""
    first = dict[Hashable, int]()
    kinds = [first.setdefault(link.kind, number) for number, link in enumerate(links)]
    if len(first) > _MOST_KINDS:
        return None
    steps = dict.fromkeys(pairwise(kinds))
    ahead, seen = deque([[kinds[0]]]), {(kinds[0], frozenset(kinds[:1]))}
    while ahead:
        walk = ahead.popleft()
        if walk[-1] == kinds[-1] and len({*walk}) == len(first):
            return _with_blocks(kinds, walk) if len(walk) < len(links) else None
        for before, after in steps:
            state = after, frozenset([*walk, after])
            if before == walk[-1] and state not in seen:
                seen.add(state)
                ahead.append([*walk, after])
    return None


def _with_blocks(kinds: Sequence[int], walk: Sequence[int]) -> Walk | None:
    """Return a walk over these kinds with its blocks, which lie in its order; None if the chain has no such blocks."""
    stand_in, blocks = list(_stand_ins(kinds, walk)), [0]
    for place in range(1, len(walk)):
        block = next((i for i, at in enumerate(stand_in) if at == place and i > blocks[-1]), None)
        if block is None:
            return None
        blocks.append(block)
    return Walk(blocks, stand_in)


def _stand_ins(kinds: Sequence[int], walk: Sequence[int]) -> Iterator[int]:
    """Yield the place in the walk that stands for each block: of several of its kind, one that goes on as the block.

    Of several such, the next one from the place of the block before, so that every place stands for blocks.
    """
    last = 0
    for number, mine in enumerate(kinds):
        places = [place for place, kind in enumerate(walk) if kind == mine]
        following = [*kinds[number + 1 : number + 2]]
        same = [place for place in places if following and [*walk[place + 1 : place + 2]] == following] or places[-1:]
        if number:
            last = next((place for place in same if place >= last), same[0])
        yield last
