"""Turn a plan of one-sided operations into events, with the order that MSCCL++'s executor guarantees, and no more.

The threads of a block share the work of an operation, and only `nop` and `barrier` bring them together. So operations
between two of those are in no order, and data that was put has to be brought together before it is signalled. The k-th
wait on a channel comes after the k-th signal of its other end, an acquire after the release that allows it, and the
reading of a packet after its writing. Relaxed signals order steps and show no data.

A pipeline repeats its body on one slice of its chunks after the other; two slices of each chunk stand for all of them.
Block groups divide a range. So memory is judged in equal parts of a chunk.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

from shardwright.pcg.collectives.collective import require_at_most
from shardwright.pcg.collectives.plan import DATA, Action, Plan, PlanBlock
from shardwright.verifier.collectives.events import MOST_CELLS, Assignment, Event, Execution, Where, at, judge
from shardwright.verifier.collectives.reaches import Iteration, Memory, listed, refuse
from shardwright.verifier.collectives.verdict import (
    Refusal,
    Refused,
    ScheduleCertificate,
    ScheduleVerdict,
    judge_digest,
    subject_hash,
    verdict_of,
)

MOST_PARTS = 1024
Channel = tuple[int, str, int]
"""A rank, a type, and the number of its channel."""


def verify_plan(plan: Plan) -> ScheduleVerdict:
    """Judge a plan: complete, each contribution once, no race and no deadlock, whatever the order of its blocks."""
    return verdict_of(lambda: _proven(plan))


def _proven(plan: Plan) -> ScheduleCertificate:
    execution = execution_of_plan(plan)
    judge(execution)
    blocks = sum(len(rank.blocks) for rank in plan.ranks)
    claim = f"{plan.name}: {plan.kind} of {plan.num_ranks} ranks, {'in' if plan.in_place else 'out of'} place"
    facts = (f"{len(execution.events)} events in {blocks} blocks",)
    return ScheduleCertificate(subject_hash(plan), judge_digest(), claim, None, facts)


def execution_of_plan(plan: Plan) -> Execution:
    """Return the events of a plan.

    Raises:
        Refused: something has no meaning, or an order that cannot be known: of several blocks on one channel.
        ScheduleError: it is larger than what is judged.
    """
    execution, whole, parts = Execution(0), plan.collective(), _parts(plan)
    require_at_most(plan.name, whole.num_cells * parts, MOST_CELLS, "parts of cells")
    translation = _Translation(plan, execution, Memory(plan, whole, parts, execution))
    for rank, one in enumerate(plan.ranks):
        for index, block in enumerate(one.blocks):
            translation.add_block(rank, index, block)
    translation.connect()
    translation.memory.fill()
    translation.end()
    return translation.execution


def _parts(plan: Plan) -> int:
    """Return in how many parts a chunk is judged: two for pipelines, times what block groups divide by."""
    blocks = [block for one in plan.ranks for block in one.blocks]
    actions = [inner for block in blocks for action in block.actions for inner in (action, *action.body)]
    units = {(action.unit_bytes, action.num_chunks) for action in actions if action.body}
    if len({unit for unit, _ in units}) > 1:
        problem = "expected pipelines of one unit_size, got several, which take different numbers of turns"
        raise Refused(Refusal("form", -1, -1, -1, f"{problem}; make them equal"))
    parts = lcm(*(action.part[1] for action in actions if action.part)) * (2 if any(a.body for a in actions) else 1)
    if parts > MOST_PARTS:
        problem = (
            f"expected block groups that divide a chunk in at most {MOST_PARTS} parts, got {parts}; use other groups"
        )
        raise Refused(Refusal("form", -1, -1, -1, problem))
    return parts


class _Use(NamedTuple):
    """An event that signals, waits, acquires or releases, and its block."""

    block: tuple[int, int]
    event: int


@dataclass(slots=True)
class _Lane:
    """A block while it is read: its first thread, the last event that brought threads together, and what came since."""

    first: int
    last: int | None = None
    since: list[int] = field(default_factory=list)
    control: int | None = None  # the last event at all: the executor does not begin an operation before it


@dataclass(slots=True)
class _Translation:
    plan: Plan
    execution: Execution
    memory: Memory
    signals: dict[Channel, list[_Use]] = field(default_factory=lambda: defaultdict(list))
    waits: dict[Channel, list[_Use]] = field(default_factory=lambda: defaultdict(list))
    releases: dict[tuple[int, int], list[_Use]] = field(default_factory=lambda: defaultdict(list))
    acquires: dict[tuple[int, int], list[_Use]] = field(default_factory=lambda: defaultdict(list))
    meetings: dict[tuple[int, int, int], list[tuple[int, Action]]] = field(default_factory=lambda: defaultdict(list))
    relaxed: set[int] = field(default_factory=set)

    def add_block(self, rank: int, index: int, block: PlanBlock) -> None:
        lane, widest = _Lane(self.execution.num_threads), [1]
        for step, action in enumerate(block.actions):
            for iteration in _iterations(action):
                for inner in action.body or (action,):
                    self._add(lane, Where(rank, index, step, _chunk(inner), inner.name), block, inner, iteration)
                    widest.append(len(lane.since) + 1)
        self.execution.num_threads += max(widest)

    def connect(self) -> None:
        """Order waits after signals, acquires after releases, barriers, and packets' readers after their writers."""
        for channel, signals in sorted(self.signals.items()):
            self._match(
                signals, self.waits.pop(self._other_end(channel), []), 0, f"channel {channel[2]} of {channel[1]}"
            )
        for channel, waits in self.waits.items():
            problem = f"waits on channel {channel[2]} of {channel[1]}, whose other end signals nothing; add a signal"
            raise Refused(at(self.execution.events[waits[0].event], "deadlock", problem))
        for (rank, semaphore), acquires in sorted(self.acquires.items()):
            ready = self.plan.ranks[rank].semaphores[semaphore]
            self._match(self.releases[rank, semaphore], acquires, ready, f"semaphore {semaphore}")
        for (rank, number, _), arrivals in sorted(self.meetings.items()):
            self._meet(rank, number, arrivals)
        for cell, readers in self.memory.readers.items():
            self._flag(cell, readers)

    def end(self) -> None:
        """End each rank after all its events: what its output is due to hold has to be there by then."""
        for rank in range(self.plan.num_ranks):
            numbers = [number for number, event in enumerate(self.execution.events) if event.where.rank == rank]
            due = [cell for cell in self.execution.afterwards if self.execution.names[cell].rank == rank]
            last = max((self.execution.events[number].where.step for number in numbers), default=0)
            reads = tuple(Assignment((), (cell,)) for cell in due)
            where = Where(rank, -1, last, 0, "the end")
            self.execution.events.append(Event(where, self.execution.num_threads, reads, numbers, is_end=True))
            self.execution.num_threads += 1

    def _add(self, lane: _Lane, where: Where, block: PlanBlock, action: Action, iteration: Iteration | None) -> None:
        number = len(self.execution.events)
        joins = action.name in ("nop", "barrier")
        after = [*([lane.last] if lane.last is not None else []), *(lane.since if joins else ())]
        thread = lane.first + (0 if joins else len(lane.since))
        control = () if lane.control is None or lane.control in after else (lane.control,)
        assignments = (
            tuple(self.memory.assignments(where, block, action, iteration, number)) if action.name in DATA else ()
        )
        self.execution.events.append(Event(where, thread, assignments, after, control=control))
        self._synchronise(where, block, action, number)
        if joins:
            lane.last, lane.since = number, []
        else:
            lane.since.append(number)
        lane.control = number
        if action.channel_type == "port" and action.name == "signal":
            self._after_puts(lane, number)

    def _after_puts(self, lane: _Lane, number: int) -> None:
        """Order a signal of a port behind the puts before it: the port hands them on one after the other."""
        puts = [
            one for one in lane.since[:-1] if self.execution.events[one].where.text in ("put", "pws", "pwsf", "rppkt")
        ]
        self.execution.events[number].after.extend(puts)

    def _synchronise(self, where: Where, block: PlanBlock, action: Action, number: int) -> None:
        use = _Use((where.rank, where.block), number)
        name = action.name
        if name in ("signal", "rlxsignal", "wait", "rlxwait", "pws", "pwsf"):
            if not action.channels:
                refuse(where, "expected channels, got none; name some")
            if name.startswith("rlx"):
                self.relaxed.add(number)
            table = self.waits if name.endswith("wait") else self.signals
            for position in action.channels:
                table[where.rank, action.channel_type, self._channel(where, block, action, position)].append(use)
        if name in ("sem_acquire", "sem_release"):
            table = self.acquires if name == "sem_acquire" else self.releases
            for semaphore in action.semaphores:
                listed(where, "semaphore of the rank", self.plan.ranks[where.rank].semaphores, semaphore)
                table[where.rank, semaphore].append(use)
        if name == "barrier" and action.barrier:
            earlier = sum(
                any(self.execution.events[n].where[:2] == where[:2] for n, _ in arrivals)
                for (rank, barrier, _), arrivals in self.meetings.items()
                if (rank, barrier) == (where.rank, action.barrier[0])
            )
            self.meetings[where.rank, action.barrier[0], earlier].append((number, action))

    def _channel(self, where: Where, block: PlanBlock, action: Action, position: int) -> int:
        """Return the number of a block's channel, which the rank has, to a rank that there is."""
        kind = action.channel_type
        number = listed(where, f"{kind} channel of the block", block.channels.get(kind, ()), position)
        peer = listed(where, f"{kind} channel of the rank", self.plan.ranks[where.rank].peers.get(kind, ()), number)
        listed(where, "rank", self.plan.ranks, peer)
        return number

    def _match(self, givers: list[_Use], takers: list[_Use], ready: int, what: str) -> None:
        """Order the k-th of the takers behind the (k - ready)-th of the givers."""
        events = self.execution.events
        for uses in (givers, takers):
            if len({use.block for use in uses}) > 1:
                problem = f"expected one block at {what}, got several; whose turn it is cannot be known: use one each"
                raise Refused(at(events[uses[-1].event], "form", problem))
        if len(takers) > len(givers) + ready or (not ready and len(takers) < len(givers)):
            problem = f"expected as many waits as signals at {what}, got {len(takers)} and {len(givers) + ready}"
            raise Refused(at(events[(takers or givers)[-1].event], "deadlock", f"{problem}; add what is missing"))
        for taker, giver in zip(takers[ready:], givers, strict=False):
            one = events[taker.event]
            if taker.event in self.relaxed or giver.event in self.relaxed:
                events[taker.event] = one._replace(relaxed=(*one.relaxed, giver.event))
            else:
                one.after.append(giver.event)

    def _meet(self, rank: int, number: int, arrivals: list[tuple[int, Action]]) -> None:
        """Let no block leave a barrier before all have come: an event between what each did before and does after."""
        events = self.execution.events
        first, action = arrivals[0]
        wanted = action.barrier[1] if action.barrier else 0
        if any(a.barrier != action.barrier for _, a in arrivals) or len(arrivals) != wanted:
            problem = f"expected {wanted} blocks at barrier {number}, got {len(arrivals)}; correct num_threadblocks"
            raise Refused(at(events[first], "deadlock", f"{problem}, or add the missing ones"))
        everything = [earlier for event, _ in arrivals for earlier in events[event].after]
        for event, _ in arrivals:
            others = set(everything) - set(events[event].after)
            events[event].after.extend(sorted(others))

    def _flag(self, cell: int, readers: list[int]) -> None:
        events, writers = self.execution.events, self.memory.writers.get(cell, [])
        if len(writers) != 1:
            problem = f"expected one step that writes the packets of {self.execution.name(cell)}, got {len(writers)}"
            advice = "readers take the first that comes" if writers else "the reader waits for ever"
            raise Refused(at(events[readers[0]], "race" if writers else "deadlock", f"{problem}; {advice}: mend it"))
        for reader in readers:
            if writers[0] != reader and writers[0] not in events[reader].after:
                events[reader].after.append(writers[0])

    def _other_end(self, channel: Channel) -> Channel:
        """Return the channel at the other end: the j-th from a to b meets the j-th from b to a."""
        rank, kind, number = channel
        peers = self.plan.ranks[rank].peers[kind]
        nth, peer = peers[:number].count(peers[number]), peers[number]
        back = [i for i, one in enumerate(self.plan.ranks[peer].peers.get(kind, ())) if one == rank]
        return (peer, kind, back[nth] if nth < len(back) else -1)


def _iterations(action: Action) -> list[Iteration | None]:
    return [Iteration(turn, action.num_chunks) for turn in range(2 * action.num_chunks)] if action.body else [None]


def _chunk(action: Action) -> int:
    spans = action.targets or action.sources
    return spans[0].first if spans else 0
