"""The cost of changing a tensor's layouts, and the parallel operators that change them.

A *state* is one layout per mesh axis. Single-axis moves have a cost for the value on the way forward and for its
gradient on the way back; their min-plus closure gives the cheapest path between any two states of a tensor.
`pcg/moves.py` has the moves, `cost/collectives/moves.py` their prices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from math import inf, prod

import numpy as np

from shardwright.cost.collectives.moves import Loop, MoveCosts, MovePart, TensorClass
from shardwright.pcg.errors import PlanError
from shardwright.pcg.layout import Layout, Layouts, R, innermost, shard_order
from shardwright.pcg.moves import Move, move_between

_ALIKE_S = 1e-15
"""Paths whose costs differ by no more are alike: the first one found stays."""
_MANY_STATES = 128
"""The number of states from which it saves time to leave out pairs without a path."""


@dataclass(frozen=True)
class Closure:
    """The cheapest paths among the states of one tensor class. `cost[i, j]` is in seconds; `grad` as in the class."""

    states: tuple[Layouts, ...]
    index: dict[Layouts, int]
    cost: np.ndarray
    next_state: np.ndarray
    grad: bool

    def plain(self, state: Layouts) -> Layouts:
        """Return the state with R for C where no gradient flows: there the two are the same."""
        return state if self.grad else tuple(R if x.kind == "C" else x for x in state)

    def path(self, start: Layouts, end: Layouts) -> list[Move]:
        """Return the moves between plain states, through plain states. Raises `PlanError` where no path leads there."""
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
    """Return all combinations of per-axis layouts that a tensor of this shape can have."""
    alone = [
        [x for x in own if not x.is_shard or can_hold(shape, (x,), (size,))]
        for own, size in zip(per_axis, sizes, strict=True)
    ]
    return tuple(s for s in product(*alone) if _are_apart(s) or can_hold(shape, s, sizes))


def _are_apart(state: Layouts) -> bool:
    """Return whether no two axes shard the same dimension."""
    dims = [x.dim for x in state if x.is_shard]
    return len(set(dims)) == len(dims)


def can_hold(shape: tuple[int, ...], state: Layouts, sizes: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape can have these layouts."""
    return not isinstance(shard_order(shape, state, sizes), str)


def close(
    tensor: TensorClass, states: tuple[Layouts, ...], costs: MoveCosts, check: Callable[[], None] = lambda: None
) -> Closure:
    """Return the cheapest paths, by Floyd and Warshall over the single-axis moves.

    `check` is called at each of the states, of which there are thousands on four axes: a search that has to end raises
    there.
    """
    sizes = costs.sizes if any(x.blocks > 1 for state in states for x in state) else None
    cost, (pairs, kinds, parts, times) = priced_moves(replace(tensor, shape=()), states, costs.loop, sizes)
    num_elements = prod(tensor.shape)
    seconds = np.array([costs.part_s(part, num_elements) for part in parts])
    cost = cost.copy()
    cost[pairs] += (times @ seconds)[kinds]
    following = _shortened(cost, check)
    return Closure(states, {state: i for i, state in enumerate(states)}, cost, following, tensor.grad)


def _shortened(cost: np.ndarray, check: Callable[[], None]) -> np.ndarray:
    """Make costs of moves those of the cheapest paths, and return the next state on each path (-1: there is none).

    Most pairs of many states have no path. So only the states before and behind each one are looked at there.
    """
    size = len(cost)
    following = np.where(np.isfinite(cost), np.arange(size), -1)
    costs, nexts = cost.ravel(), following.ravel()  # views
    for k in range(size):
        check()
        into, out = cost[:, k], cost[k]
        if size < _MANY_STATES:
            through = into[:, None] + out
            pairs = np.flatnonzero(through < cost - _ALIKE_S)
            shorter = through.ravel()[pairs]
        else:
            before, behind = np.flatnonzero(into < inf), np.flatnonzero(out < inf)
            places, through = before[:, None] * size + behind, into[before, None] + out[behind]
            is_shorter = through < costs[places] - _ALIKE_S
            pairs, shorter = places[is_shorter], through[is_shorter]
        if len(pairs):
            costs[pairs] = shorter
            nexts[pairs] = following[pairs // size, k]
    return following


_Pairs = tuple[np.ndarray, np.ndarray]


@lru_cache(maxsize=256)
def priced_moves(
    tensor: TensorClass, states: tuple[Layouts, ...], loop: Loop, sizes: tuple[int, ...] | None
) -> tuple[np.ndarray, tuple[_Pairs, np.ndarray, tuple[MovePart, ...], np.ndarray]]:
    """Return the costs of moves between states, for any shape: fixed costs, and the parts that are priced by shape.

    The parts are given by the pairs of states, the kind of each pair's move, the different parts of all moves, and how
    often each kind of move runs each part.
    """
    pairs, numbers, kinds = _neighbours(states, loop.time, sizes)
    fixed, often, known = [inf] * len(kinds), list[tuple[int, int, int]](), dict[MovePart, int]()
    for number, (state, axis, after, move) in enumerate(kinds):
        ends = state[axis].kind, after.kind
        if not tensor.grad and "C" in ends:  # without gradient, C is R
            fixed[number] = 0.0 if "R" in ends else inf
        elif move is not None:
            fixed[number], parts = loop.parts(tensor, state, move)
            often += [(number, known.setdefault(part, len(known)), many) for part, many in parts]
    times = np.zeros((len(kinds), len(known)))
    if often:
        rows, columns, many = zip(*often, strict=True)
        np.add.at(times, (rows, columns), many)
    cost = np.full((len(states), len(states)), inf)
    np.fill_diagonal(cost, 0.0)
    cost[pairs] = np.array(fixed)[numbers]
    return cost, (pairs, numbers, tuple(known), times)


_Kind = tuple[Layouts, int, Layout, Move | None]
"""Moves that cost the same: a state to begin with, the axis, its layout afterwards, and the move if there is one."""


@lru_cache(maxsize=512)
def _neighbours(
    states: tuple[Layouts, ...], time: int | None, sizes: tuple[int, ...] | None
) -> tuple[_Pairs, np.ndarray, tuple[_Kind, ...]]:
    """Return the pairs of states, by number, that differ on one axis; the number of each pair's kind; and the kinds.

    A move's cost depends on the layouts before and after on its axis, on the other axes that shard the tensor, and on
    the layout along `time`. Tensors that are laid out alike have the same kinds, whatever their sizes. `sizes`: of the
    axes; they only matter between shards in several blocks.
    """
    rows, columns, numbers, kinds = list[int](), list[int](), list[int](), list[_Kind]()
    for axis in range(len(states[0])):
        lines = defaultdict[Layouts, list[int]](list)
        for i, state in enumerate(states):
            lines[*state[:axis], *state[axis + 1 :]].append(i)
        names, known, moves = dict[Layout, int](), dict[Hashable, int](), dict[Hashable, Move | None]()
        ends = [(names.setdefault(s[axis], len(names)), not s[axis].is_shard or innermost(s, axis)) for s in states]
        patterns = dict[Hashable, list[int]]()
        for rest, line in lines.items():
            others = tuple([a + (a >= axis) for a, x in enumerate(rest) if x.kind == "S"])
            beside, order = (others, None if time in (None, axis) else states[line[0]][time]), None
            if sizes is not None:  # several shards of one dimension: their order counts
                dims = [states[i][axis].dim for i in line if states[i][axis].is_shard]
                order = rest if len(set(dims)) < len(dims) else None
            pattern = (*[ends[i] for i in line], beside, order)
            if (of_pairs := patterns.get(pattern)) is None:
                of_pairs = patterns[pattern] = []
                for i, j in permutations(line, 2):
                    key = ends[i], ends[j], order
                    if key not in moves:
                        moves[key] = move_between(states[i], states[j], axis, sizes or ())
                    kind = ends[i][0], ends[j][0], beside, moves[key] is None
                    if (number := known.setdefault(kind, len(kinds))) == len(kinds):
                        kinds.append((states[i], axis, states[j][axis], moves[key]))
                    of_pairs.append(number)
            for number, i in enumerate(line):
                rows += [i] * (len(line) - 1)
                columns += line[:number]
                columns += line[number + 1 :]
            numbers += of_pairs
    of = np.intp
    return (np.array(rows, of), np.array(columns, of)), np.array(numbers, of), tuple(kinds)


def replicated(num_axes: int) -> Layouts:
    """Return R on every axis, in which inputs arrive and results leave."""
    return (R,) * num_axes
