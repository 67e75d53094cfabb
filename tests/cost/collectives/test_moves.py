"""Prices of moves: the collectives of both ways, of what the other axes leave of the tensor."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from shardwright.cost.clusters.cluster import Collective
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.collectives.moves import AFTER_THE_LOOP_S, MoveCosts, TensorClass
from shardwright.pcg.layout import C, Layout, Layouts, P, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import Move
from shardwright.pcg.step.lifetimes import ZEROS
from tests.each import each
from tests.search.graphs import cluster

COLLECTIVES: dict[str, Collective] = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
}
SIZES = (2, 8)
CLUSTER = cluster(16, link_bytes_per_s=3e8, latency_s=5e-6)
TENSOR = TensorClass((64, 48), "bfloat16", grad=True)
NUM_BYTES = 64 * 48 * 2
COSTS = MoveCosts(CLUSTER, Mesh(("a", "b"), SIZES))
MOVES: list[tuple[Layout, Layout, str, str]] = [
    (R, S(0), "slice", "all_gather"),
    (S(0), R, "all_gather", "slice"),
    (R, C, "", "all_reduce"),
    (P, R, "all_reduce", ""),
    (P, S(0), "reduce_scatter", "all_gather"),
    (S(0), C, "all_gather", "reduce_scatter"),
    (P, C, "all_reduce", "all_reduce"),
    (S(0), S(1), "all_to_all", "all_to_all"),
]


def seconds(name: str, axis: int, num_bytes: float) -> float:
    """One collective, and what starts it; a slice reads and writes one part of the tensor."""
    device = CLUSTER.device
    if not name:
        return 0.0
    if name == "slice":
        return 2 * num_bytes / SIZES[axis] / device.memory_bytes_per_s + device.op_overhead_s
    return float(Communication(CLUSTER, SIZES).time_s(COLLECTIVES[name], axis, num_bytes)) + device.op_overhead_s


@each(("before", "after", "forward", "backward"), MOVES)
def test_a_move_is_priced_as_its_collectives(before: Layout, after: Layout, forward: str, backward: str) -> None:
    for axis, other in product(range(2), (R, C, P, S(1))):
        if other == S(1) and S(1) in (before, after):
            continue
        state: Layouts = (before, other) if axis == 0 else (other, before)
        num_bytes = NUM_BYTES / (SIZES[1 - axis] if other.is_shard else 1)
        move = Move(axis, before, after)
        to, back = (seconds(name, axis, num_bytes) for name in (forward, backward))
        gathered_s = to if forward == "all_gather" else 0.0
        stored_s = inf if forward == "all_to_all" else to + back + gathered_s
        view_s = inf if before.is_shard else to + back * (1 + ((before, after) == (R, C)))  # the parameter is copied
        assert COSTS.move_s(TENSOR, state, move) == pytest.approx(to + back, rel=1e-12)
        assert COSTS.move_s(replace(TENSOR, grad=False), state, move) == pytest.approx(to, rel=1e-12)
        assert COSTS.move_s(replace(TENSOR, stored=True, recomputed=True), state, move) == pytest.approx(
            stored_s, rel=1e-12
        )
        assert COSTS.move_s(replace(TENSOR, view=True), state, move) == pytest.approx(view_s, rel=1e-12)
        assert COSTS.move_s(TensorClass((64, 48), "bfloat16", True), state, move) == pytest.approx(to + back)


def run_by(costs: MoveCosts, tensor: TensorClass, state: Layouts, move: Move) -> tuple[str, ...]:
    """All collectives of a move in a step."""
    return tuple(name for name, _, times, _ in costs.loop.sent(tensor, state, move, 1.0) for _ in range(times))


@each(("before", "after", "forward", "backward"), MOVES)
def test_what_a_move_runs(before: Layout, after: Layout, forward: str, backward: str) -> None:
    move = Move(0, before, after)
    again = (forward,) if forward == "all_gather" else ()
    state = (before, R)
    stored = replace(TENSOR, stored=True)
    assert run_by(COSTS, TENSOR, state, move) == (forward, backward)
    assert run_by(COSTS, stored, state, move) == (forward, backward)
    assert run_by(COSTS, replace(stored, recomputed=True), state, move) == (forward, *again, backward)
    assert run_by(COSTS, replace(stored, grad=False), state, move) == (forward,)
    assert run_by(COSTS, replace(stored, grad=False, recomputed=True), state, move) == (forward, *again)


@each(("before", "after", "forward", "backward"), MOVES)
def test_what_differs_from_microbatch_to_microbatch_moves_in_each(
    before: Layout, after: Layout, forward: str, backward: str
) -> None:
    costs, move = MoveCosts(CLUSTER, Mesh(("mb", "a", "b"), (4, *SIZES))), Move(1, before, after)
    again = (forward,) if forward == "all_gather" else ()
    stored = replace(TENSOR, stored=True, recomputed=True)
    assert run_by(costs, TENSOR, (R, before, R), move) == (forward,) * 4 + (backward,) * 4
    assert run_by(costs, stored, (R, before, R), move) == (forward, backward)  # kept for all of a step
    counted = {zero: Counter(run_by(costs, replace(stored, zero=zero), (C, before, R), move)) for zero in ZEROS}
    assert counted["zero-3"] == Counter((forward, *again, backward) * 4)
    assert counted["kept"] == Counter((forward, backward) * 4)
    assert counted["zero-2"] == Counter((forward,) * (1 if again else 4) + (backward,) * 4)
    made_again = run_by(costs, replace(TENSOR, twice=True), (C, before, R), move)
    assert Counter(made_again) == Counter((forward, forward, backward) * 4)
    for zero, time in product(ZEROS, (C, R)):
        priced = costs.move_s(replace(stored, zero=zero), (time, before, R), move)
        possible = forward != "all_to_all" and (not again or zero != "zero-1" or time == R)
        assert (priced < inf) == possible
        if again and zero != "zero-1" and time == R:
            often = costs.move_s(replace(stored, zero=zero), (C, before, R), move)
            assert priced == 8 * often
    at_once = COSTS.move_s(TENSOR, (before, R), replace(move, axis=0))
    late = replace(TENSOR, late=True)
    assert costs.move_s(late, (R, before, R), move) == at_once
    for tensor, time in ((TENSOR, R), (TENSOR, C), (late, C)):  # what is the same for all microbatches, too
        assert costs.move_s(tensor, (time, before, R), move) == pytest.approx(4 * at_once)


def test_moves_along_time_are_free_or_impossible() -> None:
    costs = MoveCosts(CLUSTER, Mesh(("mb", "a", "b"), (4, *SIZES)))
    for before, after, _, _ in MOVES:
        free = (before.kind, after.kind) in {("R", "S"), ("R", "C"), ("P", "R")}
        assert costs.move_s(TENSOR, (before, R, R), Move(0, before, after)) == (0 if free else AFTER_THE_LOOP_S)


def test_prices_are_kept_by_collective_axis_and_bytes() -> None:
    """One object answers for all: what it knows of one is not what it says of another."""
    costs = MoveCosts(CLUSTER, Mesh(("a", "b"), SIZES))
    names = ("slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "")
    for _ in range(2):
        for name, axis, num_bytes in product(names, range(2), (1e3, 1e6, 1e9)):
            assert costs.collective_s(name, axis, num_bytes) == pytest.approx(seconds(name, axis, num_bytes))
