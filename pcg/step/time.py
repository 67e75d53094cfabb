"""Microbatches: what of a graph is the same for all of them, and whether it can be run one microbatch after the other.

On a mesh with an axis of time, a step is a loop. What is `R` along time is the same in each round. A value that is
summed along time is known only after the loop, so nothing in the loop may read it: the loss. (What the batch alone
determines, such as the number of its targets, is computed from the whole batch.)
"""

from __future__ import annotations

from collections.abc import Collection

from shardwright.pcg.analysis import is_timeless
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.mesh import TIME
from shardwright.pcg.parallel import COMBINE, REDUCE
from shardwright.pcg.step.late import LOSS, sink_reductions, summand_of_loss


def check_time(graph: Graph) -> None:
    """Raise a `PlanError` that names the operator which keeps a graph from being run in microbatches."""
    if graph.mesh.num_microbatches == 1:
        return
    graph = sink_reductions(graph)
    at_end = {node.name for node in summand_of_loss(graph)[1]} if LOSS in dict(graph.outputs) else set[str]()
    late, passed = set[str](), list[Node]()
    for node in graph.nodes:
        crosses = node.op in (REDUCE, COMBINE) and node.attr("axis") == TIME
        if not crosses and not late.intersection(node.inputs):
            continue
        late.add(node.name)
        if node.name not in at_end and (crosses or _is_linear(node, late)):
            passed.append(node)
        elif node.name not in at_end:
            raise PlanError(_why_not(graph, node))
    if passed:
        raise PlanError(_why_not(graph, passed[-1]))
    if LOSS in dict(graph.outputs) and not any(graph.by_name[name].attr("axis") == TIME for name in at_end):
        many = graph.mesh.num_microbatches
        raise PlanError(
            f"mesh {graph.mesh}: the {many} microbatches would all compute the same, as nothing of the batch is cut "
            f"along {TIME!r}; choose a number of microbatches that divides the batch"
        )


def _is_linear(node: Node, late: Collection[str]) -> bool:
    """Whether it could be done in each microbatch as well, were it not for what comes after it."""
    operands = tuple(i for i, name in enumerate(node.inputs) if name in late)
    return node.is_parallel or (node.row is not None and operands in node.row.linear_in)


def _why_not(graph: Graph, node: Node) -> str:
    """`node` is, or reads, what is known only after the last microbatch."""
    reader = node
    while reader.is_parallel and graph.users[reader.name]:
        reader = graph.by_name[graph.users[reader.name][0]]
    source = reader.source.module and f" at {reader.source}"
    many = graph.mesh.num_microbatches
    kind = "it needs the whole batch (statistics or products of means over it)"
    if reader.op == OPAQUE:
        kind = f"{reader.attr('target')} has no row in the op table, so that it runs on the whole batch"
    elif _ends_in_loss(graph, reader):
        kind = "the loss is not a sum or mean over the batch"
    return (
        f"{reader.op}{source}: the batch cannot be cut into {many} microbatches exactly here: {kind}; plan with "
        "microbatches=1, or change the model so that this operator works on each example by itself"
    )


def _ends_in_loss(graph: Graph, node: Node) -> bool:
    """Whether nothing that is different from microbatch to microbatch reads what a node gives."""
    pending, seen = [node.name], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if not is_timeless(graph, name):
            return False
        pending += graph.users[name]
    return True
