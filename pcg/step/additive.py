"""Buffers that add up along microbatches: new = old + a sum over the batch. Counts of tokens per expert are an example.

In each microbatch that sum is the microbatch's own summand, and the buffer is written after each. So its reductions
over time do nothing in the loop, like those of the loss. That is right if only the buffer's new value reads the results
of these reductions, or the buffer itself, which changes from microbatch to microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import R
from shardwright.pcg.mesh import TIME
from shardwright.pcg.parallel import COMBINE, REDUCE
from shardwright.pcg.step.late import LOSS


@dataclass(frozen=True)
class Additive:
    """The names of the buffers, and the nodes from the reductions over time and from the old values to the new ones."""

    buffers: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()


def find_additive(graph: Graph) -> Additive:
    """Return the buffers of a graph that add up along its microbatches; none if there is only one."""
    if graph.mesh.num_microbatches == 1:
        return Additive()
    sums, old = _sums_and_old(graph)
    ways = {key: _way(graph, name, sums | old.keys()) for key, name in graph.outputs if _adds(key, name, sums, old)}
    while True:
        nodes = frozenset[str]().union(*ways.values())
        wrong = [key for key in ways if any(_leaves(graph, key, name, nodes) for name in ways[key])]
        if not wrong:
            return Additive(frozenset(ways), nodes)
        for key in wrong:
            del ways[key]


def own_sums(graph: Graph, estimates: Set[str], is_own: Callable[[str], bool]) -> Graph:
    """Give buffers that add up the microbatch's own sum, also where something else reads its estimate.

    `estimates`: the reductions over time that are estimated. `is_own(name)`: whether a buffer belongs to each
    microbatch in turn, so that it may be read on the way.
    """
    sums, old = _sums_and_old(graph)
    ways = [
        _way(graph, name, sums | old.keys())
        for key, name in graph.outputs
        if _adds(key, name, sums, old) and is_own(key)
    ]
    way, summands, nodes = frozenset[str]().union(*ways), dict[str, str](), list[Node]()
    for node in graph.nodes:
        inputs = tuple(summands.get(name, name) for name in node.inputs)
        if node.name not in way or (inputs == node.inputs and node.name not in estimates):
            nodes.append(node)
        elif node.name in old:
            nodes.append(replace(node, inputs=inputs))
        else:
            summands[node.name] = f"{node.name}.own"
            nodes += [node, replace(node, name=summands[node.name], inputs=inputs)]
    return replace(graph, nodes=_without_unread(nodes, summands.keys(), {name for _, name in graph.outputs}))


def _without_unread(nodes: Sequence[Node], names: Collection[str], read: Set[str]) -> tuple[Node, ...]:
    """Return the nodes without nodes of these names that nothing reads any more."""
    read, left = set(read), list[Node]()
    for node in reversed(nodes):
        if node.name not in names or node.name in read:
            read.update(node.inputs)
            left.append(node)
    return tuple(reversed(left))


def crosses_time(node: Node) -> bool:
    """Return whether a node's value is known only after the last microbatch."""
    return node.op in (REDUCE, COMBINE) and node.attr("axis") == TIME


def _sums_and_old(graph: Graph) -> tuple[set[str], dict[str, str]]:
    """Return the nodes linear in sums over microbatches, and the nodes that are an old buffer value plus such a sum."""
    late, sums, old = set[str](), set[str](), dict[str, str]()
    for node in graph.nodes:
        if node.op == "buffer":
            old[node.name] = str(node.attr("target"))
        elif _keeps(node, sums, old):
            old[node.name] = old[node.inputs[0] if node.inputs[0] in old else node.inputs[1]]
        elif _is_sum(graph, node, late, sums):
            sums.add(node.name)
        if crosses_time(node) or not late.isdisjoint(node.inputs):
            late.add(node.name)
    return sums, old


def _keeps(node: Node, sums: Set[str], old: Mapping[str, str]) -> bool:
    """Return whether a node is a buffer's old value, moved, or with a sum added to it."""
    if node.op in ("add", "sub"):
        one, other = node.inputs
        return (one in old and other in sums) or (node.op == "add" and one in sums and other in old)
    passes = node.op in ("detach", "contiguous") or (node.is_parallel and node.attr("axis") != TIME)
    return passes and node.inputs[0] in old


def _is_sum(graph: Graph, node: Node, late: Collection[str], sums: Set[str]) -> bool:
    if crosses_time(node):
        return node.op == REDUCE
    operands = tuple(i for i, name in enumerate(node.inputs) if name in late)
    if not operands or any(node.inputs[i] not in sums for i in operands):
        return False
    if node.row is None:
        return node.is_parallel and node.attr("axis") != TIME
    kinds, time = [graph.types[name] for name in node.inputs], graph.mesh.index(TIME)
    linear = operands in node.row.partial_sets([kind.dtype for kind in kinds], dict(node.attrs))
    return linear and all(kind.layouts[time] == R for kind in kinds)


def _adds(key: str, name: str, sums: Set[str], old: Mapping[str, str]) -> bool:
    return key != LOSS and old.get(name) == key


def _way(graph: Graph, end: str, among: Set[str]) -> frozenset[str]:
    """Return the nodes that lead to a buffer's new value."""
    pending, nodes = [end], set[str]()
    while pending:
        node = graph.by_name[pending.pop()]
        nodes.add(node.name)
        pending += [name for name in node.inputs if name in among and name not in nodes and not crosses_time(node)]
    return frozenset(nodes)


def _leaves(graph: Graph, key: str, name: str, nodes: Set[str]) -> bool:
    """Return whether anything else reads a node on the way to the new value of a buffer."""
    others = [other for other, result in graph.outputs if result == name and other != key]
    return bool(others) or any(user not in nodes for user in graph.users[name])
