"""Programs of blocks: the right ones are certified, faults are named, and no mutant that matters gets through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.pcg.collectives.program import NO_PEER, Block, Place, Program, RankProgram
from shardwright.verifier.collectives import events, verify_program
from shardwright.verifier.collectives.verdict import judge_digest
from tests.each import each
from tests.verifier.collectives.mutants import judged, mutants
from tests.verifier.collectives.oracle import blocks_with, fault_of
from tests.verifier.collectives.programs import PROGRAMS, eager_gather, fused_ring_all_reduce, scratch_all_reduce, step


def refused(program: Program) -> str:
    verdict = verify_program(program)
    assert not verdict.is_certified
    assert verdict.refusals
    return str(verdict.refusals[0])


def put(program: Program, rank: int, block: int, index: int, **fields: object) -> Program:
    """Return the program with other fields of a step."""
    one = program.ranks[rank]
    blocks, steps = list(one.blocks), list(one.blocks[block].steps)
    steps[index] = steps[index]._replace(**fields)
    blocks[block] = blocks[block]._replace(steps=tuple(steps))
    ranks = [*program.ranks[:rank], one._replace(blocks=tuple(blocks)), *program.ranks[rank + 1 :]]
    return replace(program, ranks=tuple(ranks))


@each("program", PROGRAMS, ids=lambda one: f"{one.name} {one.kind}")
def test_what_is_right_is_certified(program: Program) -> None:
    certificate = verify_program(program).certificate
    assert certificate is not None
    assert certificate.judge == judge_digest()
    assert program.kind in certificate.claim
    assert len(certificate.subject) == 16


@each("seed", range(4))
def test_no_mutant_that_matters_is_certified(seed: int) -> None:
    harmful = 0
    for mutant in mutants(100, seed):
        truth, verdict = judged(mutant)
        assert verdict if truth else verdict in ("", "form"), (truth, verdict, mutant)
        harmful += bool(truth)
    assert harmful > 50


def test_every_refusal_names_rank_step_and_chunk() -> None:
    for mutant in mutants(300, 5):
        for refusal in verify_program(mutant).refusals:
            assert min(refusal.rank, refusal.step, refusal.chunk) >= 0, refusal


def test_the_least_capacity_is_the_least() -> None:
    found = set[int]()
    for program in [*PROGRAMS, *mutants(150, 9), eager_gather(4)]:
        certificate = verify_program(program).certificate
        if certificate is not None and not (program.in_place and program.out_of_place):
            least = certificate.least_capacity
            assert least is not None
            found.add(least)
            assert not blocks_with(program, max(least, 1))
            assert least < 2 or blocks_with(program, least - 1)
    assert {0, 1, 2, 4} <= found


def test_a_rendezvous_needs_both_at_once() -> None:
    """Two ranks that both send first need room for a message; where one receives first, they do not."""
    both_send = eager_gather(1)
    one, other = both_send.ranks
    block = other.blocks[0]
    turned = other._replace(blocks=(block._replace(steps=block.steps[::-1]),))
    turned_program = replace(both_send, ranks=(one, turned))
    capacities = [c.least_capacity for p in (both_send, turned_program) if (c := verify_program(p).certificate)]
    assert capacities == [1, 0]


def test_an_add_without_its_wait_races() -> None:
    text = refused(put(scratch_all_reduce(), 0, 2, 1, after=None))
    assert text.startswith("race: rank 0, step ")
    assert "scratch[0] of rank 0" in text
    assert "nothing orders them; add a wait" in text


def test_a_circle_of_waits() -> None:
    program = put(put(scratch_all_reduce(), 1, 0, 0, after=(2, 2)), 1, 2, 2, awaited=True)
    text = refused(program)
    assert text.startswith("deadlock: rank 1")
    assert ", which waits for " in text
    assert fault_of(program) == "blocks"


def test_counted_twice() -> None:
    program = scratch_all_reduce()
    one = program.ranks[0]
    adds = one.blocks[2]
    doubled = adds._replace(steps=(*adds.steps, step("re", "s1", "i1")))
    text = refused(replace(program, ranks=(one._replace(blocks=(*one.blocks[:2], doubled)), program.ranks[1])))
    assert text.startswith("counted twice: rank 0")
    assert "counts rank 1 twice in chunk 1" in text


def test_reads_what_is_not_there() -> None:
    program = Program("p", "all_gather", 2, tuple(
        RankProgram(1, 2, 1, (Block(NO_PEER, NO_PEER, 0, (step("cpy", "s0", "o0"),)),)) for _ in range(2)
    ), in_place=False, out_of_place=True)  # fmt: skip
    assert "not there: rank 0, step 0, chunk 0" in refused(program)
    assert "reads scratch[0] of rank 0, which nothing was written to" in refused(program)


def test_ranges_that_overlap() -> None:
    shift = (step("cpy", "s0", "s1", 2),)
    program = Program("p", "all_gather", 2, tuple(
        RankProgram(1, 2, 3, (Block(NO_PEER, NO_PEER, 0, (step("cpy", "i0", "s0"), *shift)),)) for _ in range(2)
    ), in_place=False, out_of_place=True)  # fmt: skip
    assert "reads scratch[1] of rank 0 while it overwrites it; move the ranges apart" in refused(program)


@each(
    ("program", "problem"),
    [
        (put(fused_ring_all_reduce(), 1, 0, 0, op="add"), "expected one of s, r, rcs"),
        (
            put(fused_ring_all_reduce(), 1, 0, 0, source=Place("input", 1)),
            r"within the 1 of the input, got input\[1:2\]",
        ),
        (put(fused_ring_all_reduce(), 1, 0, 0, source=Place("input", -1)), r"got input\[-1:0\]"),
        (put(fused_ring_all_reduce(), 1, 0, 0, after=(4, 0)), "expected a wait for a step of this rank, got block 4"),
        (put(fused_ring_all_reduce(), 1, 0, 0, after=(0, 0)), "expected a wait for another block, got its own"),
        (put(scratch_all_reduce(), 0, 0, 1, awaited=False), "expected block 0, step 1 to say when it has ended"),
        (put(scratch_all_reduce(), 0, 2, 1, op="rrc"), "expected a peer to receive from, got none"),
        (put(scratch_all_reduce(), 0, 2, 1, op="s"), "expected a peer to send to, got none"),
        (put(eager_gather(2), 0, 0, 1, num_chunks=2), "expected 2 chunks, as rank 0, block 0, step 1 .s. sends, got 1"),
        (put(eager_gather(2), 0, 0, 1, num_chunks=1 << 20), "expected a count from 0 to 4096"),
        (
            put(eager_gather(2), 0, 0, 1, op="nop"),
            "as many receives as sends from rank 0 to rank 1 on channel 0, got 1",
        ),
        (replace(eager_gather(2), kind="all_sum"), "expected one of all_gather"),
        (replace(eager_gather(2), num_chunks=3), "expected a multiple of 2 chunks, got 3"),
        (replace(eager_gather(2), in_place=False), "in place or out of place, got neither"),
    ],
)
def test_forms(program: Program, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(refused(program))


def test_the_judge_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_EVENTS", "MOST_ASSIGNMENTS", "MOST_CLOCKS"):
        with monkeypatch.context() as patch:
            patch.setattr(events, name, 3)
            assert "judge a smaller one" in refused(eager_gather(2))


def test_both_modes_are_judged() -> None:
    """All-gather against one buffer is right in place alone."""
    assert refused(replace(eager_gather(1), out_of_place=True)).startswith("not there: rank 0")


def test_what_is_too_large_is_refused_before_it_is_made() -> None:
    empty = RankProgram(1 << 18, 1 << 18, 0, ())
    wide = Program("wide", "all_reduce", 1 << 18, (empty,) * 8, in_place=True, out_of_place=False)
    assert "wide: expected at most 2097152 cells, got 4194304" in refused(wide)
    assert "expected at most 8388608 cells, got 67108864" in refused(
        replace(wide, num_chunks=1 << 20, ranks=(empty,) * 32)
    )
    copies = Block(NO_PEER, NO_PEER, 0, (step("cpy", "i0", "o0", 4096),) * 1025)
    long = replace(wide, num_chunks=4096, ranks=(RankProgram(4096, 4096, 0, (copies,)),))
    assert "wide: expected at most 4194304 chunks of steps, got 4198400" in refused(long)
