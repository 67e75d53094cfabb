"""Sequence splits: where a graph falls into two parts that share one tensor.

A *cut* is a node that every path from the batch to the loss passes. Between two neighbouring cuts lies a *leaf*.
Equal leaves (the same operators, shapes, attributes and wiring) are found by a signature that knows no names.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import networkx as nx

from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.graph import Graph, Node, leaf

MIN_OPERATORS = 8
"""Leaves smaller than this are joined with the next one."""
_SOURCE = ""


@dataclass(frozen=True)
class Leaf:
    """A part of a graph with one result, as a graph of its own: what it reads from outside are its leaves.

    `start` and `end` name the cuts around it ("" for the beginning).
    """

    start: str
    end: str
    graph: Graph

    @property
    def signature(self) -> Hashable:
        """Equal for leaves that are the same up to names."""
        number = {node.name: i for i, node in enumerate(self.graph.nodes)}
        return tuple(_shape_of(node, number) for node in self.graph.nodes)


def _shape_of(node: Node, number: Mapping[str, int]) -> Hashable:
    attrs = tuple((k, v) for k, v in node.attrs if k not in ("seed", "target"))
    return (node.op, tuple(number[i] for i in node.inputs), attrs)


def batch_nodes(graph: Graph) -> frozenset[str]:
    """Operators that depend on the batch and on a parameter: the stream that cuts divide."""
    constants, fed = constant_nodes(graph), set[str]()
    for node in graph.nodes:
        if node.op == "input" or any(i in fed for i in node.inputs):
            fed.add(node.name)
    return frozenset(n.name for n in graph.nodes if not n.is_leaf and n.name in fed and n.name not in constants)


def cuts(graph: Graph) -> list[str]:
    """The nodes that every path from the batch to the loss passes, in order; the loss is the last."""
    stream = batch_nodes(graph)
    loss = graph.loss
    if loss not in stream:
        return []
    backwards = nx.DiGraph()
    backwards.add_node(loss)
    for node in graph.nodes:
        if node.name in stream:
            before = [i for i in node.inputs if i in stream] or [_SOURCE]
            backwards.add_edges_from((node.name, i) for i in before)
    above = nx.immediate_dominators(backwards, loss)
    chain: list[str] = []
    current = above.get(_SOURCE, loss)
    while True:
        chain.append(current)
        if current == loss:
            return chain
        current = above[current]


def leaves(graph: Graph) -> list[Leaf]:
    """The parts between cuts, in order, small ones joined: the last one with the one before it."""
    chain = cuts(graph)
    stream = batch_nodes(graph)
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    starts, ends = [_SOURCE], list[str]()
    for end in chain:
        size = sum(1 for name in stream if order.get(starts[-1], -1) < order[name] <= order[end])
        if size >= MIN_OPERATORS:
            ends.append(end)
            starts.append(end)
    ends[-1:] = chain[-1:]
    found = (extract(graph, start, end) for start, end in zip(starts, ends, strict=False))
    return [part for part in found if part is not None]


def extract(graph: Graph, start: str, end: str) -> Leaf | None:
    """The part of a graph that leads from cut `start` to cut `end`, or None where it has a second result.

    Parameters stay parameters; every other value from outside becomes an input of its type.
    """
    inside = _inside(graph, _needed(graph, start, end))
    names = {n.name for n in inside}
    if any(u not in names for n in inside if n.name != end for u in graph.users[n.name]) or names & {
        v for _, v in graph.outputs
    } - {end}:
        return None
    nodes: dict[str, Node] = {}
    for node in inside:
        for name in node.inputs:
            if name not in names and name not in nodes:
                outside, kind = graph.by_name[name], graph.types[name]
                stays = outside.op == "parameter"
                nodes[name] = (
                    outside
                    if stays
                    else leaf(name, "input", kind.shape, kind.dtype, name, grad=kind.grad, source=outside.source)
                )
        nodes[node.name] = node
    return Leaf(start, end, Graph(tuple(nodes.values()), (("loss", end),)))


def _needed(graph: Graph, start: str, end: str) -> set[str]:
    """Everything that `end` depends on without looking past `start`."""
    needed, stack = set[str](), [end]
    while stack:
        name = stack.pop()
        if name not in needed and name != start:
            needed.add(name)
            stack.extend(graph.by_name[name].inputs)
    return needed


def _inside(graph: Graph, needed: set[str]) -> list[Node]:
    """The operators of a part: its stream, and what is made for it alone, as a transposed weight or a scalar."""
    stream = batch_nodes(graph)
    names: set[str] = set()
    for node in reversed(graph.nodes):
        users = graph.users[node.name]
        if node.name in needed and not node.is_leaf and (node.name in stream or (users and names.issuperset(users))):
            names.add(node.name)
    return [n for n in graph.nodes if n.name in names]


def transplant(graph: Graph, old: Leaf, new: Graph) -> Graph:
    """The graph with a leaf's nodes replaced by another graph of the same inputs and result. It is not validated."""
    removed = {n.name for n in old.graph.nodes if not n.is_leaf}
    result = new.loss
    taken = {n.name for n in graph.nodes if n.name not in removed}
    names = {n.name: n.name for n in new.nodes if n.is_leaf}
    fresh: list[Node] = []
    for node in new.nodes:
        if node.is_leaf:
            continue
        name = old.end if node.name == result else node.name
        while name in taken or (name == old.end and node.name != result):
            name += "_r"
        taken.add(name)
        names[node.name] = name
        fresh.append(replace(node, name=name, inputs=tuple(names[i] for i in node.inputs)))
    at = max(i for i, n in enumerate(graph.nodes) if n.name in removed)
    before = [n for n in graph.nodes[:at] if n.name not in removed]
    after = [n for n in graph.nodes[at + 1 :] if n.name not in removed]
    return Graph((*before, *fresh, *after), graph.outputs)
