"""Draws that nothing reads, kept in the program: one process makes them too, and draws other numbers after them.

torch drops them. So before it does, a value that is there anyway is made to read them: x becomes `where(c, 0, x)`,
where c compares the drawn numbers with a bound that they cannot be below. Dropout then runs on zeros, so that its
operand is not computed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from shardwright.pcg.node import may_draw


def keep_unread_draws(graph: Graph) -> None:
    """Make values of an exported graph read every unread draw, in the order of the draws.

    A draw that no value can read is dropped.
    """
    nodes = list(graph.nodes)
    live = _live(nodes)
    numbers = [number for number, node in enumerate(nodes) if _draws(node)]
    if all(nodes[number] in live for number in numbers):
        return
    last = 0  # where the last draw is made
    hosts: dict[Node, Node] = {}  # the node that stands now for a value that reads draws already
    for at, end in zip(numbers, [*numbers[1:], len(nodes)], strict=True):
        draw = nodes[at]
        if draw in live or _writes(draw):
            last = at
            continue
        until = next((number for number in numbers if number >= end and nodes[number] in live), len(nodes))
        able = [number for number in range(last, until) if nodes[number] in live and _can_read(nodes[number])]
        host = next((number for number in able if number > at), None)
        in_place = host is not None
        if host is None and _is_free(draw):
            host = next(iter(able), None)
        if host is not None:
            value: Node = nodes[host]
            hosts[value] = _read(graph, draw, hosts.get(value, value), in_place=in_place)
            last = at if in_place else host


def _live(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that outputs need, and the nodes that write to something."""
    live = set[Node]()
    pending = [node for node in nodes if node.op == "output" or _writes(node)]
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending += node.all_input_nodes
    return live


def _draws(node: Node) -> bool:
    """Return whether a node draws. Dropout may be off, also inside of attention and of recurrent layers."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not may_draw(str(node.target)):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    share = "p" if "dropout" in str(node.target) else "dropout"
    drops = given.get("dropout_p", given.get(share, 0.0 if "dropout_p" in names else None))
    return bool(drops != 0) and given.get("train", given.get("training", True)) is not False


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return schema is not None and schema.is_mutable


def _is_dropout(node: Node) -> bool:
    return node.target is torch.ops.aten.dropout.default


def _is_free(node: Node) -> bool:
    """Return whether a draw can be made anywhere."""
    return _is_dropout(node) or not node.all_input_nodes


def _can_read(node: Node) -> bool:
    """Return whether a node is a real tensor of some elements that nothing writes to, and that others read."""
    value = node.meta.get("val")
    if node.op != "call_function" or _writes(node) or not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.dim() > 0 and bool(node.users) and not any(map(_writes, node.users))


def _read(graph: Graph, draw: Node, host: Node, *, in_place: bool) -> Node:
    """Return what the host's readers see from now on: its value, after the draw, in its place or after the host."""
    aten, readers, one = torch.ops.aten, list(host.users), draw
    with graph.inserting_before(draw if in_place else host.next):
        if _is_dropout(draw):
            one = _of_zeros(graph, draw)
        elif not in_place:
            one = graph.node_copy(draw)
    with graph.inserting_before(one.next if not in_place else host.next):
        if not isinstance(draw.meta.get("val"), Tensor):
            one = graph.call_function(operator.getitem, (one, 0))
        one = graph.call_function(aten.amax.default, (graph.call_function(aten.to.dtype, (one, torch.float32)),))
        below = graph.call_function(aten.lt.Scalar, (one, -math.inf))
        zero = graph.call_function(aten.new_zeros.default, (host, []))
        after = graph.call_function(aten.where.self, (below, zero, host))
    after.meta.update({key: host.meta[key] for key in ("val", "nn_module_stack", "stack_trace") if key in host.meta})
    for reader in readers:
        reader.replace_input_with(host, after)
    return after


def _of_zeros(graph: Graph, draw: Node) -> Node:
    """Return a dropout of zeros that draws as much."""
    value, (_, *rest) = draw.meta["val"], draw.args
    kind = {"dtype": value.dtype, "device": value.device}
    zeros = graph.call_function(torch.ops.aten.zeros.default, (list(value.shape),), kind)
    return graph.call_function(torch.ops.aten.dropout.default, (zeros, *rest))
