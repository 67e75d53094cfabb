"""Microbatches: the part of a graph that is the same for all of them, and whether they can be run one by one.

On a mesh with an axis of time, a step is a loop. A value that is `R` along time is the same in each round. A value that
is summed along time is known only after the loop, so nothing in the loop may read it. Such values are the loss and the
new value of a buffer that adds up along time (`pcg/step/additive.py`). Values that the batch alone determines, such as
the number of its targets, are computed from the whole batch.

If users ask for it, a module's sums over the batch are *estimated* in each microbatch from its own examples, as
n times its own summand. Then each microbatch has statistics of its own, as if it were a batch by itself. A buffer that
adds up takes the summand itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardwright.pcg.analysis import is_timeless
from shardwright.pcg.choice import WHOLE
from shardwright.pcg.errors import PlanError
from shardwright.pcg.foreign import Call, is_foreign
from shardwright.pcg.graph import OPAQUE, Graph, Node, Source, make_attrs
from shardwright.pcg.mesh import TIME
from shardwright.pcg.offers import offered
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import REDUCE
from shardwright.pcg.step.additive import crosses_time, find_additive, own_sums
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.late import LOSS, sink_reductions, sum_of_shares, summand_of_loss
from shardwright.pcg.types import is_float


def as_run(graph: Graph, execution: Execution = DEFAULT) -> Graph:
    """Return the graph that a program is made of: the loss is summed last, and estimates replace sums.

    Raises a `PlanError` as `check_time` does.
    """
    graph = sink_reductions(graph)
    if graph.mesh.num_microbatches == 1:
        return graph
    _check_sunk(graph, execution)
    if sums := {node.name for node in _estimates(graph, execution)}:
        graph = own_sums(graph, sums, lambda buffer: execution.is_per_microbatch(buffer.rpartition(".")[0]))
        nodes = (made for node in graph.nodes for made in (_estimate(graph, node) if node.name in sums else (node,)))
        graph = replace(graph, nodes=tuple(nodes))
    return _mean_of_losses(graph)


def estimated(graph: Graph, execution: Execution) -> list[Node]:
    """Return the operators that take statistics of each microbatch by itself, which changes the step."""
    if graph.mesh.num_microbatches == 1 or not execution.per_microbatch:
        return []
    sunk = sink_reductions(graph)
    return list({n.name: n for sum_ in _estimates(sunk, execution) for n in [_maker(sunk, sum_)]}.values())


def _estimates(graph: Graph, execution: Execution) -> list[Node]:
    """Return the sums over microbatches, within the loop, of modules that have statistics by microbatch."""
    ends = _at_end(graph) | find_additive(graph).nodes
    return [
        node
        for node in graph.nodes
        if node.op == REDUCE and node.attr("axis") == TIME and node.name not in ends
        if execution.is_per_microbatch(_maker(graph, node).source.module)
    ]


def _maker(graph: Graph, node: Node) -> Node:
    while node.is_parallel:
        node = graph.by_name[node.inputs[0]]
    return node


def _estimate(graph: Graph, node: Node) -> tuple[Node, Node, Node]:
    """Return a reduction over microbatches of n times its summand; within the loop, it does nothing itself."""
    start, kind = node.inputs[0], graph.types[node.inputs[0]]
    many = graph.mesh.num_microbatches
    value = float(many) if is_float(kind.dtype) else many
    attrs = make_attrs(shape=(), value=value, dtype=kind.dtype)
    count = Node(f"{node.name}.count", "full", (), attrs, (WHOLE,) * len(graph.mesh), node.source)
    signature, row = ROWS["mul"].signature([kind.shape, ()], {}), ROWS["mul"]
    ways = [list(offered(row, signature, lambda size, x=x: (x.blocks,))) for x in kind.layouts]
    split = tuple(
        next(choice for choice, (first, _), result in offers if first == x == result)
        for offers, x in zip(ways, kind.layouts, strict=True)
    )
    scaled = Node(f"{node.name}.estimate", "mul", (start, count.name), (), split, node.source)
    return count, scaled, replace(node, inputs=(scaled.name,))


def _mean_of_losses(graph: Graph) -> Graph:
    """Replace a loss that each microbatch has by itself by the mean of these losses."""
    outputs = dict(graph.outputs)
    if LOSS not in outputs or any(node.attr("axis") == TIME for node in summand_of_loss(graph)[1]):
        return graph
    shares = sum_of_shares(graph, outputs[LOSS], "loss", Source())
    outputs[LOSS] = shares[-1].name
    return replace(graph, nodes=(*graph.nodes, *shares), outputs=tuple(outputs.items()))


def _at_end(graph: Graph) -> set[str]:
    return {node.name for node in summand_of_loss(graph)[1]} if LOSS in dict(graph.outputs) else set()


def check_time(graph: Graph, execution: Execution = DEFAULT) -> None:
    """Raise a `PlanError` that names the operator which keeps a graph from being run in microbatches.

    Statistics that the execution takes of each microbatch by itself do not keep it from that.
    """
    if graph.mesh.num_microbatches > 1:
        _check_sunk(sink_reductions(graph), execution)


def _check_sunk(graph: Graph, execution: Execution) -> None:
    """Check the same for a graph whose reductions have sunk."""
    at_end = _at_end(graph)
    estimates = {node.name for node in _estimates(graph, execution)}
    adding = find_additive(graph).nodes
    late, passed = set[str](), list[Node]()
    for node in graph.nodes:
        crosses = crosses_time(node)
        if node.name in adding or node.name in estimates or (not crosses and not late.intersection(node.inputs)):
            continue
        late.add(node.name)
        if node.name not in at_end and (crosses or _is_linear(node, late)):
            passed.append(node)
        elif node.name not in at_end:
            raise PlanError(_why_not(graph, node))
    if passed:
        raise PlanError(_why_not(graph, passed[-1]))
    if estimates:
        return
    if LOSS in dict(graph.outputs) and not any(graph.by_name[name].attr("axis") == TIME for name in at_end):
        many = graph.mesh.num_microbatches
        raise PlanError(
            f"mesh {graph.mesh}: the {many} microbatches would all compute the same, as nothing of the batch is cut "
            f"along {TIME!r}; choose a number of microbatches that divides the batch"
        )


def _is_linear(node: Node, late: Collection[str]) -> bool:
    """Return whether a node could run in each microbatch as well, were it not for the nodes after it."""
    operands = tuple(i for i, name in enumerate(node.inputs) if name in late)
    return node.is_parallel or (node.row is not None and operands in node.row.linear_in)


def _why_not(graph: Graph, node: Node) -> str:
    """Return why a node, which is or reads a value known only after the last microbatch, prevents microbatches."""
    reader = node
    while reader.is_parallel and graph.users[reader.name]:
        reader = graph.by_name[graph.users[reader.name][0]]
    source = f" at {reader.source}" if reader.source.module or reader.source.line else ""
    many = graph.mesh.num_microbatches
    kind = "it needs the whole batch (statistics or products of means over it)"
    if is_foreign(reader):
        name = Call.of(reader).name
        kind = f"{name} is foreign, and runs on the whole batch (foreign={{{name!r}: 'batch'}} if it is row by row)"
    elif reader.op == OPAQUE:
        kind = f"{reader.attr('target')} has no row in the op table, so that it runs on the whole batch"
    elif buffers := _only_buffers(graph, reader):
        kind = (
            f"the buffer {buffers[0]!r} reads a sum over the whole batch, which is known after the last microbatch "
            "(the sum may be added to the buffer's old value, if nothing else reads the one or the other)"
        )
    elif _ends_in_loss(graph, reader):
        kind = "the loss is not a sum or mean over the batch"
    elif not _sums(graph, node.name):
        kind = "nothing certifies that it may be split along the batch"
    return (
        f"{reader.op}{source}: the batch cannot be cut into {many} microbatches exactly here: {kind}; plan with "
        "microbatches=1, or change the model so that this operator works on each example by itself"
        + _instead(graph, node)
    )


def _instead(graph: Graph, node: Node) -> str:
    """Return the alternative, in words, where a sum over microbatches is the obstacle."""
    time = graph.mesh.index(TIME)
    while not (node.op == REDUCE and node.attr("axis") == TIME):
        late = [graph.by_name[i] for i in node.inputs if graph.types[i].layouts[time].kind in "RC" and _sums(graph, i)]
        if not late:
            return ""
        node = late[0]
    module = _maker(graph, node).source.module
    where = f"[{module!r}]" if module else "True"
    return f"; per_microbatch={where} takes the statistics of each microbatch by itself, which makes it another step"


def _sums(graph: Graph, name: str) -> bool:
    """Return whether a value is a sum over microbatches, or depends on one."""
    pending, seen = [name], set[str]()
    while pending:
        node = graph.by_name[pending.pop()]
        if node.op == REDUCE and node.attr("axis") == TIME:
            return True
        pending += [i for i in node.inputs if i not in seen]
        seen.update(node.inputs)
    return False


def _only_buffers(graph: Graph, node: Node) -> list[str]:
    """Return the buffers that a node has a part in; none if the loss depends on it too."""
    reached = {node.name}
    for other in graph.nodes:
        if not reached.isdisjoint(other.inputs):
            reached.add(other.name)
    buffers = [key for key, name in graph.outputs if name in reached]
    return [] if LOSS in buffers else buffers


def _ends_in_loss(graph: Graph, node: Node) -> bool:
    """Return whether all nodes that depend on a node are the same for all microbatches."""
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
