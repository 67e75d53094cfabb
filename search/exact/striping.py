"""Causal rings in which a device has every n-th position of the sequence, so that all have the same work (`pcg.ring`).

Layouts were chosen with consecutive positions, at the price of balanced ones. A part of the graph has its blocks
multiplied: what is sharded together with the queries of a ring, up to the moves that cut it from the whole and gather
it again. These moves send what they sent before, so a balanced ring is never slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from shardwright.pcg.attrs import integer
from shardwright.pcg.errors import GraphError
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.parallel import COMBINE, PARTITION
from shardwright.pcg.ring import Ring
from shardwright.search.choices.domain import CertifiedSplits

Stripes = Mapping[int, int]
"""By axis, the number of blocks of the sequence, of each of which a device has one position."""


def balanced(graph: Graph, certified: CertifiedSplits) -> Graph:
    """Return the graph with its causal rings balanced, around each axis where they can be."""
    for axis, blocks in _unbalanced(graph).items():
        found = in_stripes(graph, axis, blocks)
        if found is not None and _is_certified(found, graph, certified):
            graph = found
    return graph


def _unbalanced(graph: Graph) -> Stripes:
    """Return the axes around which the keys of causal attention travel whose queries are neighbours."""
    found = dict[int, int]()
    for node in graph.nodes:
        for axis, choice in enumerate(node.split):
            if isinstance(choice, Ring) and choice.blocks == 1 and dict(node.attrs).get("causal"):
                queries = next(f.size for f in graph.signature(node).factors if f.name == choice.queries)
                found[axis] = queries // graph.mesh.sizes[axis]
    return found


def in_stripes(graph: Graph, axis: int, blocks: int) -> Graph | None:
    """Return the graph in which all rings around an axis have so many blocks; None: something cannot lie so.

    That is a parameter or a constant that is stored in parts, or an operator that needs neighbours.
    """
    rings = [n.name for n in graph.nodes if n.split and isinstance(n.split[axis], Ring)]
    together = _sharded_together(graph, axis, rings)
    if any(graph.by_name[name].is_leaf for name in together):
        return None
    with suppress(GraphError):
        return replace(graph, nodes=tuple(_in_blocks(graph, n, axis, blocks, together) for n in graph.nodes)).validate()
    return None


def _sharded_together(graph: Graph, axis: int, rings: Iterable[str]) -> set[str]:
    """Return the values whose shards on an axis are cut alike: what operators that divide one of them read and give."""
    reached, ahead = set[str](), list(rings)
    while ahead:
        name = ahead.pop()
        if name in reached or not graph.types[name].layouts[axis].is_shard:
            continue
        reached.add(name)
        for node in (graph.by_name[name], *(graph.by_name[user] for user in graph.users[name])):
            if not _moves_along(graph, node, axis):
                ahead += (node.name, *node.inputs)
    return reached


def _moves_along(graph: Graph, node: Node, axis: int) -> bool:
    return node.is_parallel and node.op in (PARTITION, COMBINE) and node.attr("axis") == graph.mesh.names[axis]


def _in_blocks(graph: Graph, node: Node, axis: int, blocks: int, together: set[str]) -> Node:
    """Return a node of which each shard among the values is one in as many times more blocks."""
    if _moves_along(graph, node, axis):
        attrs = dict(node.attrs)
        more = {"blocks": integer(attrs, "blocks") * blocks} if node.name in together else {}
        return replace(node, attrs=make_attrs(**attrs | more))
    if not node.split or not node.split[axis].factors or together.isdisjoint((node.name, *node.inputs)):
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
