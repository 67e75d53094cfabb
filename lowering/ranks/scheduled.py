"""Collectives by a schedule: every rank carries out its transfers, step by step, with point-to-point messages.

A rank has memory for the chunks that it holds at some time, which is used again by the next call. In a step it sends
each other rank at most one message: all chunks that go there, one after the other. It waits for what it receives before
it writes, so that a step reads what was there before. Ranks need not be in the same step.

No gradient passes: what a rank gets is new data, whichever mode of autograd its caller is in.

Nothing here says that a schedule is right: `verifier.collectives` does, before it is run. `picked` runs them
beside what the process does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.waits import TIMEOUT_S
from shardwright.pcg.collectives.collective import Chunk, Collective
from shardwright.pcg.collectives.schedule import Op, Schedule
from shardwright.pcg.errors import DistributedError, ScheduleError

MOST_ROOMS = 4
"""The most lengths and types of chunks for which memory is kept."""


class _Message(NamedTuple):
    """The chunks that go from or to another rank in a step, and what is done with each that arrives."""

    peer: int
    chunks: tuple[int, ...]
    ops: tuple[Op, ...]


class _Step(NamedTuple):
    sends: tuple[_Message, ...]
    receives: tuple[_Message, ...]


class ScheduledCollective:
    """A collective on a process group that is carried out by a schedule. Every rank of the group makes one.

    Rank r of the schedule is rank r of the group. No other collective may run on the group meanwhile. Sums are added in
    the order of the schedule's steps, and within a step by the rank that sends.
    """

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup, *, timeout_s: float = TIMEOUT_S) -> None:
        """Prepare this rank's part. `timeout_s`: the longest wait for a message.

        Raises `ScheduleError` if the group has another number of ranks than the schedule.
        """
        if dist.get_world_size(group) != schedule.num_ranks:
            problem = f"it is for {schedule.num_ranks} ranks, and the group has {dist.get_world_size(group)}"
            raise ScheduleError(f"{schedule.name}: {problem}; build it for these")
        self.schedule, self._group, self._timeout_s = schedule, group, timeout_s
        self._rank = dist.get_rank(group)
        self._peers = [dist.get_global_rank(group, rank) for rank in range(schedule.num_ranks)]
        self._steps = [_step(transfers, self._rank) for transfers in schedule.steps]
        self._held = _held(schedule.collective, self._steps, self._rank)
        self._lengths, self._rooms = dict[int, Sequence[int]](), dict[tuple[object, ...], _Room]()

    def run(self, given: Tensor, num_elements: int, out: Tensor | None = None) -> Tensor:
        """Return this rank's output from its input, each of one dimension: its chunks one after the other.

        `num_elements`: of the whole, the same on every rank: of the tensor that an all-gather makes, a broadcast sends
        or an all-reduce sums, of all inputs of an all-to-all together. `out`: the memory that it is written to, which
        may be that of the input. No gradient passes.

        Raises:
            ScheduleError: the input or `out` has another shape, or the whole does not divide into units.
            DistributedError: a message did not come within the timeout; says which chunks, step and rank.
        """
        return self._checked(given, self._lengths_of(num_elements), out, is_kept=True)

    def run_uneven(self, given: Tensor, units: Sequence[Sequence[int]], out: Tensor | None = None) -> Tensor:
        """Return this rank's output of an all-to-all in which rank r sends rank s `units[r][s]` elements.

        All ranks pass the same numbers, since chunks may pass through any of them. Raises as `run` does, and a
        `ScheduleError` if the schedule is of another kind.
        """
        return self._checked(given, unit_lengths(self.schedule.collective, units), out, is_kept=False)

    def _checked(self, given: Tensor, lengths: Sequence[int], out: Tensor | None, *, is_kept: bool) -> Tensor:
        expected = sum(lengths[chunk] for chunk in self.schedule.collective.inputs[self._rank])
        if given.shape != (expected,) or not given.is_contiguous():
            raise ScheduleError(
                f"{self.schedule.name}: rank {self._rank}: expected a contiguous input of shape [{expected}], got "
                f"{list(given.shape)}; pass x.contiguous().view(-1) of its chunks"
            )
        length = sum(lengths[chunk] for chunk in self.schedule.collective.outputs[self._rank])
        if out is not None and out.shape != (length,):
            raise ScheduleError(
                f"{self.schedule.name}: rank {self._rank}: expected memory of shape [{length}] for the output, got "
                f"{list(out.shape)}; pass memory of that shape"
            )
        with torch.inference_mode(False), torch.no_grad():  # memory that is kept outlives the caller's mode
            room = self._room(lengths, given) if is_kept else _Room(self._held, self._steps, lengths, given)
            return self._run(given.detach(), lengths, room, None if out is None else out.detach())

    def _lengths_of(self, num_elements: int) -> Sequence[int]:
        if num_elements not in self._lengths:
            self._lengths[num_elements] = chunk_lengths(self.schedule.collective, num_elements)
        return self._lengths[num_elements]

    def _run(self, given: Tensor, lengths: Sequence[int], room: _Room, out: Tensor | None) -> Tensor:
        collective, rank, start = self.schedule.collective, self._rank, 0
        for chunk in collective.inputs[rank]:
            room.cells[chunk].copy_(given[start : start + lengths[chunk]])
            start += lengths[chunk]
        for number, step in enumerate(self._steps):
            self._carry_out(number, step, room)
        cells = [given.new_empty(0), *(room.cells[chunk] for chunk in collective.outputs[rank])]
        if out is None:
            return torch.cat(cells)
        with torch.inference_mode(out.is_inference()):  # only there may it be written
            return torch.cat(cells, out=out)

    def _room(self, lengths: Sequence[int], like: Tensor) -> _Room:
        key = (like.dtype, like.device, *lengths)
        room = self._rooms.pop(key, None) or _Room(self._held, self._steps, lengths, like)
        self._rooms[key] = room  # the last one used stands last
        if len(self._rooms) > MOST_ROOMS:
            del self._rooms[next(iter(self._rooms))]
        return room

    def _carry_out(self, number: int, step: _Step, room: _Room) -> None:
        sent = [("to", message, room.packed(message)) for message in step.sends]
        received = [("from", message, room.arriving[number, message.peer]) for message in step.receives]
        parts = [part for part in (*sent, *received) if part[2].numel()]
        ops = [
            dist.P2POp(dist.isend if way == "to" else dist.irecv, x, self._peers[message.peer], self._group)
            for way, message, x in parts
        ]
        at = f"{self.schedule.name}: rank {self._rank} of the group, step {number}"
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:  # a connection that an earlier message left broken
            peers = sorted({message.peer for _, message, _ in parts})
            raise DistributedError(f"{at}: no message to or from ranks {peers} starts: {str(error).strip()}") from error
        for work, (way, message, _) in zip(works, parts, strict=False):  # NCCL has one for all
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                raise DistributedError(
                    f"{at}: chunks {list(message.chunks)} {way} rank {message.peer} did not go through: "
                    f"{str(error).strip()}"
                ) from error
        for _, message, arrived in received:
            room.store(message, arrived)


class _Room:
    """A rank's memory for chunks of certain lengths: its cells, and what arrives in each step."""

    def __init__(self, held: Sequence[int], steps: Sequence[_Step], lengths: Sequence[int], like: Tensor) -> None:
        self.cells: Mapping[int, Tensor] = {chunk: like.new_empty(lengths[chunk]) for chunk in held}
        most = max([0, *(_length(step.receives, lengths) for step in steps)])
        room, self.arriving = like.new_empty(most), dict[tuple[int, int], Tensor]()
        for number, step in enumerate(steps):
            start = 0
            for message in step.receives:
                end = start + _length([message], lengths)
                self.arriving[number, message.peer], start = room[start:end], end

    def packed(self, message: _Message) -> Tensor:
        """Return what is sent: a cell itself, or several in memory of their own."""
        cells = [self.cells[chunk] for chunk in message.chunks]
        return cells[0] if len(cells) == 1 else torch.cat(cells)

    def store(self, message: _Message, arrived: Tensor) -> None:
        """Put what arrived into its cells, or add it to them."""
        pieces = arrived.split([len(self.cells[chunk]) for chunk in message.chunks])
        for chunk, op, piece in zip(message.chunks, message.ops, pieces, strict=True):
            if op == "reduce":
                self.cells[chunk].add_(piece)
            else:
                self.cells[chunk].copy_(piece)


def _length(messages: Iterable[_Message], lengths: Sequence[int]) -> int:
    return sum(lengths[chunk] for message in messages for chunk in message.chunks)


def _step(transfers: Iterable[tuple[int, int, int, int, Op, tuple[int, ...]]], rank: int) -> _Step:
    """Return one rank's messages of a step, by the other rank."""
    sends, receives = defaultdict[int, list[tuple[int, Op]]](list), defaultdict[int, list[tuple[int, Op]]](list)
    for _, src, dst, chunk, op, _ in transfers:
        if src == rank:
            sends[dst].append((chunk, op))
        if dst == rank:
            receives[src].append((chunk, op))
    sent, received = (
        tuple(
            _Message(peer, tuple(c for c, _ in chunks), tuple(op for _, op in chunks))
            for peer, chunks in sorted(by.items())
        )
        for by in (sends, receives)
    )
    return _Step(sent, received)


def _held(collective: Collective, steps: Iterable[_Step], rank: int) -> list[int]:
    """Return the chunks that a rank holds at some time."""
    moved = {c for step in steps for message in (*step.sends, *step.receives) for c in message.chunks}
    return sorted(moved.union(collective.inputs[rank], collective.outputs[rank]))


def chunk_lengths(collective: Collective, num_elements: int) -> list[int]:
    """Return the elements of each chunk, if the whole has so many.

    Neighbouring chunks with the same sources and targets are one unit, which is a whole number of elements. Its chunks
    of equal size differ by one element at most.

    Raises:
        ScheduleError: a unit would have a fraction of an element.
    """
    lengths = list[int]()
    for unit in _units(collective):
        share = sum(chunk.size for chunk in unit) * num_elements
        if share.denominator != 1:
            raise ScheduleError(
                f"{collective.kind}: {num_elements} elements make a unit of {share}; pad them, so that units are whole"
            )
        lengths += _cut(unit, int(share))
    return lengths


def unit_lengths(collective: Collective, units: Sequence[Sequence[int]]) -> list[int]:
    """Return the elements of each chunk of an all-to-all, if rank r sends rank s `units[r][s]` of them.

    Raises:
        ScheduleError: the collective is another one.
    """
    if collective.kind != "all_to_all":
        raise ScheduleError(f"expected an all_to_all, got a {collective.kind}; only its ranks may have uneven shares")
    each = ((unit, units[unit[0].sources[0]][unit[0].targets[0]]) for unit in _units(collective))
    return [length for unit, num_elements in each for length in _cut(unit, num_elements)]


def _units(collective: Collective) -> list[list[Chunk]]:
    """Return the units of a collective: neighbouring chunks with the same sources and targets."""
    return [list(chunks) for _, chunks in groupby(collective.chunks, key=lambda chunk: chunk[1:])]


def _cut(unit: Sequence[Chunk], num_elements: int) -> list[int]:
    """Return the elements of each chunk of a unit of so many."""
    whole = sum(chunk.size for chunk in unit)
    ends = [int(share * num_elements / whole) for share in accumulate(chunk.size for chunk in unit)] if whole else []
    return [end - before for before, end in pairwise([0, *ends])] or [0] * len(unit)
