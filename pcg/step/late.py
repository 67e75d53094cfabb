"""Sums that nobody waits for: the loss is summed over ranks during the backward, not between forward and backward.

The loss is usually a sum over the batch, reduced, and divided by a count. Division is linear in the sum, so the
reduction may come last: reduce(x) / n = reduce(x / n). Its adjoint does nothing, so the backward starts from the rank's
own summand.

A term that is the same for all microbatches, like a penalty on the weights, is added to a sum over them as n shares of
1/n: reduce(x) + t = reduce(x + share(t)), share(t) = partition(expand(t, n)) / n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.pcg.attrs import Attr
from shardwright.pcg.choice import WHOLE, Choices, Partial, Split
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node, Source, make_attrs
from shardwright.pcg.layout import P, R
from shardwright.pcg.mesh import TIME
from shardwright.pcg.parallel import PARTITION, REDUCE

LOSS = "loss"


def sink_reductions(graph: Graph) -> Graph:
    """Return the graph with the reductions above the loss, or its terms, moved below the linear operators there."""
    while (sunk := _next(graph)) is not None:
        graph = sunk.typed_beside(graph)
    return graph


def summand_of_loss(graph: Graph) -> tuple[str, list[Node]]:
    """Return the node that the reductions at the very end sum up to the loss, and those reductions."""
    others = {node for key, node in graph.outputs if key != LOSS}
    name, reader, sums = graph.loss, (), list[Node]()
    while (node := graph.by_name[name]).op == REDUCE and graph.users[name] == reader and name not in others:
        sums.append(node)
        name, reader = node.inputs[0], (name,)
    alone = graph.users[name] == reader and name not in others
    return (name, sums) if alone else (graph.loss, [])


def sums_of_loss(graph: Graph) -> dict[str, str]:
    """Return the axis of ranks along which each reduction at the very end sums the loss, by node."""
    sums = summand_of_loss(graph)[1] if LOSS in dict(graph.outputs) else []
    return {node.name: axis for node in sums if (axis := str(node.attr("axis"))) != TIME}


def check_backward(graph: Graph) -> None:
    """Raise a `PlanError` if the loss depends on no trained parameter, because there is no backward then."""
    if not graph.types[graph.loss].grad:
        raise PlanError(
            f"%{graph.loss}, the loss, depends on no parameter that is trained, so that a step has no backward; check "
            "requires_grad, detach() and torch.no_grad() in the model, or call it for its loss alone"
        )


def _next(graph: Graph) -> Graph | None:
    """Return the graph with one reduction moved below a linear operator, or with the way for one cleared; else None.

    The operator is the last one of the loss, or computes one of the numbers that the loss is made of.
    """
    results = [result for _, result in graph.outputs]
    pending = [name for key, name in graph.outputs if key == LOSS]
    shared: Graph | None = None  # only where no other step is left; the innermost, as outer terms depend on it
    while pending:
        name = pending.pop()
        while graph.by_name[name].op == REDUCE:
            name = graph.by_name[name].inputs[0]
        node = graph.by_name[name]
        if node.row is None or len(graph.users[name]) + results.count(name) != 1:
            continue
        for operands in node.row.linear_in:
            if (axis := _summed(graph, node, operands, results)) is not None:
                return _swap(graph, node, axis, operands)
            shared = _with_shares(graph, node, operands, results) or shared
        pending += [i for i in node.inputs if graph.types[i].num_elements == 1]
    return shared


def _summed(graph: Graph, node: Node, operands: tuple[int, ...], results: Sequence[str]) -> str | None:
    """Return the axis along which these operands are summed for this node alone, if its others get no gradient."""
    sums = [graph.by_name[node.inputs[i]] for i in operands]
    rest = [i for k, i in enumerate(node.inputs) if k not in operands]
    axes = {str(s.attr("axis")) for s in sums if s.op == REDUCE}
    alone = all(s.op == REDUCE and graph.users[s.name] == (node.name,) and s.name not in results for s in sums)
    return axes.pop() if alone and len(axes) == 1 and not any(graph.types[i].grad for i in rest) else None


def _with_shares(graph: Graph, node: Node, operands: tuple[int, ...], results: Sequence[str]) -> Graph | None:
    """Return the graph with all operands summed over microbatches last, if one is; None where that cannot be."""
    if graph.mesh.num_microbatches == 1 or len(operands) < 2:
        return None
    chains = {name: _chain(graph, name, results) for name in dict.fromkeys(node.inputs[i] for i in operands)}
    timed = {name: [n for n in chain if n.attr("axis") == TIME] for name, chain in chains.items()}
    whole = all(timed[name] or _is_whole(graph, name) for name in timed)
    if not whole or not any(timed.values()):
        return None
    for name, sums in timed.items():
        if not sums:
            return _shared(graph, node, name)
        if sums[0] is not chains[name][0]:
            return _outermost(graph, chains[name], sums[0])
    return None


def _chain(graph: Graph, name: str, results: Sequence[str]) -> list[Node]:
    """Return the reductions that end here, the last first, as far as nothing else reads them."""
    chain = list[Node]()
    while (node := graph.by_name[name]).op == REDUCE and len(graph.users[name]) == 1 and name not in results:
        chain.append(node)
        name = node.inputs[0]
    return chain


def _is_whole(graph: Graph, name: str) -> bool:
    time, *others = graph.types[name].layouts
    return time == R and all(layout in (R, P) for layout in others)


def _outermost(graph: Graph, chain: Sequence[Node], last: Node) -> Graph:
    """Exchange reductions along different axes, which commute: names stay, and axes move up."""
    moved = [last, *(node for node in chain if node is not last)]
    attrs = {node.name: other.attrs for node, other in zip(chain, moved, strict=True)}
    nodes = (replace(n, attrs=attrs[n.name]) if n.name in attrs else n for n in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _shared(graph: Graph, node: Node, name: str) -> Graph:
    """Replace an operand that is the same for all microbatches by the sum of their shares."""
    shares = sum_of_shares(graph, name, node.name, node.source)
    reader = replace(node, inputs=tuple(shares[-1].name if i == name else i for i in node.inputs))
    at = graph.nodes.index(node)
    return replace(graph, nodes=(*graph.nodes[:at], *shares, reader, *graph.nodes[at + 1 :]))


def sum_of_shares(graph: Graph, name: str, prefix: str, source: Source) -> tuple[Node, ...]:
    """Return nodes, of which the last is the sum over n microbatches of a whole value divided by n."""
    mesh, kind = graph.mesh, graph.types[name]
    many, others = mesh.num_microbatches, tuple(Partial((0,)) if layout == P else WHOLE for layout in kind.layouts[1:])

    def of(suffix: str, op: str, inputs: tuple[str, ...], split: Choices = (), **attrs: Attr) -> Node:
        return Node(f"{prefix}.{suffix}_{name}", op, inputs, make_attrs(**attrs), split, source)

    times = of("times", "expand", (name,), (WHOLE, *others), shape=(many, *kind.shape))
    local = of("own", PARTITION, (times.name,), axis=TIME, dim=0, blocks=1)
    summand = of("summand", "sum", (local.name,), (Split("d0"), *others), dims=(0,), keepdim=False)
    part = of("part", "full", (), (WHOLE,) * len(mesh), shape=(), value=1.0 / many, dtype=kind.dtype)
    share = of("share", "mul", (summand.name, part.name), (Partial((0,)), *others))
    return times, local, summand, part, share, of("total", REDUCE, (share.name,), axis=TIME)


def _swap(graph: Graph, node: Node, axis: str, operands: tuple[int, ...]) -> Graph:
    sums = {node.inputs[i]: graph.by_name[node.inputs[i]].inputs[0] for i in operands}
    index = graph.mesh.index(axis)
    split = (*node.split[:index], Partial(operands), *node.split[index + 1 :])
    partial = replace(
        node, name=f"{node.name}.part_{axis}", inputs=tuple(sums.get(i, i) for i in node.inputs), split=split
    )
    total = Node(node.name, REDUCE, (partial.name,), graph.by_name[next(iter(sums))].attrs, (), node.source)
    nodes: list[Node] = []
    for n in graph.nodes:
        if n.name == node.name:
            nodes += [partial, total]
        elif n.name not in sums:
            nodes.append(n)
    return replace(graph, nodes=tuple(nodes))
