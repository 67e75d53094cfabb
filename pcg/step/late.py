"""Sums that nobody waits for: the loss is summed over ranks beside the backward, not between forward and backward.

The loss is usually a sum over the batch, reduced, and divided by a count. Division is linear in the sum, so the
reduction may come last: reduce(x) / n = reduce(x / n). Its adjoint does nothing, so the backward starts from the rank's
own summand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.parallel import REDUCE

LOSS = "loss"


def sink_reductions(graph: Graph) -> Graph:
    """The same graph with the reductions above the loss, or its terms, moved below the linear operators there."""
    while (found := _next(graph)) is not None:
        graph = _swap(graph, *found)
    return graph


def summand_of_loss(graph: Graph) -> tuple[str, list[Node]]:
    """The node that the reductions at the very end sum up to the loss, and those reductions."""
    others = {node for key, node in graph.outputs if key != LOSS}
    name, reader, sums = graph.loss, (), list[Node]()
    while (node := graph.by_name[name]).op == REDUCE and graph.users[name] == reader and name not in others:
        sums.append(node)
        name, reader = node.inputs[0], (name,)
    alone = graph.users[name] == reader and name not in others
    return (name, sums) if alone else (graph.loss, [])


def check_backward(graph: Graph) -> None:
    """Raise a `PlanError` where no parameter that is trained reaches the loss: there is no backward then."""
    if not graph.types[graph.loss].grad:
        raise PlanError(
            f"%{graph.loss}, the loss, depends on no parameter that is trained, so that a step has no backward; check "
            "requires_grad, detach() and torch.no_grad() in the model, or call it for its loss alone"
        )


def _next(graph: Graph) -> tuple[Node, str, tuple[int, ...]] | None:
    """A linear operator right below reductions, the axis, and the operands reduced along it.

    It is the last one of the loss, or gives it one of the numbers that it is made of.
    """
    results = [result for _, result in graph.outputs]
    pending = [name for key, name in graph.outputs if key == LOSS]
    while pending:
        name = pending.pop()
        while graph.by_name[name].op == REDUCE:
            name = graph.by_name[name].inputs[0]
        node = graph.by_name[name]
        if node.row is None or len(graph.users[name]) + results.count(name) != 1:
            continue
        for operands in node.row.linear_in:
            if (axis := _summed(graph, node, operands, results)) is not None:
                return node, axis, operands
        pending += [i for i in node.inputs if graph.types[i].num_elements == 1]
    return None


def _summed(graph: Graph, node: Node, operands: tuple[int, ...], results: Sequence[str]) -> str | None:
    """The axis along which these operands are summed for this node alone, if its others get no gradient."""
    sums = [graph.by_name[node.inputs[i]] for i in operands]
    rest = [i for k, i in enumerate(node.inputs) if k not in operands]
    axes = {str(s.attr("axis")) for s in sums if s.op == REDUCE}
    alone = all(s.op == REDUCE and graph.users[s.name] == (node.name,) and s.name not in results for s in sums)
    return axes.pop() if alone and len(axes) == 1 and not any(graph.types[i].grad for i in rest) else None


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
