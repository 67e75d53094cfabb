"""Kernel fusion by torch.compile: pointwise operators with the pointwise operators and reductions that read them.

A value that is read only inside its kernel stays in registers: it is not read from memory, nor written to it unless
backward keeps it. Backward is taken to fuse as forward does: its gradients stay where the values do. Views end a chain
here, though a compiler sees through some, and so do operators whose readers are in different kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from shardwright.cost.compute.work import Passes, Work
from shardwright.pcg.analysis import computed_once, saved_by
from shardwright.pcg.graph import Graph, Node


class Fusion(NamedTuple):
    """A node's place in its kernel.

    inside     operands, by position, that the same kernel makes
    absorbed   the result is read in the same kernel only: there is no launch for this node
    unwritten  absorbed, and backward does not keep the result
    """

    inside: tuple[int, ...] = ()
    absorbed: bool = False
    unwritten: bool = False


UNFUSED = Fusion()


def fusions(graph: Graph) -> Mapping[str, Fusion]:
    """Return the nodes that are fused with others."""
    once = computed_once(graph)
    nodes = [node for node in graph.nodes if node.name not in once]
    pointwise = {node.name for node in nodes if _fuses(graph, node, reduces=False)}
    joining = pointwise | {node.name for node in nodes if _fuses(graph, node, reduces=True)}
    results = {name for _, name in graph.outputs}
    absorbed = {
        name for name in pointwise
        if name not in results and graph.users[name] and all(user in joining for user in graph.users[name])
    }  # fmt: skip
    fused: dict[str, Fusion] = {}
    for node in nodes:
        inside = tuple(i for i, name in enumerate(node.inputs) if name in absorbed) if node.name in joining else ()
        if inside or node.name in absorbed:
            is_stored = _is_kept(graph, node)
            fused[node.name] = Fusion(inside, node.name in absorbed, node.name in absorbed and not is_stored)
    return fused


def _fuses(graph: Graph, node: Node, *, reduces: bool) -> bool:
    """Return whether a node works on each element alone; with `reduces`, whether it is a sum or a normalization."""
    row = node.row
    if row is None or row.contraction or row.view or row.lookup or not node.inputs:
        return False
    alone = all(factor.role == "map" for factor in graph.signature(node).factors)
    return alone != reduces


def _is_kept(graph: Graph, node: Node) -> bool:
    """Return whether the backward of the node or of a reader keeps its result."""
    if not graph.types[node.name].grad:
        return False

    def saved(of: Node) -> tuple[int | str, ...]:
        return saved_by(of, [graph.types[name].grad for name in of.inputs])

    readers = [graph.by_name[user] for user in graph.users[node.name]]
    positions = ((reader, i) for reader in readers for i, name in enumerate(reader.inputs) if name == node.name)
    return "result" in saved(node) or any(i in saved(reader) for reader, i in positions)


def fuse(kernels: Passes, fusion: Fusion, operands_bytes: tuple[float, ...], result_bytes: float) -> Passes:
    """Return a node's kernels without the traffic that stays in registers; bytes are those of one device's parts."""
    inside = sum(operands_bytes[i] for i in fusion.inside)
    forward = _less(kernels.forward, inside + (result_bytes if fusion.unwritten else 0.0))
    gradients = result_bytes * len(kernels.backward) if fusion.absorbed else 0.0
    return replace(kernels, forward=forward, backward=_less(kernels.backward, inside + gradients))


def _less(works: tuple[Work, ...], saved: float) -> tuple[Work, ...]:
    total = sum(work.num_bytes for work in works)
    share = max(0.0, 1 - saved / total) if total else 1.0
    return tuple(replace(work, num_bytes=work.num_bytes * share) for work in works)
