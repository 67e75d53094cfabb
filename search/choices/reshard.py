"""The cost of changing a tensor's layouts, and the parallel operators that change them.

A *state* is one layout per mesh axis. Single-axis moves have a cost for the value on the way forward and for its
gradient on the way back; their min-plus closure gives the cheapest path between any two states of a tensor.
`pcg/moves.py` has the moves, `cost/collectives/moves.py` their prices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from math import inf, prod
from typing import NamedTuple

import numpy as np

from shardwright.cost.collectives.moves import Loop, MoveCosts, MovePart, TensorClass
from shardwright.pcg.errors import PlanError
from shardwright.pcg.layout import Layout, Layouts, R, S, shard_order
from shardwright.pcg.moves import MOVES, Move, move_between

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
    own, known = _terms_of(tensor, loop), dict[MovePart, int]()
    terms = [own[kind] for kind in kinds]
    often = [(n, known.setdefault(part, len(known)), many) for n, (_, of) in enumerate(terms) for part, many in of]
    times = np.zeros((len(kinds), len(known)))
    if often:
        rows, columns, many = zip(*often, strict=True)
        np.add.at(times, (rows, columns), many)
    cost = np.full((len(states), len(states)), inf)
    np.fill_diagonal(cost, 0.0)
    cost[pairs] = np.array([fixed_s for fixed_s, _ in terms], float)[numbers]
    return cost, (pairs, numbers, tuple(known), times)


class _Kind(NamedTuple):
    """Moves that cost the same: a state to begin with, the axis, its layout afterwards, and the move if there is one.

    Of the other axes, the state only says which shard the tensor, and what the layout along time is.
    """

    state: Layouts
    axis: int
    after: Layout
    move: Move | None


class _Terms(dict[_Kind, tuple[float, list[tuple[MovePart, int]]]]):
    """The terms of moves of a class of tensors, each made once: fixed seconds, and parts with how often they run."""

    def __init__(self, tensor: TensorClass, loop: Loop) -> None:
        super().__init__()
        self.tensor, self.loop = tensor, loop

    def __missing__(self, kind: _Kind) -> tuple[float, list[tuple[MovePart, int]]]:
        state, axis, after, move = kind
        ends = state[axis].kind, after.kind
        if not self.tensor.grad and "C" in ends:  # without gradient, C is R
            found = (0.0 if "R" in ends else inf), list[tuple[MovePart, int]]()
        else:
            found = (inf, []) if move is None else self.loop.parts(self.tensor, state, move)
        return self.setdefault(kind, found)


@lru_cache(maxsize=256)
def _terms_of(tensor: TensorClass, loop: Loop) -> _Terms:
    return _Terms(tensor, loop)


@lru_cache(maxsize=512)
def _neighbours(
    states: tuple[Layouts, ...], time: int | None, sizes: tuple[int, ...] | None
) -> tuple[_Pairs, np.ndarray, tuple[_Kind, ...]]:
    """Return the pairs of states, by number, that a move may lead between; the number of each one's kind; the kinds.

    A move's cost depends on the layouts before and after on its axis, on the other axes that shard the tensor, and on
    the layout along `time`. Tensors that are laid out alike have the same kinds, whatever their sizes. `sizes`: of the
    axes; they only matter between shards in several blocks.
    """
    table = _Table(states)
    rows, columns, numbers, kinds = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[_Kind]()
    for axis in range(len(states[0])):
        starts, ends, ways = table.pairs(axis, sizes)
        beside = table.beside(axis, time)[starts]
        _, firsts, own = np.unique(beside * (1 + ways.max(initial=0)) + ways, return_index=True, return_inverse=True)
        numbers.append(own + len(kinds))
        rows.append(starts)
        columns.append(ends)
        for start, end in zip(starts[firsts].tolist(), ends[firsts].tolist(), strict=True):
            move = move_between(states[start], states[end], axis, sizes or ())
            kinds.append(_Kind(_but_for_dims(states[start], axis, time), axis, states[end][axis], move))
    pairs = np.concatenate(rows), np.concatenate(columns)
    return pairs, np.concatenate(numbers), tuple(kinds)


class _Table:
    """States as arrays.

    Attributes:
        layouts: those that occur, by axis.
        of: by axis and state, the number of the layout among them.
        dims: by axis and state, the dimension that the axis shards; -1: none.
        free: by axis and state, whether the axis can move: it shards nothing, or is `innermost`.
    """

    def __init__(self, states: tuple[Layouts, ...]) -> None:
        self.states = states
        self.layouts = [list(dict.fromkeys(column)) for column in zip(*states, strict=True)]
        numbers = [{x: n for n, x in enumerate(own)} for own in self.layouts]
        self.of = np.array([[numbers[a][x] for a, x in enumerate(state)] for state in states], np.intp).T
        self.dims = self._by_state([[x.dim if x.is_shard else -1 for x in own] for own in self.layouts])
        blocks = self._by_state([[x.blocks for x in own] for own in self.layouts])
        self.free = np.ones(self.dims.shape, bool)
        for a, b in permutations(range(len(self.layouts)), 2):
            is_inside = blocks[b] >= blocks[a] if b > a else blocks[b] > blocks[a]
            self.free[a] &= (self.dims[a] < 0) | (self.dims[a] != self.dims[b]) | ~is_inside

    def _by_state(self, facts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return facts of layouts, by axis and state."""
        return np.array([np.array(own)[numbers] for own, numbers in zip(facts, self.of, strict=True)])

    def pairs(self, axis: int, sizes: tuple[int, ...] | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the states before and after each move along an axis, and the number of its layouts there.

        C may be R. `sizes`: as in `_neighbours`.
        """
        grid = np.full([len(own) for own in self.layouts], -1, np.intp)
        grid[tuple(self.of)] = np.arange(len(self.states))
        lines = np.moveaxis(grid, axis, -1).reshape(-1, len(self.layouts[axis]))
        ends = permutations(enumerate(self.layouts[axis]), 2)
        ways = [(i, j) for (i, x), (j, y) in ends if (x.kind, y.kind) in MOVES or (x.kind, y.kind) == ("C", "R")]
        before, after = (
            (lines[:, list(own)].ravel() for own in zip(*ways, strict=True)) if ways else (lines[:0, 0],) * 2
        )
        free = self.free[axis]
        there = np.flatnonzero((before >= 0) & (after >= 0) & free[before] & free[after])
        if sizes is not None:  # what other axes leave decides whether a shard goes to other blocks of its dimension
            dims = self.dims[axis]
            same = np.flatnonzero((dims[before[there]] >= 0) & (dims[before[there]] == dims[after[there]]))
            ends_of = zip(before[there[same]].tolist(), after[there[same]].tolist(), strict=True)
            moves = (move_between(self.states[i], self.states[j], axis, sizes) for i, j in ends_of)
            there = np.delete(there, same[[move is None for move in moves]])
        return before[there], after[there], there % max(1, len(ways))

    def beside(self, axis: int, time: int | None) -> np.ndarray:
        """Return, by state, a number for the other axes that shard the tensor, and the layout along `time`."""
        found = np.zeros(len(self.states), np.intp)
        for a, dims in enumerate(self.dims):
            found = 2 * found + (dims >= 0) * (a != axis)
        return found if time in (None, axis) else found * len(self.layouts[time]) + self.of[time]


def _but_for_dims(state: Layouts, axis: int, time: int | None) -> Layouts:
    """Return a state without what a move along an axis does not depend on: which dimensions other axes shard."""
    return tuple([x if a in (axis, time) else S(0) if x.is_shard else R for a, x in enumerate(state)])


def replicated(num_axes: int) -> Layouts:
    """Return R on every axis, in which inputs arrive and results leave."""
    return (R,) * num_axes
