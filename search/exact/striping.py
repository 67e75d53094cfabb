"""Causal rings in which a device has every n-th position of the sequence, so that all have the same work (`pcg.ring`).

Layouts were chosen with consecutive positions, at the price of balanced ones. A part of the graph has its blocks
multiplied: what is sharded together with the queries of a ring, up to the moves that cut it from the whole and gather
it again. These moves send what they sent before, so a balanced ring is never slower. Towers that are gathered before
they meet are a part each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from shardwright.pcg.attrs import integer
from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.parallel import COMBINE, PARTITION
from shardwright.pcg.ring import Ring
from shardwright.search.choices.domain import CertifiedSplits


class Striped(NamedTuple):
    """The values whose shards on an axis are cut alike, with causal queries among them: `blocks` on each device."""

    axis: int
    blocks: int
    values: frozenset[str]


def balanced(graph: Graph, certified: CertifiedSplits) -> Graph:
    """Return the graph with its causal rings balanced, where they can be."""
    for part in unbalanced(graph):
        striped = in_stripes(graph, part)
        if striped is not None and _is_certified(striped, graph, certified):
            graph = striped
    return graph


def unbalanced(graph: Graph) -> Iterator[Striped]:
    """Yield the parts with rings of causal attention whose queries are neighbours."""
    known = defaultdict[int, set[str]](set)
    for node in graph.nodes:
        for axis, choice in enumerate(node.split):
            if not isinstance(choice, Ring) or choice.blocks > 1 or not dict(node.attrs).get("causal"):
                continue
            if graph.mesh.sizes[axis] == 1:
                continue
            if node.name not in known[axis]:
                queries = next(f.size for f in graph.signature(node).factors if f.name == choice.queries)
                part = Striped(axis, queries // graph.mesh.sizes[axis], _sharded_with(graph, axis, node.name))
                known[axis] |= part.values
                yield part


def in_stripes(graph: Graph, part: Striped) -> Graph | None:
    """Return the graph in which a part's values have so many blocks; None: something cannot lie so.

    That is a parameter or a constant that is stored in parts, or an operator that needs neighbours.
    """
    if any(graph.by_name[name].is_leaf for name in part.values):
        return None
    with suppress(GraphError):
        return replace(graph, nodes=tuple(_in_blocks(graph, node, part) for node in graph.nodes)).validate()
    return None


def _sharded_with(graph: Graph, axis: int, ring: str) -> frozenset[str]:
    """Return the values that are cut together with a ring's: what operators that divide one of them read and give."""
    reached, ahead = set[str](), [ring]
    while ahead:
        name = ahead.pop()
        if name in reached or not graph.types[name].layouts[axis].is_shard:
            continue
        reached.add(name)
        for node in (graph.by_name[name], *(graph.by_name[user] for user in graph.users[name])):
            if not _moves_along(graph, node, axis):
                ahead += (node.name, *node.inputs)
    return frozenset(reached)


def _moves_along(graph: Graph, node: Node, axis: int) -> bool:
    return node.is_parallel and node.op in (PARTITION, COMBINE) and node.attr("axis") == graph.mesh.names[axis]


def _in_blocks(graph: Graph, node: Node, part: Striped) -> Node:
    """Return a node of which each shard among a part's values is one in as many times more blocks."""
    axis, blocks, values = part
    if _moves_along(graph, node, axis):
        attrs = dict(node.attrs)
        more = {"blocks": integer(attrs, "blocks") * blocks} if node.name in values else {}
        return replace(node, attrs=make_attrs(**attrs | more))
    if not node.split or not node.split[axis].factors or values.isdisjoint((node.name, *node.inputs)):
        return node
    return replace(node, split=(*node.split[:axis], node.split[axis].in_blocks(blocks), *node.split[axis + 1 :]))


def _is_certified(graph: Graph, before: Graph, certified: CertifiedSplits) -> bool:
    """Return whether all choices that changed have certificates."""
    for node, old in zip(graph.nodes, before.nodes, strict=True):
        changed = [choice for choice, was in zip(node.split, old.split, strict=True) if choice != was]
        operands = [graph.types[name] for name in node.inputs]
        if changed and not certified(node, operands, changed).issuperset(changed):
            return False
    return True
