"""Schedules: steps, loads, times, and what is refused when one is made."""

from fractions import Fraction

import pytest

from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer, all_reduce_of, in_sequence, together
from shardwright.pcg.collectives.topology import Topology, joined
from shardwright.pcg.errors import ShardwrightError
from tests.each import each

RING = Topology("ring", 3, tuple(joined([(0, 1, 10, 1e-6), (1, 2, 10, 1e-6), (0, 2, 20, 3e-6)])))
GATHER = Schedule(
    "ring",
    collective("all_gather", 3),
    tuple(Transfer(s, r, (r + 1) % 3, (r - s) % 3) for s in (0, 1) for r in range(3)),
)


def test_steps_and_loads() -> None:
    assert [len(step) for step in GATHER.steps] == [3, 3]
    assert GATHER.shares(RING, 0) == {(0, 1): Fraction(1, 3), (1, 2): Fraction(1, 3), (2, 0): Fraction(1, 3)}
    assert GATHER.seconds_per_byte(RING) == (Fraction(1, 30), Fraction(1, 30))
    assert GATHER.time_s(RING, 30) == pytest.approx(2 * 3e-6 + 2.0)


def test_backwards_and_forwards_again() -> None:
    scatter = GATHER.reversed()
    assert scatter.collective == collective("reduce_scatter", 3)
    assert {t.op for t in scatter.transfers} == {"reduce"}
    assert scatter.steps[0][0] == Transfer(0, 0, 2, 1, "reduce")
    assert scatter.reversed().transfers == GATHER.transfers


def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce() -> None:
    whole = all_reduce_of(GATHER.reversed())
    assert whole.collective == collective("all_reduce", 3, 3)
    assert whole.num_steps == 4
    with pytest.raises(ShardwrightError, match="expected a reduce_scatter and an all_gather of the same chunks"):
        all_reduce_of(GATHER)


def test_parts_in_sequence_and_together() -> None:
    one, other = [Transfer(0, 0, 1, 0), Transfer(1, 1, 2, 0)], [Transfer(0, 2, 1, 0)]
    assert [t.step for t in in_sequence(one, [], other)] == [0, 1, 2]
    assert [t.step for t in together(one, other)] == [0, 1, 0]


@each(
    ("transfer", "problem"),
    [
        (Transfer(0, 0, 3, 0), "chunk 0, rank 0 to rank 3, step 0: expected two ranks from 0 to 2, got 0 and 3"),
        (Transfer(0, 1, 1, 0), "expected two ranks from 0 to 2, got 1 and 1"),
        (Transfer(0, -1, 1, 0), "got -1 and 1"),
        (Transfer(0, 0, 1, 3), "expected a chunk from 0 to 2, got 3"),
        (Transfer(3, 0, 1, 0), "expected steps from 0 without gaps, got none in step 2"),
        (Transfer(-1, 0, 1, 0), "expected steps from 0 without gaps"),
        (Transfer(1, 0, 1, 0, "reduce"), "expected copies alone in a all_gather"),
    ],
)
def test_what_is_no_schedule(transfer: Transfer, problem: str) -> None:
    with pytest.raises(ShardwrightError, match=problem):
        Schedule("s", GATHER.collective, (*GATHER.transfers, transfer))


def test_rounds_are_one_number_for_each_step() -> None:
    for rounds in ((1,), (1, 0)):
        with pytest.raises(ShardwrightError, match="rounds: expected 2 numbers of at least 1"):
            Schedule("s", GATHER.collective, GATHER.transfers, rounds)
