"""Single-axis moves between layouts, as the lowering runs them, and their price.

before   after     operators                 forward          backward
R        S(d)      partition                 slice            all-gather
S(d)     R         combine                   all-gather       slice
R        C         replicate                 nothing          all-reduce
P        R         reduce                    all-reduce       nothing
P        S(d)      reduce, partition         reduce-scatter   all-gather
S(d)     C         combine, replicate        all-gather       reduce-scatter
P        C         reduce, replicate         all-reduce       all-reduce
S(d)     S(e)      combine, partition        all-to-all       all-to-all
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.communication import Communication
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layout, Layouts
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE, REPLICATE
from shardwright.pcg.types import ITEM_BYTES

INFINITY = float("inf")
MOVES: dict[tuple[str, str], tuple[tuple[str, ...], str, str]] = {
    ("R", "S"): ((PARTITION,), "slice", "all_gather"),
    ("S", "R"): ((COMBINE,), "all_gather", "slice"),
    ("R", "C"): ((REPLICATE,), "", "all_reduce"),
    ("P", "R"): ((REDUCE,), "all_reduce", ""),
    ("P", "S"): ((REDUCE, PARTITION), "reduce_scatter", "all_gather"),
    ("S", "C"): ((COMBINE, REPLICATE), "all_gather", "reduce_scatter"),
    ("P", "C"): ((REDUCE, REPLICATE), "all_reduce", "all_reduce"),
    ("S", "S"): ((COMBINE, PARTITION), "all_to_all", "all_to_all"),
}
"""Kinds of layout before and after -> parallel operators, and the collectives of forward and backward."""


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors that move alike: shape, dtype, whether a gradient flows, what it has to do with a parameter.

    A `stored` parameter is gathered for each use and again in backward; the gathered weight is not kept. A `view` of
    one is not gathered itself: the parameter is, before the view is taken.
    """

    shape: tuple[int, ...]
    dtype: str
    grad: bool
    stored: bool = False
    view: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """One single-axis move of a path."""

    axis: int
    before: Layout
    after: Layout

    @property
    def operators(self) -> tuple[str, ...]:
        return MOVES[self.before.kind, self.after.kind][0]

    def collectives(self) -> tuple[str, str]:
        """The collectives of the forward and of the backward pass ("" or "slice" where there is none)."""
        return MOVES[self.before.kind, self.after.kind][1:]


def is_move(move: Move) -> bool:
    """Whether a change of layout along one axis is a single move."""
    return (move.before.kind, move.after.kind) in MOVES


class MoveCosts:
    """Prices single-axis moves on one mesh of one cluster."""

    def __init__(self, cluster: Cluster, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.communication = Communication(cluster, sizes)
        self.device = cluster.device
        self._times: dict[tuple[str, int, float], float] = {}

    def collective_s(self, name: str, axis: int, num_bytes: float) -> float:
        """Seconds of one collective over tensors of `num_bytes` per group, or of a local slice of them."""
        if not name:
            return 0.0
        key = (name, axis, num_bytes)
        if key not in self._times:
            if name == "slice":
                cost = 2 * num_bytes / self.sizes[axis] / self.device.memory_bytes_per_s + self.device.op_overhead_s
            else:
                cost = float(getattr(self.communication, f"{name}_s")(axis, num_bytes)) + self.device.op_overhead_s
            if name == "reduce_scatter":  # the lowering takes the faster way
                cost = min(
                    cost, self.collective_s("all_reduce", axis, num_bytes) + self.collective_s("slice", axis, num_bytes)
                )
            self._times[key] = cost
        return self._times[key]

    def move_s(self, tensor: TensorClass, state: Layouts, move: Move) -> float:
        """Seconds of one move of a tensor in `state`, both ways. ZeRO gathers a stored parameter again in backward."""
        others = prod(self.sizes[a] for a, x in enumerate(state) if x.is_shard and a != move.axis)
        num_bytes = prod(tensor.shape) * ITEM_BYTES[tensor.dtype] / others
        forward, backward = move.collectives()
        if tensor.view and forward in ("all_gather", "all_to_all"):
            return INFINITY
        cost = self.collective_s(forward, move.axis, num_bytes)
        if tensor.grad:
            cost += self.collective_s(backward, move.axis, num_bytes)
            if tensor.stored and forward == "all_gather":
                cost += self.collective_s(forward, move.axis, num_bytes)
        return cost


def fused_moves(graph: Graph) -> Iterable[tuple[Node, str, Move]]:
    """The moves of a parallel graph as the lowering runs them: (last node, tensor before, move).

    Two steps on one axis are one move where nobody else reads the value between them.
    """
    kinds, absorbed = graph.types, set[str]()
    for node in reversed(graph.nodes):
        if not node.is_parallel or node.name in absorbed:
            continue
        axis = graph.mesh.index(str(node.attr("axis")))
        before = graph.by_name[node.inputs[0]]
        start = before.name
        if before.is_parallel and before.attr("axis") == node.attr("axis") and len(graph.users[before.name]) == 1:
            candidate = Move(axis, kinds[before.inputs[0]].layouts[axis], kinds[node.name].layouts[axis])
            if is_move(candidate) and candidate.before != candidate.after:
                start = before.inputs[0]
                absorbed.add(before.name)
        yield node, start, Move(axis, kinds[start].layouts[axis], kinds[node.name].layouts[axis])
