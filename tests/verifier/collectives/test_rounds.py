"""Schedules: what is refused and why, links within their rates, and mutants against a run with numbers."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest

from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Resource, Topology, joined
from shardwright.verifier.collectives import verify_schedule
from tests.each import each

MODULUS = (1 << 61) - 1
RING = Topology("ring", 4, tuple(joined((r, (r + 1) % 4, 10, 0.0) for r in range(4))))
BASES = [
    build(name, kind, (n,))
    for name, kind, n in [
        ("ring", "all_gather", 4), ("ring", "all_reduce", 3), ("ring", "reduce_scatter", 4), ("bruck", "all_to_all", 3),
        ("doubling", "all_reduce", 4), ("double-tree", "all_reduce", 5), ("tree", "reduce", 5), ("tree", "gather", 4),
    ]
]  # fmt: skip


def test_nothing_is_moved_by_one_rank() -> None:
    alone = Schedule("alone", collective("all_reduce", 1), ())
    assert verify_schedule(alone, Topology("one", 1, ())).is_certified


def refusal(schedule: Schedule, topology: Topology | None = None) -> str:
    verdict = verify_schedule(schedule, topology)
    assert not verdict.is_certified
    return str(verdict.refusals[0])


def is_right(schedule: Schedule, seed: int = 0) -> bool:
    """Run the schedule with random numbers; two writes of a cell in a step, one of them a copy, are wrong."""
    chance, whole = random.Random(seed), schedule.collective
    given = {index: chance.randrange(MODULUS) for index in range(len(whole.chunks))}
    memory = {
        (rank, index): chance.randrange(MODULUS) if whole.reduces else given[index]
        for index, chunk in enumerate(whole.chunks)
        for rank in chunk.sources
    }
    due = {
        (rank, index): sum(memory[source, index] for source in (chunk.sources if whole.reduces else chunk.sources[:1]))
        for index, chunk in enumerate(whole.chunks)
        for rank in chunk.targets
    }
    for step in schedule.steps:
        arriving = defaultdict[tuple[int, int], list[tuple[str, int]]](list)
        for t in step:
            if (t.src, t.chunk) not in memory:
                return False
            arriving[t.dst, t.chunk].append((t.op, memory[t.src, t.chunk]))
        for cell, values in arriving.items():
            ops = {op for op, _ in values}
            if (len(values) > 1 and "copy" in ops) or ("reduce" in ops and cell not in memory):
                return False
            base = memory[cell] if "reduce" in ops else 0
            memory[cell] = base + sum(value for _, value in values)
    return all((memory.get(cell, -1) - value) % MODULUS == 0 for cell, value in due.items())


def mutate(chance: random.Random, schedule: Schedule) -> Schedule | None:
    transfers = list(schedule.transfers)
    index = chance.randrange(len(transfers))
    one = transfers[index]
    field = chance.choice(["step", "src", "dst", "chunk", "op", "drop", "twice"])
    if field == "drop":
        del transfers[index]
    elif field == "twice":
        transfers.append(one)
    elif field == "op":
        transfers[index] = one._replace(op="copy" if one.op == "reduce" else "reduce")
    else:
        size = {"step": schedule.num_steps, "chunk": len(schedule.collective.chunks)}.get(field, schedule.num_ranks)
        transfers[index] = one._replace(**{field: chance.randrange(size)})
    try:
        return Schedule("mutant", schedule.collective, tuple(transfers))
    except Exception:  # noqa: BLE001 - no schedule at all
        return None


@each("base", BASES, ids=lambda one: one.name)
def test_mutants_are_certified_if_and_only_if_they_are_right(base: Schedule) -> None:
    chance, wrong = random.Random(1), 0
    assert verify_schedule(base).is_certified
    for _ in range(60):
        mutant = mutate(chance, base)
        if mutant is not None:
            verdict = verify_schedule(mutant)
            assert verdict.is_certified == is_right(mutant), mutant
            wrong += not verdict.is_certified
            assert all(min(r.rank, r.step, r.chunk) >= 0 for r in verdict.refusals)
    assert wrong >= 10


def test_sent_before_it_is_there() -> None:
    broadcast = Schedule("b", collective("broadcast", 3), (Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 0)))
    assert refusal(broadcast) == (
        "not there: rank 1, step 0, chunk 0: chunk 0, rank 1 to rank 2, step 0: rank 1 does not have it yet; "
        "send it after it has arrived"
    )


def test_incomplete() -> None:
    whole = Schedule("g", collective("gather", 3), (Transfer(0, 1, 0, 1),))
    assert "incomplete: rank 0, step 0, chunk 2: expected chunk 2 of rank 2, got nothing" in refusal(whole)


def test_added_twice_and_said_where() -> None:
    ring = build("ring", "all_reduce", (2,))
    again = Transfer(1, 0, 1, 1, "reduce")
    mutant = Schedule("r", ring.collective, (*(t for t in ring.transfers if t.step == 0), again))
    found = [str(one) for one in verify_schedule(mutant).refusals]
    assert any(text.startswith("counted twice: rank 1, step 1, chunk 1: expected chunk 1 of ranks 0, 1, got chunk 1, "
                               "rank 0 to rank 1, step 1, counts rank 0 twice") for text in found)  # fmt: skip


def test_two_copies_to_a_cell_race() -> None:
    doubled = Schedule("b", collective("all_gather", 3), (Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 0),
                       Transfer(1, 0, 1, 0), Transfer(1, 2, 1, 0)))  # fmt: skip
    assert refusal(doubled).startswith("race: rank 1, step 1, chunk 0")


def test_what_nobody_needs_may_be_anything() -> None:
    """A rank that no target is may add things up wrongly."""
    whole = collective("reduce", 2)
    extra = (Transfer(0, 1, 0, 0, "reduce"), Transfer(1, 0, 1, 0, "reduce"))
    assert verify_schedule(Schedule("r", whole, extra)).is_certified


def test_paths_and_rounds() -> None:
    ring = build("ring", "all_gather", (4,))
    assert verify_schedule(replace(ring, rounds=(1, 1, 1)), RING).is_certified
    assert "no link from 0 to 2" in refusal(build("direct", "all_gather", (4,)), RING)
    assert "expected a topology of 3 ranks, got 4" in refusal(build("ring", "all_gather", (3,)), RING)
    short = build("short-ring", "all_gather", (4,), 2)
    assert verify_schedule(replace(short, rounds=(2, 2)), RING).is_certified
    text = refusal(replace(short, rounds=(1, 2)), RING)
    assert text.startswith("rate: rank 0, step 0, chunk 0: expected links to be busy for at most 1 rounds, got 2")


def test_shared_resources_count() -> None:
    nic = Resource("nic", Fraction(10), frozenset((r, (r + 1) % 4) for r in range(4)))
    shared = replace(RING, resources=(nic,))
    ring = build("ring", "all_gather", (4,))
    assert not verify_schedule(replace(ring, rounds=(1, 1, 1)), shared).is_certified
    assert verify_schedule(replace(ring, rounds=(4, 4, 4)), shared).is_certified


@pytest.mark.parametrize("weights", [[3, 1, 0, 2]])
def test_uneven_chunks(weights: list[int]) -> None:
    whole = collective("all_gather", 4, weights=weights)
    ring = build("ring", "all_gather", (4,))
    uneven = Schedule("uneven", whole, tuple(t for t in ring.transfers if weights[t.chunk]))
    assert verify_schedule(uneven, RING).is_certified
    assert uneven.seconds_per_byte(RING) == (Fraction(1, 20),) * 3
