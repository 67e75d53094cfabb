"""Turn a schedule into a program: sends and receives in blocks, with the waits that they need and no others.

Each rank has a block for each rank that it sends to, and one for each that it receives from, times the channels. What a
schedule orders by its steps becomes waits between blocks that touch the same cell. So ranks need not be in lock-step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwright.pcg.collectives.places import Move, Places, moves, require_buffers
from shardwright.pcg.collectives.program import NO_PEER, Block, Place, Program, RankProgram, Step
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.errors import ScheduleError

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
    require_buffers(schedule, in_place)
    if channels < 1:
        raise ScheduleError(f"{schedule.name}: expected at least one channel, got {channels}; say more")
    places = [Places(schedule, rank, in_place) for rank in range(schedule.num_ranks)]
    ranks = [_Rank(place) for place in places]
    for step in schedule.steps:
        together = list(moves(places, step, channels))
        for move in together:
            ranks[move.src].send(move)
        for move in together:
            ranks[move.dst].receive(move)
    num_chunks = len(whole.chunks) // (whole.num_ranks if whole.kind == "all_to_all" else 1)
    programs = tuple(rank.program() for rank in ranks)
    return Program(
        schedule.name, whole.kind, num_chunks, programs, in_place, not in_place, num_channels=channels, root=whole.root
    )


@dataclass(slots=True)
class _Rank:
    """A rank's blocks while they are made, and which steps touched each chunk last."""

    places: Places
    blocks: dict[_End, list[Step]] = field(default_factory=lambda: defaultdict(list))
    writer: dict[int, tuple[_End, int]] = field(default_factory=dict)
    readers: dict[int, list[tuple[_End, int]]] = field(default_factory=lambda: defaultdict(list))
    waited: dict[_End, dict[_End, int]] = field(default_factory=lambda: defaultdict(dict))
    waits: list[tuple[_End, int, _End, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.places.in_place:
            for chunk in self.places.own_output():
                step = Step("cpy", self.places.place(chunk), self.places.home(chunk))
                self._add(_LOCAL, step, (chunk,), writes=False)

    def send(self, move: Move) -> None:
        source = self.places.place(move.chunks[0])
        step = Step("s", source, source, len(move.chunks))
        self._add((move.dst, NO_PEER, move.channel), step, move.chunks, writes=False)

    def receive(self, move: Move) -> None:
        source, home = self.places.place(move.chunks[0]), self.places.home(move.chunks[0])
        step = Step("rrc" if move.reduces else "r", source if move.reduces else home, home, len(move.chunks))
        self._add((NO_PEER, move.src, move.channel), step, move.chunks, writes=True)
        self.places.written.update(move.chunks)

    def program(self) -> RankProgram:
        """Return the rank's program; a step that waits for several others has steps before it that only wait."""
        places, ends, numbers = self.places, sorted(self.blocks), dict[tuple[_End, int], int]()
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
        return RankProgram(len(places.inputs), len(places.outputs), places.scratch_chunks, blocks)

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
