"""The memory of a plan: which cells an operation reads and writes, on its own rank, on a peer, behind a switch.

Chunks are judged in equal parts, each a cell. Packets are cells of their own: they take twice the room of the scratch
that they are named by, and would lie over plain data there, so a rank's scratch holds one or the other. In place, an
output is the input, or a part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeVar

from shardwright.pcg.collectives.collective import Collective
from shardwright.pcg.collectives.plan import DATA, MOST_SOURCES, Action, Plan, PlanBlock, Reach, Span
from shardwright.pcg.collectives.program import Buffer, shared_offset
from shardwright.verifier.collectives.events import MOST_ASSIGNMENTS, Assignment, Execution, Name, Where
from shardwright.verifier.collectives.values import afterwards, before
from shardwright.verifier.collectives.verdict import Refusal, Refused

_Entry = TypeVar("_Entry")
SUMS = ("", "sum")
"""The reductions that a collective is made of; the executor adds where a plan names none."""


class Iteration(NamedTuple):
    """A turn of a pipeline over `num_chunks` chunks: two turns for each, of half a chunk."""

    turn: int
    num_chunks: int


@dataclass(slots=True)
class Memory:
    """The cells of a plan; `writers` and `readers` are the events that write and read packets, by cell."""

    plan: Plan
    whole: Collective
    parts: int
    execution: Execution
    cells: dict[tuple[int, Buffer, int, int, bool], int] = field(default_factory=dict)
    writers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    readers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_assignments: int = 0
    scratch: dict[int, bool] = field(default_factory=dict)  # of each rank: whether it holds packets

    def fill(self) -> None:
        """Say what the collective's cells hold before, and must hold afterwards."""
        given, due = before(self.whole), afterwards(self.whole)
        for rank in range(self.plan.num_ranks):
            for part in range(self.parts):
                for offset, chunk in enumerate(self.whole.inputs[rank]):
                    self.execution.before[self._cell(rank, "input", offset, part)] = given[rank, chunk]
                for offset, chunk in enumerate(self.whole.outputs[rank]):
                    self.execution.afterwards[self._cell(rank, "output", offset, part)] = due[rank, chunk]

    def assignments(
        self, where: Where, block: PlanBlock, action: Action, iteration: Iteration | None, number: int
    ) -> Iterator[Assignment]:
        """Yield what event `number` adds and stores, part by part of its chunks."""
        data = DATA[action.name]
        if action.reduce_op not in SUMS:
            refuse(where, f"expected sums, got {action.reduce_op!r}; collectives add: use 'sum'")
        self._check(where, data.sources, action.sources, "source")
        self._check(where, data.targets, action.targets, "target")
        sources = [self._reached(where, block, action, span, iteration, index >= data.packets_in)
                   for index, span in enumerate(action.sources)]  # fmt: skip
        targets = [self._reached(where, block, action, span, iteration, index >= data.packets_out)
                   for index, span in enumerate(action.targets)]  # fmt: skip
        if len({len(cells) for cells in (*sources, *targets)}) > 1:
            refuse(where, "expected ranges of one size, got several; make them equal")
        if not data.sums and len(sources) != len(targets):
            refuse(where, f"expected as many sources as targets, got {len(sources)} and {len(targets)}; pair them")
        for index, cells in enumerate(sources):
            for cell in (c for row in cells for c in row) if index >= data.packets_in else ():
                self.readers[cell].append(number)
        for index, cells in enumerate(targets):
            for cell in (c for row in cells for c in row) if index >= data.packets_out else ():
                self.writers[cell].append(number)
        pairs = [(sources, targets)] if data.sums else [([s], [t]) for s, t in zip(sources, targets, strict=True)]
        for adds, stores in pairs:
            for rows in zip(zip(*adds, strict=True), zip(*stores, strict=True), strict=True):
                read, written = ([cell for row in side for cell in row] for side in rows)
                self.num_assignments += 1
                yield Assignment(tuple(written), tuple(read))
        if self.num_assignments > MOST_ASSIGNMENTS:
            refuse(where, f"expected at most {MOST_ASSIGNMENTS} parts of chunks, got more; judge a smaller plan")

    def _reached(
        self, where: Where, block: PlanBlock, action: Action, span: Span, iteration: Iteration | None, packets: bool
    ) -> list[list[int]]:
        """Return the cells of a range in their order; behind a switch, each place is the cells of all its ranks."""
        ranks, buffer = self._memory(where, block, action, span)
        for rank in ranks:
            room = self._room(rank, buffer)
            if span.first + span.size > room:
                span_text = f"{buffer}[{span.first}:{span.first + span.size}]"
                refuse(
                    where, f"expected chunks within the {room} of the {buffer} of rank {rank}, got {span_text}; move it"
                )
        if packets and buffer != "scratch":
            refuse(where, f"expected packets in scratch, got {buffer}; they need twice the room")
        for rank in ranks if buffer == "scratch" else ():
            if self.scratch.setdefault(rank, packets) != packets:
                expected = f"expected scratch of rank {rank} to hold packets alone or plain data alone, got both"
                refuse(where, f"{expected}, which would overlap; use one of them")
        places = [(span.first + chunk, part) for chunk in range(span.size) for part in range(self.parts)]
        if iteration is not None:
            half = self.parts // 2
            if span.size != iteration.num_chunks:
                refuse(
                    where,
                    f"expected ranges of {iteration.num_chunks} chunks in a pipeline, got {span.size}; make it so",
                )
            places = places[iteration.turn * half : (iteration.turn + 1) * half]
        if action.part:
            share = len(places) // action.part[1]
            places = places[action.part[0] * share : (action.part[0] + 1) * share]
        return [[self._cell(rank, buffer, chunk, part, packets) for rank in ranks] for chunk, part in places]

    def _memory(self, where: Where, block: PlanBlock, action: Action, span: Span) -> tuple[tuple[int, ...], Buffer]:
        one = self.plan.ranks[where.rank]
        if not isinstance(span.place, int):
            return (where.rank,), span.place
        if span.reach == "switch":
            channel = listed(where, "switch channel of the block", block.channels.get("switch", ()), span.place)
            group = listed(where, "switch group of the rank", one.groups, channel)
            for rank in group.ranks:
                listed(where, "rank", self.plan.ranks, rank)
            if span.first + span.size > group.size:
                refuse(where, f"expected chunks within the {group.size} of the switch, got {span.first + span.size}")
            return group.ranks, group.buffer
        kind = action.channel_type
        number = listed(where, f"{kind} buffer of the block", block.remote_buffers.get(kind, ()), span.place)
        remote = listed(where, "remote buffer of the rank", one.remote_buffers, number)
        listed(where, "rank", self.plan.ranks, remote.rank)
        if action.channel_type not in remote.channel_types or remote.rank == where.rank:
            refuse(
                where, f"expected a peer's buffer that {action.channel_type} channels reach, got another; correct it"
            )
        return (remote.rank,), remote.buffer

    def _room(self, rank: int, buffer: Buffer) -> int:
        """Return how many chunks of a buffer may be touched: those that are declared and that the user gives."""
        declared = self.plan.ranks[rank].chunks(buffer)
        given: Mapping[Buffer, int] = {"input": len(self.whole.inputs[rank]), "output": len(self.whole.outputs[rank])}
        return min(declared, given.get(buffer, declared))

    def _cell(self, rank: int, buffer: Buffer, offset: int, part: int, packets: bool = False) -> int:
        if buffer == "output" and self.plan.in_place:
            buffer, offset = "input", shared_offset(self.plan.kind, self.plan.pieces, rank, offset)
        key = (rank, buffer, offset, part, packets)
        if key not in self.cells:
            self.cells[key] = len(self.cells)
            of = f", part {part} of {self.parts}" if self.parts > 1 else ""
            self.execution.names[self.cells[key]] = Name(
                rank, f"{buffer}[{offset}]{of}{' as packets' if packets else ''}"
            )
        return self.cells[key]

    def _check(self, where: Where, reaches: tuple[Reach, Reach], spans: tuple[Span, ...], what: str) -> None:
        allowed = [reaches[0], *[reaches[1]] * (len(spans) - 1)]
        mixed = where.text == "recspkt" and what == "target"  # a copy of the packets may stay here, others go to peers
        if not 0 < len(spans) <= MOST_SOURCES:
            refuse(where, f"expected 1 to {MOST_SOURCES} {what}s, got {len(spans)}; correct it")
        for span, reach in zip(spans, allowed, strict=True):
            if span.reach != reach and not (mixed and span.reach == "local"):
                refuse(where, f"expected a {reach} {what}, got a {span.reach} one; correct it")


def listed(where: Where, what: str, entries: Sequence[_Entry], position: int) -> _Entry:
    """Return an entry of a list of the plan's. Refuse a position that the list does not have."""
    if not 0 <= position < len(entries):
        refuse(where, f"expected a {what}, of which there are {len(entries)}, got number {position}; list it")
    return entries[position]


def refuse(where: Where, problem: str) -> NoReturn:
    """Refuse the form of an operation."""
    raise Refused(Refusal("form", where.rank, where.step, where.chunk, f"{where}: {problem}"))
