"""Schedules become programs: proven again as programs, in place and out of place, with as few waits as steps need."""

from __future__ import annotations

import pytest

from shardwright.pcg.collectives.builders.table import BUILDERS, build
from shardwright.pcg.collectives.collective import Chunk, Collective, collective
from shardwright.pcg.collectives.program import OPS
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.threads import program_of
from shardwright.pcg.errors import ScheduleError
from shardwright.verifier.collectives import verify_program
from tests.each import each


@each("name", BUILDERS)
def test_every_schedule_is_right_as_a_program(name: str) -> None:
    builder = BUILDERS[name]
    for kind in builder.makes:
        for dims in [(4,), (5,), (2, 2), (2, 3)]:
            if builder.sizes.fit(dims):
                schedule = build(name, kind, dims, 2)
                for in_place in (False,) if kind == "all_to_all" else (False, True):
                    for channels in (1, 3):
                        verdict = verify_program(program_of(schedule, in_place=in_place, channels=channels))
                        assert verdict.is_certified, (kind, dims, in_place, channels, verdict.refusals)


def test_neighbouring_chunks_go_together() -> None:
    program = program_of(build("halving-doubling", "all_gather", (8,)), in_place=True)
    counts = [step.num_chunks for block in program.ranks[0].blocks for step in block.steps if OPS[step.op].sends]
    assert sorted(counts) == [1, 2, 4]
    chain = program_of(build("ring", "broadcast", (2,), 100)).ranks[1].blocks
    assert [step.num_chunks for block in chain for step in block.steps] == [1] * 100  # one in each step


def test_steps_wait_for_each_other_only_where_they_share_a_cell() -> None:
    program = program_of(build("ring", "all_gather", (3,)), in_place=True)
    waits = [(block.send, step.after) for block in program.ranks[0].blocks for step in block.steps if step.after]
    assert waits == [(1, (0, 0))]  # the second send forwards what the first receive brought


def test_two_sums_of_a_cell_in_a_step_are_one_after_the_other() -> None:
    whole = collective("reduce", 3, 2)
    both = tuple(Transfer(0, source, 0, chunk, "reduce") for source in (1, 2) for chunk in range(2))
    for in_place in (False, True):
        assert verify_program(program_of(Schedule("s", whole, both), in_place=in_place)).is_certified


@each(
    ("whole", "in_place", "channels", "problem"),
    [
        (collective("all_gather", 2, weights=[1, 2]), False, 1, "expected equal chunks"),
        (collective("all_to_all", 2), True, 1, "expected an all_to_all out of place"),
        (Collective("custom", 2, (Chunk(1, (0,), (1,)),)), False, 1, "got 'custom'"),  # pyright: ignore[reportArgumentType]
        (collective("all_gather", 2), False, 0, "expected at least one channel, got 0"),
    ],
)
def test_what_is_no_program(whole: Collective, in_place: bool, channels: int, problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        program_of(Schedule("s", whole, ()), in_place=in_place, channels=channels)
