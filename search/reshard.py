"""What it costs to change a tensor's layouts, and by which parallel operators.

A *state* is one layout per mesh axis. Single-axis moves have a cost for the value on the way forward and for its
gradient on the way back; their min-plus closure gives the cheapest path between any two states of a tensor.
`cost/collectives/moves.py` has the moves and their prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost.collectives.moves import INFINITY, MOVES, Move, MoveCosts, TensorClass
from shardwright.pcg.layout import Layout, Layouts, R, innermost, shard_order


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
