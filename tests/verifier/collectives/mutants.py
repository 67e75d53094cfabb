"""Small faults in programs, one at a time, and whether the judge notices those that matter.

`make mutants-collectives` judges 3,000 of them and prints a table; it ends with an error if one that
changes the result, races or can block was let through.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from shardwright.pcg.collectives.program import BUFFERS, NO_PEER, OPS, Place, Program, RankProgram, Step
from shardwright.verifier.collectives import verify_program
from tests.verifier.collectives.oracle import fault_of
from tests.verifier.collectives.programs import PROGRAMS

Chance = random.Random
Entry = TypeVar("Entry")
StepFault = Callable[[Chance, RankProgram, Step], Step]


def other_op(chance: Chance, one: RankProgram, step: Step) -> Step:
    return step._replace(op=chance.choice([op for op in OPS if op != step.op]))


def moved(end: str) -> StepFault:
    def fault(chance: Chance, one: RankProgram, step: Step) -> Step:
        place: Place = getattr(step, end)
        return step._replace(**{end: place._replace(offset=place.offset + chance.choice([-1, 1]))})

    return fault


def other_buffer(end: str) -> StepFault:
    def fault(chance: Chance, one: RankProgram, step: Step) -> Step:
        place: Place = getattr(step, end)
        return step._replace(**{end: place._replace(buffer=chance.choice([b for b in BUFFERS if b != place.buffer]))})

    return fault


def other_count(chance: Chance, one: RankProgram, step: Step) -> Step:
    return step._replace(num_chunks=step.num_chunks + chance.choice([-1, 1]))


def no_wait(chance: Chance, one: RankProgram, step: Step) -> Step:
    return step._replace(after=None)


def other_wait(chance: Chance, one: RankProgram, step: Step) -> Step:
    block = chance.randrange(len(one.blocks))
    steps = one.blocks[block].steps
    return step._replace(after=(block, chance.randrange(len(steps)) if steps else 0))


def not_awaited(chance: Chance, one: RankProgram, step: Step) -> Step:
    return step._replace(awaited=not step.awaited)


STEP_FAULTS: list[StepFault] = [
    other_op, moved("source"), moved("destination"), other_buffer("source"), other_buffer("destination"), other_count,
    no_wait, no_wait, no_wait, other_wait, other_wait, not_awaited,
]  # fmt: skip


def dropped(chance: Chance, steps: list[Step]) -> None:
    del steps[chance.randrange(len(steps))]


def doubled(chance: Chance, steps: list[Step]) -> None:
    index = chance.randrange(len(steps))
    steps.insert(index, steps[index])


def swapped(chance: Chance, steps: list[Step]) -> None:
    if len(steps) > 1:
        index = chance.randrange(len(steps) - 1)
        steps[index], steps[index + 1] = steps[index + 1], steps[index]


def mutate(chance: Chance, program: Program) -> Program:
    """Put one fault into a program; waits are numbers, so that steps that move may leave them behind."""
    rank = chance.randrange(program.num_ranks)
    one = program.ranks[rank]
    index = chance.randrange(len(one.blocks))
    block, kind = one.blocks[index], chance.random()
    steps = list(block.steps)
    if kind < 0.6 and steps:
        at = chance.randrange(len(steps))
        steps[at] = chance.choice(STEP_FAULTS)(chance, one, steps[at])
    elif kind < 0.85 and steps:
        chance.choice([dropped, doubled, swapped])(chance, steps)
    elif kind < 0.95:
        ends = {"send": block.send, "receive": block.receive, "channel": block.channel}
        end = chance.choice(list(ends))
        block = block._replace(**{end: chance.randrange(NO_PEER, program.num_ranks)})
    else:
        return replace(
            program, ranks=_put(program.ranks, rank, one._replace(scratch_chunks=max(0, one.scratch_chunks - 1)))
        )
    changed = one._replace(blocks=_put(one.blocks, index, block._replace(steps=tuple(steps))))
    return replace(program, ranks=_put(program.ranks, rank, changed))


def _put(entries: tuple[Entry, ...], index: int, entry: Entry) -> tuple[Entry, ...]:
    return (*entries[:index], entry, *entries[index + 1 :])


def mutants(number: int, seed: int = 0) -> Iterator[Program]:
    """Yield different mutants of all programs in turn, each in one of its modes."""
    chance, seen, base = random.Random(seed), set[int](), 0
    while len(seen) < number:
        program = PROGRAMS[base % len(PROGRAMS)]
        base += 1
        if program.in_place and program.out_of_place:
            program = replace(program, **{chance.choice(["in_place", "out_of_place"]): False})
        mutant = mutate(chance, program)
        if mutant != program and hash(repr(mutant)) not in seen:
            seen.add(hash(repr(mutant)))
            yield mutant


def judged(mutant: Program) -> tuple[str, str]:
    """What the oracle says is wrong, and what the judge says; "" where nothing is."""
    verdict = verify_program(mutant)
    return fault_of(mutant), "" if verdict.is_certified else verdict.refusals[0].fault


def main(number: int) -> int:
    table, missed = Counter[tuple[str, str]](), list[Program]()
    for mutant in mutants(number):
        truth, verdict = judged(mutant)
        table[truth or "right", verdict or "certified"] += 1
        if truth and not verdict:
            missed.append(mutant)
    for (truth, verdict), count in sorted(table.items()):
        print(f"{count:6}  {truth:45} {verdict}")
    harmful = sum(count for (truth, _), count in table.items() if truth != "right")
    print(f"{harmful} of {number} mutants change the result, race or can block; {len(missed)} of them were certified")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3000))
