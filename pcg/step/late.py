"""Sums that nobody waits for: the loss is summed over ranks beside the backward, not between forward and backward.

The loss is usually a sum over the batch, reduced, and divided by a count. Division is linear in the sum, so the
reduction may come last: reduce(x) / n = reduce(x / n). Its adjoint does nothing, so the backward starts from the rank's
own summand.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.parallel import REDUCE

LOSS = "loss"


def sink_reductions(graph: Graph) -> Graph:
    """The same graph with the reductions above the loss moved below the linear operators that read them."""
    while (found := _next(graph)) is not None:
        graph = _swap(graph, *found)
    return graph


def summand_of_loss(graph: Graph) -> tuple[str, list[Node]]:
    """The node that the reductions at the very end sum up to the loss, and those reductions."""
    outputs = dict(graph.outputs)
    others = {node for key, node in outputs.items() if key != LOSS}
    name, reader, sums = outputs[LOSS], (), list[Node]()
    while (node := graph.by_name[name]).op == REDUCE and graph.users[name] == reader and name not in others:
        sums.append(node)
        name, reader = node.inputs[0], (name,)
    alone = graph.users[name] == reader and name not in others
    return (name, sums) if alone else (outputs[LOSS], [])


def _next(graph: Graph) -> tuple[Node, str, tuple[int, ...]] | None:
    """A linear operator right above the loss's reductions, the axis, and the operands reduced along it."""
    if LOSS not in dict(graph.outputs):
        return None
    name = dict(graph.outputs)[LOSS]
    while graph.by_name[name].op == REDUCE:
        name = graph.by_name[name].inputs[0]
    node = graph.by_name[name]
    results = [result for _, result in graph.outputs]
    if node.row is None or len(graph.users[name]) + results.count(name) != 1:
        return None
    for operands in node.row.linear_in:
        sums = [graph.by_name[node.inputs[i]] for i in operands]
        rest = [i for k, i in enumerate(node.inputs) if k not in operands]
        axes = {str(s.attr("axis")) for s in sums if s.op == REDUCE}
        alone = all(s.op == REDUCE and graph.users[s.name] == (node.name,) and s.name not in results for s in sums)
        if alone and len(axes) == 1 and not any(graph.types[i].grad for i in rest):
            return node, axes.pop(), operands
    return None


def _swap(graph: Graph, node: Node, axis: str, operands: tuple[int, ...]) -> Graph:
    sums = {node.inputs[i]: graph.by_name[node.inputs[i]].inputs[0] for i in operands}
    index = graph.mesh.index(axis)
    choice = "P" + ",".join(map(str, operands))
    split = (*node.split[:index], choice, *node.split[index + 1 :])
    own = replace(node, name=f"{node.name}.part_{axis}", inputs=tuple(sums.get(i, i) for i in node.inputs), split=split)
    total = Node(node.name, REDUCE, (own.name,), graph.by_name[next(iter(sums))].attrs, (), node.source)
    nodes: list[Node] = []
    for n in graph.nodes:
        if n.name == node.name:
            nodes += [own, total]
        elif n.name not in sums:
            nodes.append(n)
    return replace(graph, nodes=tuple(nodes))
