"""What it costs to change a tensor's layouts, and by which parallel operators.

A *state* is one layout per mesh axis. Single-axis moves have a cost for the value on the way forward and for its
gradient on the way back; their min-plus closure gives the cheapest path between any two states of a tensor.
`pcg/moves.py` has the moves, `cost/collectives/moves.py` their prices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from math import inf, prod

import numpy as np

from shardwright.cost.collectives.moves import MoveCosts, MovePart, TensorClass
from shardwright.pcg.errors import PlanError
from shardwright.pcg.layout import Layout, Layouts, R, shard_order
from shardwright.pcg.moves import Move, move_between


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
            if k < 0:
                raise PlanError(
                    f"no move leads from ({', '.join(map(str, start))}) to ({', '.join(map(str, end))}), which an "
                    "operator needs: the roles of the axes, the lifetime of weights and microbatches do not go "
                    "together for this model; give other roles, or microbatches=1"
                )
            before, after = self.plain(self.states[i]), self.plain(self.states[k])
            moves += [Move(a, x, y) for a, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]
            i = k
        return moves


def valid_states(
    shape: tuple[int, ...], per_axis: Sequence[Sequence[Layout]], sizes: tuple[int, ...]
) -> tuple[Layouts, ...]:
    """All combinations of per-axis layouts that a tensor of this shape can have."""
    return tuple(s for s in product(*per_axis) if can_hold(shape, s, sizes))


def can_hold(shape: tuple[int, ...], state: Layouts, sizes: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be laid out so."""
    return not isinstance(shard_order(shape, state, sizes), str)


def close(tensor: TensorClass, states: tuple[Layouts, ...], costs: MoveCosts) -> Closure:
    """Floyd and Warshall over the single-axis moves."""
    cost, (pairs, parts, times) = _priced(replace(tensor, shape=()), states, costs)
    num_elements = prod(tensor.shape)
    seconds = np.array([costs.part_s(part, num_elements) for part in parts])
    cost = cost.copy()
    cost[pairs] += times @ seconds
    following = np.where(np.isfinite(cost), np.arange(len(states))[None, :], -1)
    for k in range(len(states)):
        through = cost[:, k, None] + cost[None, k, :]
        better = through < cost - 1e-15
        cost = np.where(better, through, cost)
        following = np.where(better, following[:, k, None], following)
    return Closure(states, {state: i for i, state in enumerate(states)}, cost, following, tensor.grad)


@lru_cache(maxsize=256)
def _priced(
    tensor: TensorClass, states: tuple[Layouts, ...], costs: MoveCosts
) -> tuple[np.ndarray, tuple[tuple[np.ndarray, np.ndarray], tuple[MovePart, ...], np.ndarray]]:
    """What moves between states cost whatever the shape: costs that are fixed, and what is added for each pair.

    The latter are pairs of states, the different parts of their moves, and how often each pair runs each part.
    """
    cost = np.full((len(states), len(states)), inf)
    np.fill_diagonal(cost, 0.0)
    rows, known = dict[tuple[int, int], dict[int, int]](), dict[MovePart, int]()
    for i, j, axis, move in _neighbours(states, costs.sizes):
        kinds = {states[i][axis].kind, states[j][axis].kind}
        if not tensor.grad and "C" in kinds:  # the same as R
            cost[i, j] = 0.0 if "R" in kinds else inf
        elif move is not None:
            cost[i, j], parts = costs.parts(tensor, states[i], move)
            row = rows.setdefault((i, j), {})
            for part in parts:
                number = known.setdefault(part._replace(times=1), len(known))
                row[number] = row.get(number, 0) + part.times
    times = np.zeros((len(rows), len(known)))
    for at, row in enumerate(rows.values()):
        times[at, list(row)] = list(row.values())
    pairs = np.array(list(rows), dtype=np.intp).reshape(-1, 2).T
    return cost, ((pairs[0], pairs[1]), tuple(known), times)


@lru_cache(maxsize=32)
def _neighbours(states: tuple[Layouts, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, int, int, Move | None], ...]:
    """The pairs of states, by their numbers, that differ on one axis, which that is, and the move if there is one.

    Tensors of all sizes that are laid out alike have the same.
    """
    found = list[tuple[int, int, int, Move | None]]()
    for axis in range(len(states[0])):
        lines = defaultdict[Layouts, list[int]](list)
        for i, state in enumerate(states):
            lines[*state[:axis], *state[axis + 1 :]].append(i)
        pairs = (pair for line in lines.values() for pair in permutations(line, 2))
        found += [(i, j, axis, move_between(states[i], states[j], axis, sizes)) for i, j in pairs]
    return tuple(found)


def replicated(num_axes: int) -> Layouts:
    """R on every axis: how inputs arrive and results leave."""
    return (R,) * num_axes
