"""The judge of everything that runs concurrently: events, what orders them, and what they read and write.

An event adds cells and stores the sum in cells; a message is cells of its own. Events are ordered by *happens-before*:
each names those that end before it begins. The relation is proven on, not sampled:

    no cycle                                      else something waits for itself, and blocks
    of two accesses to a cell, one a write, one happens before the other         else they race
    so the result is the same in every order, and one order shows it

Races are found with vector clocks in one walk: an event's clock says, for every thread, how many of its events happen
before. It is enough to compare an access with the last write and the reads since, because those were compared before.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardwright.verifier.collectives.values import Value, added
from shardwright.verifier.collectives.verdict import MOST_REFUSALS, Fault, Refusal, Refused

MOST_EVENTS = 1 << 20
MOST_ASSIGNMENTS = 1 << 22
MOST_CELLS = 1 << 21
MOST_CLOCKS = 1 << 31
"""Events times threads: the work of comparing clocks."""


class Where(NamedTuple):
    """The place of an event in what is judged; `chunk`: the first of the chunks, as the step counts them."""

    rank: int
    block: int
    step: int
    chunk: int
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank}, block {self.block}, step {self.step} ({self.text})"


class Name(NamedTuple):
    """A cell for people: where it is, and its name there."""

    rank: int
    text: str

    def __str__(self) -> str:
        return f"{self.text} of rank {self.rank}"


class Assignment(NamedTuple):
    """The sum of what `sources` hold goes to all `targets`."""

    targets: tuple[int, ...]
    sources: tuple[int, ...]


class Event(NamedTuple):
    """Something that happens at one place, in one go.

    after     the events that end before it begins, by their numbers; what they wrote, it sees
    relaxed   events that end before it begins, without showing what they wrote
    control   events that begin before it does; nothing can block them for ever and let it go on
    is_end    it ends a rank's program: what it reads only has to be there
    """

    where: Where
    thread: int
    assignments: tuple[Assignment, ...]
    after: list[int]
    relaxed: tuple[int, ...] = ()
    control: tuple[int, ...] = ()
    is_end: bool = False

    @property
    def waits_for(self) -> tuple[int, ...]:
        return (*self.after, *self.relaxed, *self.control)


@dataclass(slots=True)
class Execution:
    """Events, in the order of each thread, and the memory that they share.

    Attributes:
        before, afterwards: what cells hold before, and must hold afterwards.
        names: of cells, for people; a message has none.
        queues: of each connection the events that send, and those that receive.
    """

    num_threads: int
    events: list[Event] = field(default_factory=list)
    before: dict[int, Value] = field(default_factory=dict)
    afterwards: dict[int, Value] = field(default_factory=dict)
    names: dict[int, Name] = field(default_factory=dict)
    queues: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def name(self, cell: int) -> str:
        return str(self.names.get(cell, "a message"))


def judge(execution: Execution) -> None:
    """Raise `Refused` unless no event can block, none race, and the result is the one that is due."""
    _check_size(execution)
    order = ordered(execution)
    _check_races(execution, order)
    _check_result(execution, order)


def ordered(execution: Execution) -> list[int]:
    """Return the events so that each stands after all that happen before it; refuse a circle of waits."""
    order = topological([event.waits_for for event in execution.events])
    if len(order) == len(execution.events):
        return order
    circle = _circle(execution, set(order))
    text = ", which waits for ".join(str(event.where) for event in [*circle, circle[0]])
    raise Refused(at(circle[0], "deadlock", f"{text}: none of them can begin; remove one of the waits"))


def topological(after: Sequence[Iterable[int]]) -> list[int]:
    """Return numbers in an order in which each stands behind those it comes after; those in circles are left out."""
    waiting, followers = [0] * len(after), [list[int]() for _ in after]
    for number, earlier in enumerate(after):
        for one in earlier:
            followers[one].append(number)
            waiting[number] += 1
    ready, order = deque(number for number, count in enumerate(waiting) if not count), list[int]()
    while ready:
        order.append(number := ready.popleft())
        for follower in followers[number]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    return order


def at(event: Event, fault: Fault, problem: str) -> Refusal:
    """Return a refusal at the place of an event."""
    return Refusal(fault, event.where.rank, event.where.step, event.where.chunk, problem)


def _check_size(execution: Execution) -> None:
    events = len(execution.events)
    assignments = sum(len(event.assignments) for event in execution.events)
    if events > MOST_EVENTS or assignments > MOST_ASSIGNMENTS or events * execution.num_threads > MOST_CLOCKS:
        most = f"at most {MOST_EVENTS} steps on {MOST_ASSIGNMENTS} chunks, and {MOST_CLOCKS} steps times blocks"
        got = f"{events} steps on {assignments} chunks in {execution.num_threads} blocks"
        raise Refused(Refusal("form", -1, -1, -1, f"expected {most}, got {got}; judge a smaller one"))


def _circle(execution: Execution, done: set[int]) -> list[Event]:
    """Return events each of which waits for the next, and the last for the first."""
    seen, number = dict[int, int](), next(n for n in range(len(execution.events)) if n not in done)
    while number not in seen:
        seen[number] = len(seen)
        number = next(n for n in execution.events[number].waits_for if n not in done)
    return [execution.events[n] for n in list(seen)[seen[number] :]]


class _Accesses:
    """The last write of a cell, and the last read of each thread since."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: int | None = None
        self.reads: dict[int, int] = {}


_Before = Callable[[int, bool], bool]
"""Whether an event happens before the one at hand, and if asked for, shows it what it wrote."""


def _check_races(execution: Execution, order: Sequence[int]) -> None:
    places, events = _places(execution), execution.events
    memory: Mapping[int, _Accesses] = defaultdict(_Accesses)
    clocks, left = dict[int, np.ndarray](), [0] * len(events)
    for event in events:
        for earlier in (*event.after, *event.relaxed):
            left[earlier] += 1
    for number in order:
        event = events[number]
        clock = np.zeros((2, execution.num_threads), dtype=np.int32)  # what it sees; what ended before it
        for earlier in event.after:
            np.maximum(clock, clocks[earlier], out=clock)
        for earlier in event.relaxed:
            np.maximum(clock[1], clocks[earlier][1], out=clock[1])
        for earlier in (*event.after, *event.relaxed):
            left[earlier] -= 1
            if not left[earlier]:
                del clocks[earlier]

        def happens_before(earlier: int, shown: bool, clock: np.ndarray = clock, number: int = number) -> bool:
            row = clock[0 if shown and not events[number].is_end else 1]
            return earlier == number or bool(places[earlier] < row[events[earlier].thread])

        _check_accesses(execution, number, memory, happens_before)
        if left[number]:
            clock[:, event.thread] = np.maximum(clock[:, event.thread], places[number] + 1)
            clocks[number] = clock


def _places(execution: Execution) -> list[int]:
    """Return the place of each event in its thread; the events of a thread happen in their order."""
    counts, places = [0] * execution.num_threads, list[int]()
    for event in execution.events:
        places.append(counts[event.thread])
        counts[event.thread] += 1
    return places


def _check_accesses(
    execution: Execution, number: int, memory: Mapping[int, _Accesses], happens_before: _Before
) -> None:
    event = execution.events[number]
    _check_inside(execution, event)
    for assignment in event.assignments:
        for cell in assignment.sources:
            accesses = memory[cell]
            if accesses.write is not None and not happens_before(accesses.write, True):
                raise Refused(_race(execution, accesses.write, number, cell, "writes", "reads"))
            accesses.reads[event.thread] = number
    for assignment in event.assignments:
        for cell in assignment.targets:
            accesses = memory[cell]
            if accesses.write is not None and not happens_before(accesses.write, True):
                raise Refused(_race(execution, accesses.write, number, cell, "writes", "writes"))
            for earlier in accesses.reads.values():
                if not happens_before(earlier, False):
                    raise Refused(_race(execution, earlier, number, cell, "reads", "writes"))
            accesses.write, accesses.reads = number, {}


def _check_inside(execution: Execution, event: Event) -> None:
    """Refuse an event whose chunks overwrite each other: they are moved in any order."""
    if len(event.assignments) < 2:
        return
    written: dict[int, int] = {}
    for index, assignment in enumerate(event.assignments):
        for cell in assignment.targets:
            if cell in written:
                problem = f"{event.where} writes {execution.name(cell)} twice; give each chunk a place of its own"
                raise Refused(at(event, "race", problem))
            written[cell] = index
    for index, assignment in enumerate(event.assignments):
        for cell in assignment.sources:
            if written.get(cell, index) != index:
                problem = f"{event.where} reads {execution.name(cell)} while it overwrites it; move the ranges apart"
                raise Refused(at(event, "race", problem))


def _race(execution: Execution, earlier: int, later: int, cell: int, did: str, does: str) -> Refusal:
    one, other = execution.events[earlier], execution.events[later]
    problem = f"{one.where} {did} {execution.name(cell)}, {other.where} {does} it, and nothing orders them; add a wait"
    return at(other, "race", problem)


def _check_result(execution: Execution, order: Sequence[int]) -> None:
    memory = dict(execution.before)
    for number in order:
        event = execution.events[number]
        sums = [_sum(execution, event, assignment, memory) for assignment in event.assignments]
        for assignment, value in zip(event.assignments, sums, strict=True):
            for cell in assignment.targets:
                memory[cell] = value
    refusals = list[Refusal]()
    for cell, expected in execution.afterwards.items():
        if (value := memory.get(cell)) != expected and len(refusals) < MOST_REFUSALS:
            refusals.append(_wrong(execution, cell, value, expected))
    if refusals:
        raise Refused(*refusals)


def _sum(execution: Execution, event: Event, assignment: Assignment, memory: Mapping[int, Value]) -> Value:
    missing = next((cell for cell in assignment.sources if cell not in memory), None)
    if missing is not None:
        problem = f"{event.where} reads {execution.name(missing)}, which nothing was written to; write it before"
        raise Refused(at(event, "not there", problem))
    return added([memory[cell] for cell in assignment.sources], f"{event.where}")


def _wrong(execution: Execution, cell: int, value: Value | None, expected: Value) -> Refusal:
    rank = execution.names[cell].rank
    last = max((event.where.step for event in execution.events if event.where.rank == rank), default=-1)
    fault: Fault = "counted twice" if getattr(value, "twice", False) else "incomplete"
    problem = (
        f"{execution.name(cell)}: expected {expected}, got {'nothing' if value is None else value}; mend its steps"
    )
    return Refusal(fault, rank, last, getattr(expected, "chunk", -1), problem)
