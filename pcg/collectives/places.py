"""Places of a schedule's chunks on each rank: in the input, the output, or scratch; and chunks that go together.

Both forms of programs are made from this: blocks that send and receive (`threads`), and blocks that put (`onesided`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shardwright.pcg.collectives.program import SPLIT, Place
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.errors import ScheduleError

MOST_COUNT = 71
"""Neighbouring chunks that one step moves; MSCCL's limit."""


@dataclass(frozen=True, slots=True)
class Move:
    """Neighbouring chunks that a step moves from one rank to another."""

    src: int
    dst: int
    channel: int
    chunks: range
    reduces: bool


def moves(
    ranks: Sequence[Places], step: Sequence[Transfer], channels: int = 1, longest: int = MOST_COUNT
) -> Iterator[Move]:
    """Yield the moves of a step, chunk c over channel c modulo `channels`.

    Up to `longest` chunks go together if they are neighbours in all buffers and no other transfer of the step writes
    them.
    """
    writes = Counter((t.dst, t.chunk) for t in step)
    ordered = sorted(step, key=lambda t: (t.src, t.dst, t.op, t.chunk % channels, t.chunk))
    for (src, dst, op, channel), group in groupby(ordered, lambda t: (t.src, t.dst, t.op, t.chunk % channels)):
        run = list[int]()
        for transfer in group:
            alone = max(writes[dst, chunk] for chunk in (transfer.chunk, *run[-1:])) == 1 and len(run) < longest
            if run and not (alone and _neighbours(ranks[src], ranks[dst], run[-1], transfer.chunk)):
                yield Move(src, dst, channel, range(run[0], run[-1] + 1), op == "reduce")
                run = []
            run.append(transfer.chunk)
        yield Move(src, dst, channel, range(run[0], run[-1] + 1), op == "reduce")


def _neighbours(src: Places, dst: Places, chunk: int, following: int) -> bool:
    if following != chunk + 1:
        return False
    pairs = [(src.place(chunk), src.place(following)), (dst.place(chunk), dst.place(following))]
    pairs.append((dst.home(chunk), dst.home(following)))
    return all(b == Place(a.buffer, a.offset + 1) for a, b in pairs)


@dataclass(slots=True)
class Places:
    """A rank's chunks: `inputs` and `outputs` by offset, `scratch` as it is needed, and those that were received."""

    schedule: Schedule
    rank: int
    in_place: bool
    inputs: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    scratch: dict[int, int] = field(default_factory=dict)
    scratch_chunks: int = 0
    written: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        whole = self.schedule.collective
        self.inputs = {chunk: offset for offset, chunk in enumerate(whole.inputs[self.rank])}
        self.outputs = {chunk: offset for offset, chunk in enumerate(whole.outputs[self.rank])}

    def own_output(self) -> list[int]:
        """Return the chunks of the output that are in the input, and that nobody sends."""
        received = {t.chunk for t in self.schedule.transfers if t.dst == self.rank}
        return sorted(self.inputs.keys() & self.outputs.keys() - received)

    def place(self, chunk: int) -> Place:
        """Return where the chunk is now."""
        is_input = chunk in self.inputs and not self.in_place and chunk not in self.written
        return Place("input", self.inputs[chunk]) if is_input else self.home(chunk)

    def home(self, chunk: int) -> Place:
        """Return where the chunk is written."""
        if chunk in self.outputs and not (self.against_input and chunk in self.inputs):
            return Place("output", self.outputs[chunk])
        if self.in_place and chunk in self.inputs:
            return Place("input", self.inputs[chunk])
        if chunk not in self.scratch:
            self.scratch[chunk] = self.slot(1)
        return Place("scratch", self.scratch[chunk])

    def slot(self, num_chunks: int) -> int:
        """Return the offset of new chunks of scratch."""
        self.scratch_chunks += num_chunks
        return self.scratch_chunks - num_chunks

    @property
    def against_input(self) -> bool:
        """True if the program names memory that is both input and output as input, which is the larger of the two."""
        return self.in_place and len(self.inputs) >= len(self.outputs)


def require_buffers(schedule: Schedule, in_place: bool) -> None:
    """Raise `ScheduleError` unless a library's buffers can hold the schedule's chunks."""
    if problem := _problem(schedule, in_place):
        raise ScheduleError(f"{schedule.name}: {problem}")


def _problem(schedule: Schedule, in_place: bool) -> str:
    whole = schedule.collective
    if whole.kind not in SPLIT:
        return f"expected one of {', '.join(SPLIT)}, got {whole.kind!r}; only those have buffers"
    if not whole.is_even:
        return "expected equal chunks, got unequal ones, which blocks of whole chunks cannot move; cut them evenly"
    if in_place and whole.kind == "all_to_all":
        return "expected an all_to_all out of place, got one in place, which overwrites what it has yet to send"
    return ""
