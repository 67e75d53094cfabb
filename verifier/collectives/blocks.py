"""The meaning of MSCCL's files: turn a program of blocks into events.

The steps of a block happen in order, a step after the one that it waits for, and the k-th receive of a connection after
its k-th send. Files are not trusted: whatever the meaning relies on is checked here, the bounds of all chunks included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardwright.pcg.collectives.collective import Collective, require_at_most
from shardwright.pcg.collectives.program import (
    BUFFERS,
    NO_PEER,
    OPS,
    SPLIT,
    Block,
    Buffer,
    Place,
    Program,
    RankProgram,
    Step,
)
from shardwright.verifier.collectives.events import (
    MOST_ASSIGNMENTS,
    MOST_CELLS,
    Assignment,
    Event,
    Execution,
    Name,
    Where,
    at,
    judge,
)
from shardwright.verifier.collectives.queues import least_capacity
from shardwright.verifier.collectives.values import afterwards, before
from shardwright.verifier.collectives.verdict import (
    Refusal,
    Refused,
    ScheduleCertificate,
    ScheduleVerdict,
    judge_digest,
    subject_hash,
    verdict_of,
)

Connection = tuple[int, int, int]
"""Sender, receiver and channel."""
MOST_COUNT = 1 << 12


def verify_program(program: Program) -> ScheduleVerdict:
    """Judge a program in every way in which it may run: in place, out of place or both."""
    return verdict_of(lambda: _proven(program))


def _proven(program: Program) -> ScheduleCertificate:
    modes = [mode for mode, allowed in ((True, program.in_place), (False, program.out_of_place)) if allowed]
    if not modes:
        problem = "expected a program that runs in place or out of place, got neither; allow one of them"
        raise Refused(Refusal("form", -1, -1, -1, problem))
    executions = [execution_of(replace(program, in_place=mode, out_of_place=not mode)) for mode in modes]
    for execution in executions:
        judge(execution)
    steps = len(executions[0].events)
    where = " and ".join("in place" if mode else "out of place" for mode in modes)
    claim = f"{program.name}: {program.kind} of {program.num_ranks} ranks, {program.num_chunks} chunks, {where}"
    facts = (f"{steps} steps in {executions[0].num_threads} blocks",)
    return ScheduleCertificate(subject_hash(program), judge_digest(), claim, least_capacity(executions[0]), facts)


def execution_of(program: Program) -> Execution:
    """Return the events of a program that runs in place, or else out of place.

    Raises:
        Refused: something has no meaning: a peer, a chunk, a wait or a message that does not exist.
        ScheduleError: it is larger than what is judged.
    """
    whole = program.collective()
    steps = (step for rank in program.ranks for block in rank.blocks for step in block.steps)
    require_at_most(program.name, whole.num_cells, MOST_CELLS, "cells")
    require_at_most(program.name, sum(max(0, step.num_chunks) for step in steps), MOST_ASSIGNMENTS, "chunks of steps")
    translation = _Translation(program, whole)
    for rank, one in enumerate(program.ranks):
        translation.add_rank(rank, one)
    translation.connect()
    translation.fill()
    return translation.execution


@dataclass(slots=True)
class _Translation:
    program: Program
    whole: Collective
    execution: Execution = field(default_factory=lambda: Execution(0))
    cells: dict[tuple[object, ...], int] = field(default_factory=dict)
    sends: dict[Connection, list[int]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[Connection, list[int]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[int, int] = field(default_factory=dict)  # chunks of an event

    def add_rank(self, rank: int, program: RankProgram) -> None:
        _check_rank(self.program, self.whole, rank)
        copied = [self._copies(rank, program)] if program.copies and not self.program.in_place else []
        start, firsts = len(self.execution.events), list[int]()
        for block in program.blocks:
            firsts.append(start)
            start += len(block.steps)
        for index, block in enumerate(program.blocks):
            for number, step in enumerate(block.steps):
                after = [firsts[index] + number - 1] if number else list(copied)
                if step.after is not None:
                    after.append(firsts[step.after[0]] + step.after[1])
                self._add(rank, index, block, number, step, after)
            self.execution.num_threads += 1

    def connect(self) -> None:
        """Pair the k-th send of each connection with its k-th receive."""
        for connection in sorted({*self.sends, *self.receives}):
            sends, receives = self.sends.get(connection, []), self.receives.get(connection, [])
            if len(sends) != len(receives):
                src, dst, channel = connection
                what = f"{len(sends)} sends and {len(receives)} receives"
                problem = (
                    f"expected as many receives as sends from rank {src} to rank {dst} on channel {channel}, got {what}"
                )
                last = self.execution.events[(sends or receives)[-1]]
                raise Refused(at(last, "deadlock", f"{problem}; add what is missing"))
            for send, receive in zip(sends, receives, strict=True):
                self._pair(send, receive)
            self.execution.queues.append((sends, receives))

    def fill(self) -> None:
        """Say what the collective's cells hold before, and must hold afterwards."""
        given, due = before(self.whole), afterwards(self.whole)
        for rank, (inputs, outputs) in enumerate(zip(self.whole.inputs, self.whole.outputs, strict=True)):
            for offset, chunk in enumerate(inputs):
                self.execution.before[self._cell(rank, "input", offset)] = given[rank, chunk]
            for offset, chunk in enumerate(outputs):
                self.execution.afterwards[self._cell(rank, "output", offset)] = due[rank, chunk]

    def _copies(self, rank: int, program: RankProgram) -> int:
        number = len(self.execution.events)
        moved = [(self._cell(rank, "output", to), self._cell(rank, "input", of)) for of, to in program.copies]
        assignments = tuple(Assignment((target,), (source,)) for target, source in moved)
        where = Where(rank, -1, 0, program.copies[0][0], "copies before the first step")
        self.execution.events.append(Event(where, self.execution.num_threads, assignments, []))
        self.execution.num_threads += 1
        return number

    def _add(self, rank: int, index: int, block: Block, number: int, step: Step, after: list[int]) -> None:
        op, event = OPS[step.op], len(self.execution.events)
        messages = list[int]()
        if op.sends:
            connection = (rank, block.send, block.channel)
            messages = [self._message(connection, len(self.sends[connection]), j) for j in range(step.num_chunks)]
            self.sends[connection].append(event)
        received = list[int]()
        if op.receives:
            connection = (block.receive, rank, block.channel)
            received = [self._message(connection, len(self.receives[connection]), j) for j in range(step.num_chunks)]
            self.receives[connection].append(event)
        assignments = list[Assignment]()
        for j in range(step.num_chunks if op.sends or op.stores else 0):
            sources = [received[j]] if op.receives else []
            sources += [self._at(rank, step.destination, j)] if op.reads_destination else []
            sources += [self._at(rank, step.source, j)] if op.reads_source else []
            targets = [self._at(rank, step.destination, j)] if op.stores else []
            assignments.append(Assignment((*targets, *messages[j : j + 1]), tuple(sources)))
        where = Where(rank, index, number, _chunk_of(step), step.op)
        self.counts[event] = step.num_chunks
        self.execution.events.append(Event(where, self.execution.num_threads, tuple(assignments), after))

    def _pair(self, send: int, receive: int) -> None:
        one, other = self.execution.events[send], self.execution.events[receive]
        if self.counts[send] != self.counts[receive]:
            problem = f"expected {self.counts[send]} chunks, as {one.where} sends, got {self.counts[receive]}"
            raise Refused(at(other, "form", f"{other.where}: {problem}; give both the same count"))
        other.after.append(send)

    def _message(self, connection: Connection, number: int, chunk: int) -> int:
        return self.cells.setdefault(("message", *connection, number, chunk), len(self.cells))

    def _at(self, rank: int, place: Place, chunk: int) -> int:
        return self._cell(rank, place.buffer, place.offset + chunk)

    def _cell(self, rank: int, buffer: Buffer, offset: int) -> int:
        if buffer == "output" and self.program.in_place:
            buffer, offset = "input", self.program.shared_with_input(rank, offset)
        key = (rank, buffer, offset)
        if key not in self.cells:
            self.cells[key] = len(self.cells)
            self.execution.names[self.cells[key]] = Name(rank, f"{buffer}[{offset}]")
        return self.cells[key]


def _check_rank(program: Program, whole: Collective, rank: int) -> None:
    one, rooms = program.ranks[rank], _rooms(program, whole, rank)
    for of, to in one.copies:
        if not (0 <= of < rooms["input"] and 0 <= to < rooms["output"]):
            raise Refused(
                Refusal("form", rank, -1, of, f"copy of input[{of}] to output[{to}]: no such chunks; correct it")
            )
    ends = Counter((end, peer, block.channel) for block in one.blocks for end, peer in _ends(block))
    for index, block in enumerate(one.blocks):
        first = _chunk_of(block.steps[0]) if block.steps else 0
        for end, peer in _ends(block):
            if not 0 <= peer < program.num_ranks or peer == rank:
                problem = f"block {index}: expected another rank, got {end} {peer}; correct the peer"
                raise Refused(Refusal("form", rank, 0, first, problem))
            if ends[end, peer, block.channel] > 1:
                problem = (
                    f"block {index}: expected one block with channel {block.channel} {end} rank {peer}, got several"
                )
                raise Refused(
                    Refusal("form", rank, 0, first, f"{problem}; their messages would mix: take another channel")
                )
        for number, step in enumerate(block.steps):
            for problem in _step_problems(one, rooms, index, step):
                where = f"block {index}, step {number} ({step.op})"
                raise Refused(Refusal("form", rank, number, _chunk_of(step), f"{where}: {problem}"))


def _ends(block: Block) -> list[tuple[str, int]]:
    return [(end, peer) for end, peer in (("to", block.send), ("from", block.receive)) if peer != NO_PEER]


def _chunk_of(step: Step) -> int:
    return max(0, (step.source if step.op == "s" else step.destination).offset)


def _rooms(program: Program, whole: Collective, rank: int) -> dict[Buffer, int]:
    """Return how many chunks of each buffer a rank may touch: no more than it declares, nor than the user gives it."""
    one, aliased = program.ranks[rank], program.in_place and not SPLIT[whole.kind]
    given = {"input": len(whole.inputs[rank]), "output": len(whole.outputs[rank]), "scratch": one.scratch_chunks}
    if aliased:  # the same memory under two names
        given |= {"input": program.num_chunks, "output": program.num_chunks}
    return {buffer: min(given[buffer], one.chunks(buffer)) for buffer in BUFFERS}


def _step_problems(one: RankProgram, rooms: Mapping[Buffer, int], index: int, step: Step) -> Iterator[str]:
    op, block = OPS.get(step.op), one.blocks[index]
    if op is None:
        yield f"expected one of {', '.join(OPS)}; use one of them"
        return
    if op.sends and block.send == NO_PEER:
        yield "expected a peer to send to, got none; give the block one"
    if op.receives and block.receive == NO_PEER:
        yield "expected a peer to receive from, got none; give the block one"
    if not 0 <= step.num_chunks <= MOST_COUNT:
        yield f"expected a count from 0 to {MOST_COUNT}, got {step.num_chunks}; correct it"
    used = ((step.source, op.reads_source), (step.destination, op.stores or op.reads_destination))
    for place, is_used in used:
        room = rooms[place.buffer]
        if is_used and not 0 <= place.offset <= place.offset + step.num_chunks <= room:
            span = f"{place.buffer}[{place.offset}:{place.offset + step.num_chunks}]"
            yield f"expected chunks within the {room} of the {place.buffer}, got {span}; move it"
    if step.after is not None:
        yield from _wait_problems(one, index, step.after)


def _wait_problems(one: RankProgram, index: int, after: tuple[int, int]) -> Iterator[str]:
    block, number = after
    if not 0 <= block < len(one.blocks) or not 0 <= number < len(one.blocks[block].steps):
        yield f"expected a wait for a step of this rank, got block {block}, step {number}; correct it"
    elif block == index:
        yield "expected a wait for another block, got its own, whose steps come in order anyway; remove it"
    elif not one.blocks[block].steps[number].awaited:
        yield f"expected block {block}, step {number} to say when it has ended, got one that does not; mark it"
