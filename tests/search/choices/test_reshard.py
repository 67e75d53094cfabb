"""Resharding paths against a search over states that knows only what single moves are allowed and cost."""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from shardwright.cost.collectives.moves import MoveCosts, TensorClass
from shardwright.pcg.interpret import scatter
from shardwright.pcg.layout import C, Layout, Layouts, P, R, S, innermost, shard_order
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.moves import Move, move_between
from shardwright.pcg.parallel import step
from shardwright.search.choices.reshard import Closure, close, priced_moves, replicated, valid_states
from tests.each import each
from tests.search.graphs import cluster

SIZES = (2, 4)
SHAPE = (16, 24)
PER_AXIS: tuple[tuple[Layout, ...], ...] = (
    (R, C, P, S(0), S(1), S(0, 4), S(0, 8), S(1, 2)),
    (R, C, P, S(0), S(1), S(1, 2)),
)
STATES = valid_states(SHAPE, PER_AXIS, SIZES)
CLASSES = [
    TensorClass(SHAPE, "float32", grad, stored, view, recomputed=stored)
    for grad, stored, view in ((True, False, False), (False, False, False), (True, True, False), (True, False, True))
]


def costs() -> MoveCosts:
    return MoveCosts(cluster(8, link_bytes_per_s=1e8), Mesh(("a", "b"), SIZES))


def steps(state: Layouts, axis: int) -> dict[Layout, tuple[str, ...]]:
    """Where one parallel operator, or two through R, lead from a state along an axis."""
    found: dict[Layout, tuple[str, ...]] = {}
    ends = [x for x in PER_AXIS[axis] if x.is_shard]
    one: dict[str, dict[Layout, tuple[str, ...]]] = {
        "S": {R: ("combine",)}, "P": {R: ("reduce",)},
        "R": {C: ("replicate",), **dict.fromkeys(ends, ("partition",))}, "C": {},
    }  # fmt: skip
    for after, ops in one[state[axis].kind].items():
        found[after] = ops
        if after == R:
            found.update({C: (*ops, "replicate"), **dict.fromkeys(ends, (*ops, "partition"))})
    return found


def moved(state: Layouts, axis: int) -> dict[Layout, tuple[str, ...]]:
    """The steps that are one move: innermost shards alone, from shard to shard with messages of one size."""
    found: dict[Layout, tuple[str, ...]] = {}
    for after, ops in steps(state, axis).items():
        new = (*state[:axis], after, *state[axis + 1 :])
        nested = new in STATES and all(not s[axis].is_shard or innermost(s, axis) for s in (state, new))
        if nested and after != state[axis] and (len(messages(state, new, axis)) == 1 or not after.is_shard):
            found[after] = ops
    return found


@cache
def messages(before: Layouts, after: Layouts, axis: int) -> set[int]:
    """How many elements each device sends to each other one along an axis; all of them where nothing is sharded."""
    mesh = Mesh.of(a=SIZES[0], b=SIZES[1])
    whole = np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    shards = [tuple(x if x.is_shard else R for x in state) for state in (before, after)]
    old, new = (scatter(whole, state, mesh) for state in shards)
    places = list(mesh.coordinates())
    return {
        len(np.intersect1d(old[i], new[j]))
        for (i, one), (j, other) in product(enumerate(places), repeat=2)
        if all(one[a] == other[a] for a in range(2) if a != axis)
    }


def cheapest(tensor: TensorClass, start: Layouts) -> dict[Layouts, float]:
    """Dijkstra's paths. Without a gradient, R and C are one thing."""
    priced, done = costs(), dict[Layouts, float]()
    heap: list[tuple[float, int, Layouts]] = [(0.0, 0, start)]
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done[state] = cost
        for axis, before in enumerate(state):
            edges: dict[Layout, float] = {}
            for after in moved(state, axis):
                if tensor.grad or C not in (before, after):
                    edges[after] = priced.move_s(tensor, state, Move(axis, before, after))
            if not tensor.grad and before in (R, C):
                edges[C if before == R else R] = 0.0
            for after, seconds in edges.items():
                new = (*state[:axis], after, *state[axis + 1 :])
                if seconds < float("inf") and new in STATES:
                    heapq.heappush(heap, (cost + seconds, len(heap) + len(done), new))
    return done


@pytest.fixture(scope="module", params=CLASSES, ids=["grad", "no-grad", "stored", "view"])
def closed(request: pytest.FixtureRequest) -> tuple[TensorClass, Closure]:
    return request.param, close(request.param, STATES, costs())


def test_states_are_the_layouts_that_the_shape_can_have() -> None:
    expected = [s for s in product(*PER_AXIS) if not isinstance(shard_order(SHAPE, s, SIZES), str)]
    assert list(STATES) == expected
    assert (S(0, 4), S(0)) in STATES
    assert (S(1), S(1)) in STATES
    assert valid_states((6, 24), PER_AXIS, SIZES) == tuple(
        s for s in STATES if not any(x.is_shard and x.dim == 0 for x in (s[1],)) and s[0] not in (S(0, 4), S(0, 8))
    )
    assert valid_states((3,), ((R, S(0)),), (2,)) == ((R,),)
    assert replicated(2) == (R, R)


def test_every_cost_is_that_of_the_cheapest_path(closed: tuple[TensorClass, Closure]) -> None:
    tensor, closure = closed
    assert closure.states == STATES
    assert closure.grad == tensor.grad
    for i, start in enumerate(STATES):
        found = cheapest(tensor, start)
        for j, end in enumerate(STATES):
            assert closure.cost[i, j] == pytest.approx(found.get(end, float("inf")), rel=1e-9), f"{start} to {end}"


def test_every_path_leads_there_by_moves_that_cost_what_it_costs(closed: tuple[TensorClass, Closure]) -> None:
    tensor, closure = closed
    priced, plain = costs(), [s for s in STATES if closure.plain(s) == s]
    for start, end in product(plain, repeat=2):
        cost = closure.cost[closure.index[start], closure.index[end]]
        if cost == float("inf"):
            continue
        state, total = start, 0.0
        for move in closure.path(start, end):
            assert state[move.axis] == move.before
            assert moved(state, move.axis)[move.after] == move.kind.operators
            total += priced.move_s(tensor, state, move)
            state = (*state[: move.axis], move.after, *state[move.axis + 1 :])
        assert closure.plain(state) == end, f"{start} to {end}"
        assert total == pytest.approx(cost, rel=1e-9)


@each("tensor", CLASSES)
def test_moves_of_one_kind_cost_what_each_of_them_costs(tensor: TensorClass) -> None:
    """Along time too, and where axes share a dimension."""
    mesh = Mesh((TIME, "a", "b"), (2, *SIZES))
    priced = MoveCosts(cluster(8, link_bytes_per_s=1e8), mesh)
    states = valid_states(SHAPE, ((R, C, P, S(0)), *PER_AXIS), mesh.sizes)
    cost, (pairs, kinds, parts, times) = priced_moves(replace(tensor, shape=()), states, priced.loop, mesh.sizes)
    cost = cost.copy()
    cost[pairs] += (times @ np.array([priced.part_s(part, 16 * 24) for part in parts]))[kinds]
    assert len(times) < len(kinds) / 3
    for i, j in np.argwhere(np.isfinite(cost)):
        (axis, *others) = (a for a, (x, y) in enumerate(zip(states[i], states[j], strict=True)) if x != y or i == j)
        ends = {states[i][axis].kind, states[j][axis].kind}
        if i == j or (not tensor.grad and "C" in ends):
            assert cost[i, j] == 0
            continue
        move = move_between(states[i], states[j], axis, mesh.sizes)
        assert not others
        assert move is not None
        assert cost[i, j] == pytest.approx(priced.move_s(tensor, states[i], move), rel=1e-9)


def test_without_a_gradient_copies_are_replicas() -> None:
    with_grad, without = (close(tensor, STATES, costs()) for tensor in CLASSES[:2])
    state = (C, S(0))
    assert with_grad.plain(state) == state
    assert without.plain(state) == (R, S(0))
    assert without.plain((P, C)) == (P, R)
    free = without.cost[without.index[C, R], without.index[R, C]]
    assert free == 0.0
    assert with_grad.cost[with_grad.index[C, R], with_grad.index[R, R]] == float("inf")


def test_states_that_are_left_out_are_not_passed_through() -> None:
    """From P to a shard there is one move; from one shard to another through neither of them there is one, too."""
    states = ((P,), (S(0),), (S(1),))
    closure = close(CLASSES[0], states, MoveCosts(cluster(2), Mesh.of(a=2)))
    assert [(m.before, m.after) for m in closure.path((P,), (S(1),))] in ([(P, S(1))], [(P, S(0)), (S(0), S(1))])
    assert closure.cost[1, 0] == float("inf")
    assert step("reduce", 0, P).after == R
