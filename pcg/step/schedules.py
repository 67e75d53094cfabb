"""Pipeline schedules: the order in which a stage runs forward and backward of microbatches through its chunks.

p stages, v chunks on each, m microbatches; chunk c of stage s is virtual stage c·p + s.

gpipe         all forwards, then all backwards
1f1b          p − 1 − s forwards, then one forward and one backward in turn
eager-1f1b    1f1b with twice the forwards before the first backward, which hides sends of up to half the time
              that a microbatch takes on a stage
interleaved   1f1b over chunks, p microbatches through one chunk after the other
zero-bubble   1f1b whose backward is in two parts; the part for weights' gradients is put off by s microbatches,
              into idle time (ZB-H1)

schedule      in flight on stage s                              bubble
gpipe         m                                                 (p − 1) / m
1f1b          min(m, p − s)                                     (p − 1) / m
eager-1f1b    min(m, 2·(p − s) − 1)                             (p − 1) / m
interleaved   min(v·m, 2·(p − 1 − s) + (v − 1)·min(p, m) + 1)   (p − 1) / (v·m)
zero-bubble   min(m, p)                                         (p − 1) / (3·m), with equal parts

In flight: how many (chunk, microbatch) have done forward and not yet all of backward; the values kept for
these exist at the same time. Bubble: idle time over the work of a stage, where stages are equal, sends free and m ≥ p.
Interleaving needs a multiple of p microbatches, or fewer than p. With a shorter last group its order may have a cycle;
with groups of more than p it may have one where sends wait for their receives.

Sources: Huang et al., "GPipe" (2019); Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM" (2021), section 2.2, and its forward_backward_pipelining_with_interleaving; Zhuang et al., "On
Optimizing the Communication of Model Parallelism" (2022), eager-1F1B; Qi et al., "Zero Bubble Pipeline Parallelism"
(2023), section 2.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import Literal, NamedTuple

from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.pipelining import Schedule, ScheduleName
from shardwright.pcg.step.verbs import Verb
from shardwright.pcg.types import TensorType

Phase = Literal["forward", "backward", "weights"]
"""The phases of a microbatch. Where backward is in two parts, "backward" is the first and "weights" the second."""


class Item(NamedTuple):
    """The work of a stage for a microbatch in a chunk, in a direction."""

    chunk: int
    microbatch: int
    direction: Phase

    def __str__(self) -> str:
        return f"{self.direction} of microbatch {self.microbatch} through chunk {self.chunk}"


Place = tuple[int, Item]
"""A stage, and an item of it."""


def one_by_one(items: Iterable[Item]) -> list[Item]:
    """Sort items so that each microbatch passes through all that a stage does before the next one begins.

    If every stage has this order, an item that a stage waits for never waits for a later item of that stage.
    """
    turns = {"forward": (0, 1), "backward": (1, -1), "weights": (2, -1)}  # when, and which way through chunks

    def place(item: Item) -> tuple[int, int, int]:
        turn, way = turns[item.direction]
        return item.microbatch, turn, way * item.chunk

    return sorted(items, key=place)


def phases(name: ScheduleName) -> tuple[Phase, ...]:
    """Return the phases that every microbatch goes through in every chunk, in order."""
    return ("forward", "backward", "weights") if name == "zero-bubble" else ("forward", "backward")


def in_two(name: ScheduleName, received: Iterable[TensorType]) -> bool:
    """Return whether the backward of a virtual stage that receives these values has two parts.

    It has one if none of them gets a gradient, as in the first stage, because no stage waits for that.
    """
    return "weights" in phases(name) and any(kind.grad for kind in received)


def orders(schedule: Schedule, num_microbatches: int) -> list[list[Item]]:
    """Return the items of every stage, in order.

    Some forwards come first. Then the other forwards, the backwards and their second parts take turns; the second parts
    are put off by the stage's number.
    """
    p, v, m = schedule.num_stages, schedule.chunks_per_stage, num_microbatches
    groups = [range(start, min(start + p, m)) for start in range(0, m, p)]
    forward = [Item(chunk, i, "forward") for group in groups for chunk in range(v) for i in group]
    backward = [Item(v - 1 - item.chunk, item.microbatch, "backward") for item in forward]
    weights = [item._replace(direction="weights") for item in backward if _is_split(schedule)]
    by_stage = list[list[Item]]()
    for stage in range(p):
        ahead = _ahead(schedule, num_microbatches, stage)
        in_turn = zip_longest(forward[ahead:], backward, [None] * stage + weights)
        by_stage.append(forward[:ahead] + [item for turn in in_turn for item in turn if item is not None])
    return by_stage


def _ahead(schedule: Schedule, num_microbatches: int, stage: int) -> int:
    """Return the number of forwards before the first forward that has a backward after it."""
    p, v, m = schedule.num_stages, schedule.chunks_per_stage, num_microbatches
    later = p - 1 - stage
    ahead: dict[ScheduleName, int] = {
        "gpipe": m,
        "1f1b": later,
        "eager-1f1b": 2 * later,
        "interleaved": 2 * later + (v - 1) * min(p, m),
        "zero-bubble": later,
    }
    return min(ahead[schedule.name], v * m)


def _is_split(schedule: Schedule) -> bool:
    return "weights" in phases(schedule.name)


# ------------------------------------------------------------------------------------------------ between the stages


class Transfer(NamedTuple):
    """An action between stages: what an item needs arrives ("receive"), or what it gives leaves ("send").

    item            of the stage that does it; `reader`: the item that reads what is sent, on either stage
    boundary        the number of the virtual stage before it; values go forward over it, gradients back
    source, target  the stage that sends, and the one that receives
    """

    verb: Verb
    item: Item
    reader: Item
    boundary: int
    source: int
    target: int

    @property
    def channel(self) -> tuple[Phase, int, int]:
        """The direction and both stages: transfers that agree in these are received in the order of their sends."""
        return self.item.direction, self.source, self.target

    def of(self, microbatch: int) -> Transfer:
        """Return the same transfer of another microbatch."""
        item, reader = (each._replace(microbatch=microbatch) for each in (self.item, self.reader))
        return self._replace(item=item, reader=reader)


def ends(number: int, num_stages: int) -> tuple[int, int]:
    """Return the stages of a virtual stage and of the next one; values go forward between them, gradients back."""
    return number % num_stages, (number + 1) % num_stages


def with_transfers(items: Iterable[Item], stage: int, schedule: Schedule) -> Iterator[Item | Transfer]:
    """Yield a stage's items, each between its transfers: of values on the way forward, of gradients on the way back."""
    known = dict[tuple[int, Phase], tuple[list[Transfer], list[Transfer]]]()  # alike for all microbatches
    for item in items:
        way = item.chunk, item.direction
        before, after = known.get(way) or known.setdefault(way, _transfers(item, stage, schedule))
        yield from (one.of(item.microbatch) for one in before)
        yield item
        yield from (one.of(item.microbatch) for one in after)


def _transfers(item: Item, stage: int, schedule: Schedule) -> tuple[list[Transfer], list[Transfer]]:
    """Return the transfers before and after an item."""
    given, before = source(item, stage, schedule.num_stages, schedule.chunks_per_stage), list[Transfer]()
    if given is not None and given[0] != stage:
        before.append(Transfer("receive", item, item, _boundary(item, stage, schedule, received=True), given[0], stage))
    sent = send(item, stage, schedule)
    return before, [] if sent is None else [sent]


def send(item: Item, stage: int, schedule: Schedule) -> Transfer | None:
    """Return the transfer of an item's result to the stage that reads it; None: no other stage does."""
    read = target(item, stage, schedule.num_stages, schedule.chunks_per_stage)
    if read is None or read[0] == stage:
        return None
    return Transfer("send", item, read[1], _boundary(item, stage, schedule, received=False), stage, read[0])


def _boundary(item: Item, stage: int, schedule: Schedule, *, received: bool) -> int:
    """Return the number of the virtual stage before the boundary over which an item receives or sends."""
    number = item.chunk * schedule.num_stages + stage
    return number if received == (item.direction == "backward") else number - 1


def source(item: Item, stage: int, num_stages: int, num_chunks: int) -> Place | None:
    """Return the item that has to end before this one can begin; None: none, as it reads the batch."""
    if item.direction == "weights":
        return stage, item._replace(direction="backward")
    if item.direction == "forward":
        return _along(item, stage, -1, num_stages, num_chunks)
    return _along(item, stage, 1, num_stages, num_chunks) or (stage, item._replace(direction="forward"))


def target(item: Item, stage: int, num_stages: int, num_chunks: int) -> Place | None:
    """Return the item of the next virtual stage that reads this one's result; None: none."""
    if item.direction == "weights":
        return None
    return _along(item, stage, 1 if item.direction == "forward" else -1, num_stages, num_chunks)


def _along(item: Item, stage: int, step: int, num_stages: int, num_chunks: int) -> Place | None:
    """Return the item of the same microbatch and direction, `step` virtual stages on."""
    chunk, next_stage = divmod(item.chunk * num_stages + stage + step, num_stages)
    return (next_stage, Item(chunk, item.microbatch, item.direction)) if 0 <= chunk < num_chunks else None


class Line(NamedTuple):
    """The starts or the ends of a stage's items in one chunk and direction, and the microbatches `seen` so far.

    An item ends when its result has been sent.
    """

    kind: Literal["start", "end"]
    stage: int
    chunk: int
    direction: Phase
    seen: set[int]

    def of(self, microbatch: int) -> str:
        return f"the {self.kind} of {Item(self.chunk, microbatch, self.direction)} on stage {self.stage}"


class StageEvent(NamedTuple):
    """The next event on a stage, an item's start or end; `microbatch` must have passed `cause` before it."""

    cause: Line | None
    microbatch: int
    line: Line
    item: Item

    def __str__(self) -> str:
        return self.line.of(self.item.microbatch)


def progress(lists: Sequence[Sequence[Item]], schedule: Schedule, *, blocking: bool = False) -> Iterator[Place]:
    """Yield all items of all stages, each after the items that it needs.

    Args:
        lists: the items of every stage, in order.
        schedule: says how many stages and chunks there are.
        blocking: a send waits until its receive is posted. A stage posts the next receive of a channel (a stage that
            sends, one that receives, and a direction) when an item begins with what the last one has brought; the first
            is posted when the step begins. Otherwise a send never waits.

    Raises:
        PlanError: a stage waits for ever.
    """
    lines = dict[tuple[object, ...], Line]()
    courses = [_course(stage, items, schedule, blocking, lines) for stage, items in enumerate(lists)]
    nexts, goes_on = [next(course, None) for course in courses], True
    while any(nexts):
        if not goes_on:
            raise PlanError(f"schedule: {_cycle(nexts)}; the orders have a cycle")
        goes_on = False
        for stage, course in enumerate(courses):
            while (step := nexts[stage]) is not None:
                cause, microbatch, line, item = step
                if cause is not None and microbatch not in cause.seen:
                    break
                line.seen.add(item.microbatch)
                nexts[stage], goes_on = next(course, None), True
                if line.kind == "end":
                    yield stage, item


def _cycle(nexts: Sequence[StageEvent | None]) -> str:
    """Return in words what one stage waits for, among stages that wait for each other."""
    stuck = {stage: step for stage, step in enumerate(nexts) if step is not None}
    stage = min(stuck)
    for _ in stuck:
        cause = stuck[stage].cause
        if cause is not None and cause.stage in stuck:
            stage = cause.stage
    step = stuck[stage]
    awaited = None if step.cause is None else step.cause.of(step.microbatch)
    return f"stage {stage} waits for ever for {awaited} before {step}"


def _course(
    stage: int, items: Sequence[Item], schedule: Schedule, blocking: bool, lines: dict[tuple[object, ...], Line]
) -> Iterator[StageEvent]:
    """Yield the events on a stage, in order, each with the event on another stage that must precede it."""
    shape = schedule.num_stages, schedule.chunks_per_stage

    def line(kind: Literal["start", "end"], place: Place) -> Line:
        stage, (chunk, _, direction) = place
        return lines.setdefault((kind, stage, chunk, direction), Line(kind, stage, chunk, direction, set()))

    ways = dict[tuple[int, Phase], tuple[Line | None, Line, Line, Line | None]]()
    last = dict[tuple[int, Phase], tuple[Line, int]]()  # by channel, the item that reads the last value sent
    for item in items:
        chunk, microbatch, direction = item
        if (way := ways.get((chunk, direction))) is None:
            given, read = source(item, stage, *shape), target(item, stage, *shape)
            way = ways[chunk, direction] = (
                line("end", given) if given is not None else None,
                line("start", (stage, item)),
                line("end", (stage, item)),
                line("start", read) if read is not None and read[0] != stage else None,
            )
        cause, start, end, reader = way
        number = microbatch
        if blocking:
            yield StageEvent(cause, number, start, item)
            cause = None
            if reader is not None:
                channel = reader.stage, direction
                cause, number = last.get(channel, (None, number))
                last[channel] = reader, microbatch
        yield StageEvent(cause, number, end, item)


# ---------------------------------------------------------------------------------------------------------- in flight


def most_in_flight(schedule: Schedule, num_microbatches: int, stage: int) -> int:
    """Return how many (chunk, microbatch) are in flight on a stage at most; over its chunks, how many microbatches."""
    put_off = stage if _is_split(schedule) else 0
    return min(schedule.chunks_per_stage * num_microbatches, _ahead(schedule, num_microbatches, stage) + 1 + put_off)


def in_flight(items: Sequence[Item], schedule: Schedule) -> int:
    """Return the same, counted in an order of items."""
    changes = {"forward": 1, phases(schedule.name)[-1]: -1}
    return max(accumulate(changes.get(item.direction, 0) for item in items))


# ------------------------------------------------------------------------------------------------------------- proofs


def check(lists: Sequence[Sequence[Item]], schedule: Schedule, num_microbatches: int) -> None:
    """Prove that stages can run these lists of items.

    * Complete: every microbatch goes through every phase of every chunk once.
    * In order: a phase of a chunk has microbatches in order, so gradients are added up in order; phases of a microbatch
      in their own order would be a cycle otherwise.
    * First in, first out: what a stage sends to another in a direction is received there in the order of the sends.
    * Free of deadlock where sends wait for receives (`progress`), and so where they do not, as stages then wait for
      less.
    * Within memory: no more is in flight than `most_in_flight` allows.

    Raises:
        PlanError: the lists cannot run; it names a stage and the reason.
    """
    if len(lists) != schedule.num_stages:
        raise PlanError(f"schedule: expected an order for each of {schedule.num_stages} stages, got {len(lists)}")
    _check_complete(lists, schedule, num_microbatches)
    _check_channels(lists, schedule)
    deque(progress(lists, schedule, blocking=True), maxlen=0)
    for stage, items in enumerate(lists):
        if (most_found := in_flight(items, schedule)) > (most := most_in_flight(schedule, num_microbatches, stage)):
            problem = f"stage {stage} has {most_found} microbatches in flight, {schedule.name} at most {most}"
            raise PlanError(f"schedule: {problem}; run backwards earlier")


def _check_complete(lists: Sequence[Sequence[Item]], schedule: Schedule, num_microbatches: int) -> None:
    wanted = dict[tuple[int, Phase], list[Item]]()
    for chunk in range(schedule.chunks_per_stage):
        for phase in phases(schedule.name):
            wanted[chunk, phase] = [Item(chunk, i, phase) for i in range(num_microbatches)]
    for stage, items in enumerate(lists):
        items_of = defaultdict[tuple[int, Phase], list[Item]](list)
        for item in items:
            items_of[item.chunk, item.direction].append(item)
        for way, expected in wanted.items():
            _check_equal(items_of.pop(way, []), expected, f"stage {stage}")
        _check_equal([item for rest in items_of.values() for item in rest], [], f"stage {stage}")


def _check_channels(lists: Sequence[Sequence[Item]], schedule: Schedule) -> None:
    sent, received = (defaultdict[tuple[Phase, int, int], list[Item]](list) for _ in range(2))
    for stage, items in enumerate(lists):
        for each in with_transfers(items, stage, schedule):
            if isinstance(each, Transfer):
                (sent if each.verb == "send" else received)[each.channel].append(each.reader)
    for channel in received:
        _check_equal(received[channel], sent[channel], "channel of {} from stage {} to stage {}".format(*channel))


def _check_equal(items: Sequence[Item], wanted: Sequence[Item], where: str) -> None:
    for got, expected in zip_longest(items, wanted) if items != wanted else ():
        if got != expected:
            raise PlanError(f"schedule: {where}: expected {expected or 'no more'}, got {got or 'no more'}")
