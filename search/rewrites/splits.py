"""Flow-based splits: any convex part of a graph, with any number of inputs and results, and what takes its place.

A part is *convex* if nothing outside lies on a way from one of its operators to another, so that it can be replaced at
once. It needs no operator that every path passes. It is named by the values at which it starts, whose makers stay
outside, and by the values in which it ends, and holds what lies between. Its ends are all of its values that anything
outside reads: results of the model, such as a buffer's new value, and operands of later operators.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.graph import Graph, Node, leaf, topological

FEWEST_OPERATORS, MOST_OPERATORS = 8, 48
"""The fewest and the most operators of a leaf: layouts can change inside, and it is solved in milliseconds."""


@dataclass(frozen=True)
class LeafPart:
    """A convex part of a graph, as a graph: its leaves are what it reads from outside, its outputs are its ends.

    `starts` and `ends` name the values around it; parameters that it reads are not among its starts.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    graph: Graph

    @cached_property
    def operators(self) -> frozenset[str]:
        return frozenset(node.name for node in self.graph.nodes if not node.is_leaf)


def signature(graph: Graph) -> Hashable:
    """Return a key that is equal for graphs that are the same up to names."""
    number = {node.name: i for i, node in enumerate(graph.nodes)}
    return tuple(_bare(node, number) for node in graph.nodes), tuple(number[name] for _, name in graph.outputs)


def _bare(node: Node, number: Mapping[str, int]) -> Hashable:
    attrs = tuple((key, value) for key, value in node.attrs if key not in ("seed", "target"))
    return node.op, tuple(number[name] for name in node.inputs), attrs


@lru_cache(maxsize=8)
def _fed(graph: Graph) -> frozenset[str]:
    """Return the operators that depend on the batch and on a parameter."""
    constants, fed = constant_nodes(graph), set[str]()
    for node in graph.nodes:
        if node.op == "input" or any(name in fed for name in node.inputs):
            fed.add(node.name)
    return frozenset(n.name for n in graph.nodes if not n.is_leaf and n.name in fed and n.name not in constants)


@lru_cache(maxsize=8)
def _places(graph: Graph) -> Mapping[str, int]:
    """Return the position of each node in the graph's order."""
    return {node.name: i for i, node in enumerate(graph.nodes)}


def between(graph: Graph, starts: Sequence[str], ends: Sequence[str]) -> LeafPart | None:
    """Return the part from some values to others, or None where something else in it is read from outside.

    An operator that depends on no parameter, or not on the batch, belongs to the part if it serves the part alone; else
    the part reads its result.
    """
    inside = _inside(graph, _needed(graph, starts, ends))
    names = {node.name for node in inside}
    results = {name for _, name in graph.outputs}.union(*(_read(graph, name, names) for name in names))
    if not names.issuperset(ends) or names & results - set(ends):
        return None
    nodes: dict[str, Node] = {}
    for node in inside:
        for name in node.inputs:
            if name not in names and name not in nodes:
                nodes[name] = _outside(graph, name)
        nodes[node.name] = node
    return LeafPart(tuple(starts), tuple(ends), Graph(tuple(nodes.values()), _outputs(ends)))


def leaves(graph: Graph, home: Mapping[str, str] | None = None) -> list[LeafPart]:
    """Return the graph's operators in parts of at most `MOST_OPERATORS`, in order, cut where the fewest values pass.

    Operators that lie side by side are convex, where values are made before they are read. `home`: the block that an
    operator lies in; no part lies in two.
    """
    operators = [node.name for node in graph.nodes if not node.is_leaf]
    at, fed = {name: i for i, name in enumerate(operators)}, _fed(graph)
    passing = [0] * (len(operators) + 1)
    for name in operators:
        if name in fed:
            for i in range(at[name] + 1, max((at[user] for user in graph.users[name]), default=0) + 1):
                passing[i] += 1
    blocks = [(home or {}).get(name, "") for name in operators]
    leaf_parts, start = list[LeafPart](), 0
    while start < len(operators):
        stop = next((i for i in range(start, len(operators)) if blocks[i] != blocks[start]), len(operators))
        while stop - start > MOST_OPERATORS:
            cut = min(range(start + FEWEST_OPERATORS, start + MOST_OPERATORS + 1), key=lambda i: (passing[i], -i))
            leaf_parts.append(_part(graph, operators[start:cut]))
            start = cut
        leaf_parts.append(_part(graph, operators[start:stop]))
        start = stop
    return [part for part in leaf_parts if part.operators]


def _part(graph: Graph, operators: Sequence[str]) -> LeafPart:
    """Return the part of these convex operators: the fed ones (`_fed`), and operators that serve them alone."""
    inside, fed = set(operators), _fed(graph)
    read = dict.fromkeys(i for name in operators for i in graph.by_name[name].inputs if i not in inside)
    starts = [name for name in read if graph.by_name[name].op != "parameter"]
    results = {name for _, name in graph.outputs}
    ends = [name for name in operators if name in fed and (name in results or _read(graph, name, inside))]
    return (between(graph, starts, ends) if ends else None) or LeafPart((), (), Graph((), ()))


def _outputs(ends: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the outputs of a part, as a model has them: the last one is its loss."""
    return (*((end, end) for end in ends[:-1]), ("loss", ends[-1]))


def _read(graph: Graph, name: str, inside: Iterable[str]) -> set[str]:
    """Return the value itself, if anything outside reads it."""
    return set() if set(graph.users[name]) <= set(inside) else {name}


def _outside(graph: Graph, name: str) -> Node:
    """Return the leaf for a value read from outside: a parameter stays one, any other becomes an input of its type."""
    node, kind = graph.by_name[name], graph.types[name]
    if node.op == "parameter":
        return node
    return leaf(name, "input", kind.shape, kind.dtype, name, grad=kind.grad, source=node.source)


def _needed(graph: Graph, starts: Iterable[str], ends: Iterable[str]) -> set[str]:
    """Return everything that the ends depend on without looking past the starts."""
    needed, stack, stop = set[str](), list(ends), set(starts)
    while stack:
        name = stack.pop()
        if name not in needed and name not in stop:
            needed.add(name)
            stack.extend(graph.by_name[name].inputs)
    return needed


def _inside(graph: Graph, needed: set[str]) -> list[Node]:
    """Return a part's operators: fed ones (`_fed`), and those that serve it alone, such as a weight's transpose."""
    fed, at, names = _fed(graph), _places(graph), set[str]()
    for name in sorted(needed, key=at.__getitem__, reverse=True):
        users = graph.users[name]
        if not graph.by_name[name].is_leaf and (name in fed or (users and names.issuperset(users))):
            names.add(name)
    return [graph.by_name[name] for name in sorted(names, key=at.__getitem__)]


class Transplanted(NamedTuple):
    """A graph with parts replaced, not validated.

    instead   by end that is not computed any more, the value that is read in its place
    added     by part, the operators that took its place
    """

    graph: Graph
    instead: Mapping[str, str]
    added: Sequence[frozenset[str]]


def transplanted(graph: Graph, parts: Sequence[tuple[LeafPart, Graph]]) -> Transplanted:
    """Return the graph with other graphs, of the same inputs and results, in place of parts that share no operator.

    An end keeps its name where it is computed. Where it is a value that is there already, that value is read.
    """
    removed = frozenset[str]().union(*(part.operators for part, _ in parts))
    taken = {node.name for node in graph.nodes if node.name not in removed}.union(*(part.ends for part, _ in parts))
    same, fresh = dict[str, str](), dict[str, list[Node]]()
    for part, new in parts:
        last = next(node.name for node in reversed(graph.nodes) if node.name in part.operators)
        fresh[last] = _renamed(part, new, taken, same)
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += fresh.get(node.name, ())
        if node.name not in removed:
            nodes.append(node)

    def now(name: str) -> str:
        while name in same:
            name = same[name]
        return name

    read = (replace(node, inputs=tuple(map(now, node.inputs))) for node in nodes)
    joined = Graph(topological(read), tuple((key, now(name)) for key, name in graph.outputs)).without_dead_nodes()
    added = [frozenset(node.name for node in new) for new in fresh.values()]
    return Transplanted(joined, {name: now(name) for name in same}, added)


def _renamed(part: LeafPart, new: Graph, taken: set[str], same: dict[str, str]) -> list[Node]:
    """Return the operators of a graph under free names; `same` learns of ends that are other values by now."""
    names = {node.name: node.name for node in new.nodes if node.is_leaf}
    for end, (_, result) in zip(part.ends, new.outputs, strict=True):
        if result in names:
            same[end] = names[result]
        else:
            names[result] = end
    operators: list[Node] = []
    for node in new.nodes:
        if node.is_leaf:
            continue
        if node.name not in names:
            name = node.name
            while name in taken:
                name += "_r"
            taken.add(name)
            names[node.name] = name
        operators.append(replace(node, name=names[node.name], inputs=tuple(names[i] for i in node.inputs)))
    return operators
