"""What it costs to change a tensor's layouts, and by which parallel operators.

A *state* is one layout per mesh axis. Single-axis moves have a cost for the value on the way forward and for its
gradient on the way back; their min-plus closure gives the cheapest path between any two states of a tensor. The moves
are the four parallel operators and the compositions that the lowering runs as one collective:

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

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shardwright.cost.cluster import Cluster
from shardwright.cost.communication import Communication
from shardwright.pcg.layout import Layout, Layouts, R, innermost, shard_order
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


@dataclass(frozen=True)
class Closure:
    """The cheapest paths among the states of one tensor class. `cost[i, j]` is in seconds; `grad` as in the class."""

    states: tuple[Layouts, ...]
    index: dict[Layouts, int]
    cost: np.ndarray
    next_state: np.ndarray
    grad: bool

    def plain(self, state: Layouts) -> Layouts:
        """The state with R for C where no gradient flows: there the two are the same thing."""
        return state if self.grad else tuple(R if x.kind == "C" else x for x in state)

    def path(self, start: Layouts, end: Layouts) -> list[Move]:
        """The moves between plain states, which lead through plain states."""
        i, j = self.index[start], self.index[end]
        moves: list[Move] = []
        while i != j:
            k = int(self.next_state[i, j])
            before, after = self.plain(self.states[i]), self.plain(self.states[k])
            moves += [Move(a, x, y) for a, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]
            i = k
        return moves


def valid_states(
    shape: tuple[int, ...], per_axis: Sequence[Sequence[Layout]], sizes: tuple[int, ...]
) -> tuple[Layouts, ...]:
    """All combinations of per-axis layouts that a tensor of this shape can have."""
    states: list[Layouts] = [()]
    for choices in per_axis:
        states = [(*s, x) for s in states for x in choices]
    return tuple(s for s in states if not isinstance(shard_order(shape, s, sizes), str))


def _allowed(state: Layouts, after: Layouts, axis: int) -> bool:
    return (not state[axis].is_shard or innermost(state, axis)) and (not after[axis].is_shard or innermost(after, axis))


def close(tensor: TensorClass, states: tuple[Layouts, ...], costs: MoveCosts) -> Closure:
    """Floyd and Warshall over the single-axis moves."""
    index = {state: i for i, state in enumerate(states)}
    cost = np.full((len(states), len(states)), INFINITY)
    np.fill_diagonal(cost, 0.0)
    for i, state in enumerate(states):
        for axis, before in enumerate(state):
            for j, after_state in _neighbours(state, axis, states, index):
                after = after_state[axis]
                if not tensor.grad and {before.kind, after.kind} == {"R", "C"}:
                    cost[i, j] = 0.0
                elif (before.kind, after.kind) in MOVES and _allowed(state, after_state, axis):
                    cost[i, j] = costs.move_s(tensor, state, Move(axis, before, after))
    following = np.where(np.isfinite(cost), np.arange(len(states))[None, :], -1)
    for k in range(len(states)):
        through = cost[:, k, None] + cost[None, k, :]
        better = through < cost - 1e-15
        cost = np.where(better, through, cost)
        following = np.where(better, following[:, k, None], following)
    return Closure(states, index, cost, following, tensor.grad)


def _neighbours(
    state: Layouts, axis: int, states: tuple[Layouts, ...], index: dict[Layouts, int]
) -> list[tuple[int, Layouts]]:
    layouts = {s[axis] for s in states} - {state[axis]}
    candidates = ((*state[:axis], x, *state[axis + 1 :]) for x in layouts)
    return [(index[c], c) for c in candidates if c in index]


def replicated(num_axes: int) -> Layouts:
    """R on every axis: how inputs arrive and results leave."""
    return (R,) * num_axes
