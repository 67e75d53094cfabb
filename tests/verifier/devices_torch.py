"""A parallel graph run by torch in float64, every device in one process, forward and backward.

Operators run on each device's part by their torch expressions. Backward is written out: an operator's vector-Jacobian
product on each device, and for a parallel operator its adjoint among the devices of its axis, as `pcg.parallel` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.interpret import attrs_by_rank, scatter
from shardwright.pcg.layout import Layout
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.node import make_attrs
from shardwright.pcg.parallel import ADJOINT
from tests.pcg.run_torch import apply

Held = list[Tensor]


def run(graph: Graph, leaves: Mapping[str, Any]) -> dict[str, Held]:
    """What every device holds of every node, as `interpret.run_devices`; `leaves` are logical arrays."""
    values: dict[str, Held] = {}
    for node in graph.nodes:
        if node.is_leaf:
            parts = scatter(leaves[node.name], graph.types[node.name].layouts, graph.mesh)
            values[node.name] = [torch.from_numpy(part.copy()) for part in parts]
        elif node.is_parallel:
            values[node.name] = _exchanged(graph, node.op, node, values[node.inputs[0]])
        else:
            local = _local(graph, node)
            values[node.name] = [
                apply(here, [values[name][rank] for name in node.inputs]) for rank, here in enumerate(local)
            ]
    return values


def gradients(
    graph: Graph, values: Mapping[str, Held], root: str, dy: Held, adjoint: Mapping[str, str] = ADJOINT
) -> dict[str, Held]:
    """The gradient of every node that `root` depends on, from that of `root`, device by device."""
    found: dict[str, Held] = {root: dy}
    for node in reversed(graph.nodes):
        if node.name not in found or node.is_leaf:
            continue
        if node.is_parallel:
            back = _exchanged(graph, adjoint[node.op], node, found[node.name])
            _add(found, node.inputs[0], back)
            continue
        for rank, here in enumerate(_local(graph, node)):
            _local_backward(found, here, rank, values, found[node.name][rank])
    return found


def _local(graph: Graph, node: Node) -> list[Node]:
    return [replace(node, attrs=make_attrs(**attrs)) for attrs in attrs_by_rank(graph, node)]


def _local_backward(found: dict[str, Held], node: Node, rank: int, values: Mapping[str, Held], dy: Tensor) -> None:
    operands = [values[name][rank].detach() for name in node.inputs]
    for x in operands:
        x.requires_grad_(x.is_floating_point())
    with torch.enable_grad():
        result = apply(node, operands)
    wanted = [x for x in operands if x.requires_grad]
    if not wanted or not result.requires_grad:
        return
    slopes = iter(torch.autograd.grad(result, wanted, dy, allow_unused=True))
    for name, x in zip(node.inputs, operands, strict=True):
        slope = next(slopes) if x.requires_grad else None
        held = found.setdefault(name, [torch.zeros_like(v) for v in values[name]])
        if slope is not None:
            held[rank] = held[rank] + slope


def _add(found: dict[str, Held], name: str, slopes: Held) -> None:
    known = found.get(name)
    found[name] = slopes if known is None else [a + b for a, b in zip(known, slopes, strict=True)]


# ---- what devices exchange ----


def _exchanged(graph: Graph, op: str, node: Node, held: Held) -> Held:
    """`op`, along the axis of the node and at the shard that the node makes or removes."""
    axis = graph.mesh.names.index(str(node.attr("axis")))
    shards = [
        x for x in (graph.types[node.name].layouts[axis], graph.types[node.inputs[0]].layouts[axis]) if x.is_shard
    ]
    move = _MOVES[op]
    result = list(held)
    for group in _groups(graph.mesh, axis):
        parts = move([held[rank] for rank in group], shards[0] if shards else Layout("R"))
        for rank, part in zip(group, parts, strict=True):
            result[rank] = part
    return result


def _groups(mesh: Mesh, axis: int) -> list[list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(mesh.coordinates()):
        found.setdefault((*at[:axis], *at[axis + 1 :]), []).append(rank)
    return list(found.values())


def _cut(parts: Held, shard: Layout) -> Held:
    size = len(parts)
    return [
        torch.cat([block.chunk(size, shard.dim)[p] for block in part.chunk(shard.blocks, shard.dim)], shard.dim)
        for p, part in enumerate(parts)
    ]


def _joined(parts: Held, shard: Layout) -> Held:
    blocks = [part.chunk(shard.blocks, shard.dim) for part in parts]
    whole = torch.cat([own[b] for b in range(shard.blocks) for own in blocks], shard.dim)
    return [whole] * len(parts)


_MOVES: Mapping[str, Callable[[Held, Layout], Held]] = {
    "partition": _cut,
    "combine": _joined,
    "replicate": lambda parts, shard: parts,
    "reduce": lambda parts, shard: [sum(parts[1:], parts[0])] * len(parts),
}


def tensors(arrays: Sequence[Any]) -> Held:
    return [torch.from_numpy(array.copy()) for array in arrays]
