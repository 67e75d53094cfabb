"""From a schedule to a program: sends and receives in blocks, with the waits that they need and no others.

Each rank has a block for each rank that it sends to, and one for each that it receives from, times the channels. What a
schedule orders by its steps becomes waits between blocks that touch the same cell. So ranks need not be in lock-step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from shardwright.pcg.collectives.program import NO_PEER, SPLIT, Block, Place, Program, RankProgram, Step
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.errors import ScheduleError

MOST_COUNT = 71
"""Neighbouring chunks that one step moves; MSCCL's limit."""
_End = tuple[int, int, int]
"""A rank that is sent to, one that is received from, and the channel; -1 stands for none."""
_LOCAL: _End = (NO_PEER, NO_PEER, 0)


def program_of(schedule: Schedule, *, in_place: bool = False, channels: int = 1) -> Program:
    """Return the program of a schedule; chunk c goes over channel c modulo `channels`.

    In place, a rank's input and output are the same memory where they hold the same chunk.

    Raises:
        ScheduleError: the collective is none of a library's, has unequal chunks, or is an all-to-all in place.
    """
    whole = schedule.collective
    problem = _problem(schedule, in_place)
    if problem or channels < 1:
        raise ScheduleError(f"{schedule.name}: {problem or f'expected at least one channel, got {channels}; say more'}")
    ranks = [_Rank(schedule, rank, in_place) for rank in range(schedule.num_ranks)]
    for step in schedule.steps:
        moves = list(_moves(ranks, step, channels))
        for move in moves:
            ranks[move.src].send(move)
        for move in moves:
            ranks[move.dst].receive(move)
    num_chunks = len(whole.chunks) // (whole.num_ranks if whole.kind == "all_to_all" else 1)
    programs = tuple(rank.program() for rank in ranks)
    return Program(
        schedule.name, whole.kind, num_chunks, programs, in_place, not in_place, num_channels=channels, root=whole.root
    )


def _problem(schedule: Schedule, in_place: bool) -> str:
    whole = schedule.collective
    if whole.kind not in SPLIT:
        return f"expected one of {', '.join(SPLIT)}, got {whole.kind!r}; only those have buffers"
    if not whole.is_even:
        return "expected equal chunks, got unequal ones, which blocks of whole chunks cannot move; cut them evenly"
    if in_place and whole.kind == "all_to_all":
        return "expected an all_to_all out of place, got one in place, which overwrites what it has yet to send"
    return ""


@dataclass(frozen=True, slots=True)
class _Move:
    """Neighbouring chunks that a step moves from one rank to another."""

    src: int
    dst: int
    channel: int
    chunks: range
    reduces: bool


def _moves(ranks: list[_Rank], step: tuple[Transfer, ...], channels: int) -> Iterator[_Move]:
    """Yield the moves of a step: neighbours in all buffers, written by nobody else, go together."""
    writes = Counter((t.dst, t.chunk) for t in step)
    ordered = sorted(step, key=lambda t: (t.src, t.dst, t.op, t.chunk % channels, t.chunk))
    for (src, dst, op, channel), group in groupby(ordered, lambda t: (t.src, t.dst, t.op, t.chunk % channels)):
        run = list[int]()
        for transfer in group:
            alone = max(writes[dst, chunk] for chunk in (transfer.chunk, *run[-1:])) == 1 and len(run) < MOST_COUNT
            if run and not (alone and _neighbours(ranks[src], ranks[dst], run[-1], transfer.chunk)):
                yield _Move(src, dst, channel, range(run[0], run[-1] + 1), op == "reduce")
                run = []
            run.append(transfer.chunk)
        yield _Move(src, dst, channel, range(run[0], run[-1] + 1), op == "reduce")


def _neighbours(src: _Rank, dst: _Rank, chunk: int, following: int) -> bool:
    if following != chunk + 1:
        return False
    pairs = [(src.place(chunk), src.place(following)), (dst.place(chunk), dst.place(following))]
    pairs.append((dst.home(chunk), dst.home(following)))
    return all(b == Place(a.buffer, a.offset + 1) for a, b in pairs)


@dataclass(slots=True)
class _Rank:
    """A rank's blocks while they are made: where its chunks are, and which steps touched them last."""

    schedule: Schedule
    rank: int
    in_place: bool
    inputs: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    scratch: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    blocks: dict[_End, list[Step]] = field(default_factory=lambda: defaultdict(list))
    writer: dict[int, tuple[_End, int]] = field(default_factory=dict)
    readers: dict[int, list[tuple[_End, int]]] = field(default_factory=lambda: defaultdict(list))
    waited: dict[_End, dict[_End, int]] = field(default_factory=lambda: defaultdict(dict))
    waits: list[tuple[_End, int, _End, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        whole = self.schedule.collective
        self.inputs = {chunk: offset for offset, chunk in enumerate(whole.inputs[self.rank])}
        self.outputs = {chunk: offset for offset, chunk in enumerate(whole.outputs[self.rank])}
        if not self.in_place:
            received = {t.chunk for t in self.schedule.transfers if t.dst == self.rank}
            for chunk in sorted(self.inputs.keys() & self.outputs.keys() - received):
                self._add(_LOCAL, Step("cpy", self.place(chunk), self.home(chunk)), (chunk,), writes=False)

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
        return Place("scratch", self.scratch.setdefault(chunk, len(self.scratch)))

    @property
    def against_input(self) -> bool:
        """Whether the program names what is input and output at once as input: the larger of the two."""
        return self.in_place and len(self.inputs) >= len(self.outputs)

    def send(self, move: _Move) -> None:
        source = self.place(move.chunks[0])
        step = Step("s", source, source, len(move.chunks))
        self._add((move.dst, NO_PEER, move.channel), step, move.chunks, writes=False)

    def receive(self, move: _Move) -> None:
        source, home = self.place(move.chunks[0]), self.home(move.chunks[0])
        step = Step("rrc" if move.reduces else "r", source if move.reduces else home, home, len(move.chunks))
        self._add((NO_PEER, move.src, move.channel), step, move.chunks, writes=True)
        self.written.update(move.chunks)

    def program(self) -> RankProgram:
        """Return the rank's program; a step that waits for several others has steps before it that only wait."""
        ends, numbers = sorted(self.blocks), dict[tuple[_End, int], int]()
        before = defaultdict[tuple[_End, int], list[tuple[_End, int]]](list)
        for end, number, other, awaited in self.waits:
            before[end, number].append((other, awaited))
        for end in ends:
            shift = 0
            for number in range(len(self.blocks[end])):
                shift += max(0, len(before[end, number]) - 1)
                numbers[end, number] = number + shift
        awaited = {(other, number) for _, _, other, number in self.waits}

        def steps(end: _End) -> Iterator[Step]:
            for number, step in enumerate(self.blocks[end]):
                waits = [(ends.index(other), numbers[other, at]) for other, at in before[end, number]]
                for wait in waits[:-1]:
                    yield Step("nop", Place("input", -1), Place("output", -1), 0, wait)
                yield step._replace(after=waits[-1] if waits else None, awaited=(end, number) in awaited)

        blocks = tuple(Block(*end, tuple(steps(end))) for end in ends)
        return RankProgram(len(self.inputs), len(self.outputs), len(self.scratch), blocks)

    def _add(self, end: _End, step: Step, chunks: range | tuple[int, ...], *, writes: bool) -> None:
        number, needed = len(self.blocks[end]), dict[_End, int]()
        self.blocks[end].append(step)
        for chunk in chunks:
            earlier = [self.writer[chunk]] if chunk in self.writer else []
            for other, at in (*earlier, *(self.readers[chunk] if writes else ())):
                needed[other] = max(at, needed.get(other, -1))
            if writes:
                self.writer[chunk], self.readers[chunk] = (end, number), []
            else:
                self.readers[chunk].append((end, number))
        for other, at in needed.items():
            if other != end and at > self.waited[end].get(other, -1):
                self.waited[end][other] = at
                self.waits.append((end, number, other, at))
