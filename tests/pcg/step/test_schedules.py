"""Schedules: proven for all small numbers; what is wrong is found, as a machine with queues finds it; closed forms."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.pipelining import Schedule
from shardwright.pcg.step.schedules import (
    Item,
    Phase,
    Transfer,
    check,
    in_flight,
    most_in_flight,
    one_by_one,
    orders,
    phases,
    progress,
    source,
    target,
    with_transfers,
)
from tests.each import each
from tests.pcg.step.executions import counted, executions, name

Orders = list[list[Item]]


ALL = list(executions(range(1, 9), range(1, 17), range(2, 5)))


def shape(execution: Execution) -> tuple[int, int]:
    return execution.schedule.num_stages, execution.schedule.chunks_per_stage


def table(execution: Execution, stage: int) -> int:
    """What the table of schedules says is in flight."""
    p, m, v = execution.schedule.num_stages, execution.assumed.num_microbatches, execution.schedule.chunks_per_stage
    return {
        "gpipe": m,
        "1f1b": min(m, p - stage),
        "eager-1f1b": min(m, 2 * (p - stage) - 1),
        "interleaved": min(v * m, 2 * (p - 1 - stage) + (v - 1) * min(p, m) + 1),
        "zero-bubble": min(m, p),
    }[execution.schedule.name]


# ----------------------------------------------------------------------------------------------------- what is made


@each("execution", ALL, ids=name)
def test_every_order_is_proven_and_keeps_what_the_table_says(execution: Execution) -> None:
    made = orders(*counted(execution))
    check(made, *counted(execution))
    for stage, items in enumerate(made):
        assert (
            in_flight(items, execution.schedule)
            == most_in_flight(*counted(execution), stage)
            == table(execution, stage)
        )


def test_a_short_one_item_by_item() -> None:
    def text(execution: Execution) -> list[str]:
        return [
            " ".join(f"{i.direction[0]}{i.chunk}{i.microbatch}" for i in items) for items in orders(*counted(execution))
        ]

    two = Execution.of(num_stages=2, num_microbatches=3)
    assert text(two) == ["f00 f01 b00 f02 b01 b02", "f00 b00 f01 b01 f02 b02"]
    assert text(two.having(schedule="gpipe")) == ["f00 f01 f02 b00 b01 b02"] * 2
    assert text(two.having(schedule="eager-1f1b")) == ["f00 f01 f02 b00 b01 b02", "f00 b00 f01 b01 f02 b02"]
    assert text(two.having(schedule="zero-bubble")) == [
        "f00 f01 b00 w00 f02 b01 w01 b02 w02",
        "f00 b00 f01 b01 w00 f02 b02 w01 w02",
    ]
    assert text(Execution.of(num_stages=2, num_microbatches=2, schedule="interleaved", chunks_per_stage=2)) == [
        "f00 f01 f10 f11 b10 b11 b00 b01",
        "f00 f01 f10 b10 f11 b11 b00 b01",
    ]


# ------------------------------------------------------------------------------------------------- what is sent


def test_transfers_of_two_chunks_on_three_stages() -> None:
    def sent(chunk: int, stage: int, direction: Phase, num_stages: int = 3) -> tuple[int | None, int | None]:
        """The stages that an item receives from and sends to, if any, over boundaries that it touches."""
        item, schedule = Item(chunk, 7, direction), Schedule("interleaved", num_stages, chunks_per_stage=2)
        own = [t for t in with_transfers([item], stage, schedule) if isinstance(t, Transfer)]
        assert all(t.item == item and t.item.microbatch == t.reader.microbatch for t in own)
        assert {t.boundary for t in own} <= {chunk * num_stages + stage - 1, chunk * num_stages + stage}
        ends = {t.verb: t.source if t.verb == "receive" else t.target for t in own}
        return ends.get("receive"), ends.get("send")

    assert [sent(c, s, "forward") for c in (0, 1) for s in range(3)] == [
        (None, 1), (0, 2), (1, 0), (2, 1), (0, 2), (1, None),
    ]  # fmt: skip
    assert [sent(c, s, "backward") for c in (1, 0) for s in (2, 1, 0)] == [
        (None, 1), (2, 0), (1, 2), (0, 1), (2, 0), (1, None),
    ]  # fmt: skip
    assert {sent(c, s, "weights") for c in (0, 1) for s in range(3)} == {(None, None)}
    assert {sent(c, 0, way, num_stages=1) for c in (0, 1) for way in ("forward", "backward")} == {(None, None)}


@each("execution", ALL[::7], ids=name)
def test_what_is_sent_is_received(execution: Execution) -> None:
    """By the other stage, over the same boundary, right before the item that reads it."""
    sent, received = set[Transfer](), set[Transfer]()
    for stage, items in enumerate(orders(*counted(execution))):
        found = list(with_transfers(items, stage, execution.schedule))
        assert [own for own in found if isinstance(own, Item)] == items
        for own, following in pairwise([*found, None]):
            if isinstance(own, Transfer):
                assert stage == (own.source if own.verb == "send" else own.target)
                assert own.verb == "send" or following == own.item == own.reader
                (sent if own.verb == "send" else received).add(own._replace(verb="receive", item=own.reader))
    assert sent == received


@each("execution", ALL[::7], ids=name)
def test_who_reads_an_item_has_it_as_its_source(execution: Execution) -> None:
    for stage, items in enumerate(orders(*counted(execution))):
        for item in items:
            given, read = source(item, stage, *shape(execution)), target(item, stage, *shape(execution))
            if read is not None:
                assert source(read[1], read[0], *shape(execution)) == (stage, item)
            if given is not None and given[1].direction == item.direction:
                assert target(given[1], given[0], *shape(execution)) == (stage, item)


# ------------------------------------------------------------------------------------------------------- how long


def step_s(execution: Execution, hop_s: float = 0.0) -> tuple[float, list[float]]:
    """A step whose forward through a stage takes 1 and backward 2; also how long each stage is at work and waits."""
    of_stage = 1 / execution.schedule.chunks_per_stage
    clocks, ended = [0.0] * execution.schedule.num_stages, dict[tuple[int, Item], float]()
    first = dict[int, float]()
    for stage, item in progress(orders(*counted(execution)), execution.schedule):
        given = source(item, stage, *shape(execution))
        there = 0.0 if given is None else ended[given] + hop_s * (given[0] != stage)
        seconds = of_stage * (1 if item.direction == "forward" or len(phases(execution.schedule.name)) == 3 else 2)
        start = max(clocks[stage], there)
        first.setdefault(stage, start)
        clocks[stage] = ended[stage, item] = start + seconds
    return max(clocks), [clocks[stage] - first[stage] for stage in range(execution.schedule.num_stages)]


@each("execution", [e for e in ALL if e.assumed.num_microbatches >= e.schedule.num_stages], ids=name)
def test_bubbles_over_ideal(execution: Execution) -> None:
    p, m, v = execution.schedule.num_stages, execution.assumed.num_microbatches, execution.schedule.chunks_per_stage
    share = {"interleaved": (p - 1) / (v * m), "zero-bubble": (p - 1) / (3 * m)}.get(
        execution.schedule.name, (p - 1) / m
    )
    assert step_s(execution)[0] / (3 * m) - 1 == pytest.approx(share)


@each("hop_s", [0.0, 0.5, 1.0, 1.5])
def test_eager_sends_are_hidden_in_steady_state(hop_s: float) -> None:
    """Up to half of a microbatch's time."""
    for p in (2, 3, 4, 8):
        run = Execution.of(num_stages=p, num_microbatches=4 * p, schedule="eager-1f1b")
        assert step_s(run, hop_s)[0] == pytest.approx(3 * 4 * p + (p - 1) * (3 + 2 * hop_s))
        assert (step_s(run.having(schedule="1f1b"), hop_s)[0] > step_s(run, hop_s)[0]) == (hop_s > 0)


# ------------------------------------------------------------------------------------------------- what is wrong


def is_sound(lists: Orders, execution: Execution) -> bool:
    """Whether `check` should pass: counted, and run on a machine of stages with queues between them."""
    microbatches, chunks = range(execution.assumed.num_microbatches), range(execution.schedule.chunks_per_stage)
    wanted = Counter(Item(c, i, way) for c in chunks for i in microbatches for way in phases(execution.schedule.name))
    for stage, items in enumerate(lists):
        ways = {(c, way): [i.microbatch for i in items if (i.chunk, i.direction) == (c, way)] for c, _, way in wanted}
        kept = peak = 0
        for item in items:
            kept += {"forward": 1, phases(execution.schedule.name)[-1]: -1}.get(item.direction, 0)
            peak = max(peak, kept)
        if Counter(items) != wanted or any(w != sorted(w) for w in ways.values()) or peak > table(execution, stage):
            return False
    return all(is_run(lists, execution, posted) for posted in (1, 10**6))


def is_run(lists: Orders, execution: Execution, posted: int) -> bool:
    """Whether all ends, with this many receives of a channel posted ahead."""
    p, last = execution.schedule.num_stages, execution.schedule.num_virtual_stages - 1
    queues = defaultdict[tuple[int, int, str], deque[tuple[int, int]]](deque)
    room = defaultdict[tuple[int, int, str], int](lambda: posted)
    todo = [deque(items) for items in lists]
    done = [set[Item]() for _ in lists]
    sending: list[tuple[tuple[int, int, str], tuple[int, int]] | None] = [None] * p

    def act(stage: int) -> bool:
        if (message := sending[stage]) is not None:
            if not room[message[0]]:
                return False
            room[message[0]] -= 1
            queues[message[0]].append(message[1])
            sending[stage] = None
            return True
        if not todo[stage]:
            return False
        chunk, microbatch, way = item = todo[stage][0]
        virtual, step = chunk * p + stage, {"forward": 1, "backward": -1, "weights": 0}[way]
        own = Item(chunk, microbatch, {"backward": "forward", "weights": "backward"}.get(way, way))  # type: ignore[arg-type]
        if own != item and own not in done[stage]:
            return False
        if step and 0 <= (before := virtual - step) <= last:
            if p == 1:
                if Item(before, microbatch, way) not in done[0]:
                    return False
            else:
                channel = (before % p, stage, way)
                if not queues[channel] or queues[channel][0] != (virtual, microbatch):
                    return False
                queues[channel].popleft()
                room[channel] += 1
        done[stage].add(todo[stage].popleft())
        if step and p > 1 and 0 <= (after := virtual + step) <= last:
            sending[stage] = (stage, after % p, way), (after, microbatch)
        return True

    while any([act(stage) for stage in range(p)]):  # noqa: C419  # every stage acts
        pass
    return not any(todo) and not any(sending)


def passes(lists: Orders, execution: Execution) -> bool:
    try:
        check(lists, *counted(execution))
    except PlanError:
        return False
    return True


def swapped(items: Sequence[Item], first: int, second: int) -> list[Item]:
    found = list(items)
    found[first], found[second] = found[second], found[first]
    return found


@each("execution", ALL[::5], ids=name)
def test_what_is_proven_runs_on_the_machine(execution: Execution) -> None:
    assert is_sound(orders(*counted(execution)), execution)


@each("execution", ALL, ids=name)
def test_one_microbatch_after_the_other_waits_for_nothing_later(execution: Execution) -> None:
    """All lists keep to one order of all items, in which each comes after its source: so they end whatever blocks."""
    stages, chunks = execution.schedule.num_stages, execution.schedule.chunks_per_stage

    def place(stage: int, item: Item) -> tuple[int, int, int]:
        turn = ("forward", "backward", "weights").index(item.direction)
        virtual = item.chunk * stages + stage
        return item.microbatch, turn, -virtual if turn else virtual

    for stage, items in enumerate(orders(*counted(execution))):
        serial = one_by_one(items)
        assert Counter(serial) == Counter(items)
        places = [place(stage, item) for item in serial]
        assert places == sorted(places)
        sources = [source(item, stage, stages, chunks) for item in serial]
        assert all(own is None or place(*own) < at for own, at in zip(sources, places, strict=True))


@each("execution", ALL, ids=name)
def test_steps_without_backward_end(execution: Execution) -> None:
    """Evaluation runs the forwards of a list alone, also where sends wait for their receives."""
    forwards = [[item for item in items if item.direction == "forward"] for items in orders(*counted(execution))]
    many = execution.schedule.num_virtual_stages * execution.assumed.num_microbatches
    assert len(list(progress(forwards, execution.schedule, blocking=True))) == many


@given(st.sampled_from(ALL), st.data())
def test_a_wrong_list_is_refused_and_only_that(execution: Execution, data: st.DataObject) -> None:
    made = orders(*counted(execution))
    stage = data.draw(st.integers(0, len(made) - 1))
    items = made[stage]
    at = st.integers(0, len(items) - 1)
    match data.draw(st.sampled_from(("drop", "duplicate", "swap", "move", "exchange", "mix"))):
        case "drop":
            del items[data.draw(at)]
            assert not passes(made, execution)
        case "duplicate":
            items.insert(data.draw(at), items[data.draw(at)])
            assert not passes(made, execution)
        case "swap":
            first, second = data.draw(at), data.draw(at)
            made[stage] = swapped(items, first, second)
            one, other = items[first], items[second]
            if one != other and ((one.chunk, one.direction) == (other.chunk, other.direction) or one[1] == other[1]):
                assert one.chunk != other.chunk or not passes(made, execution)
        case "move":
            items.insert(data.draw(at), items.pop(data.draw(at)))
        case "exchange":
            other = data.draw(st.integers(0, len(made) - 1))
            alike = made[stage] == made[other] or execution.schedule.name == "zero-bubble"
            made[stage], made[other] = made[other], made[stage]
            assert alike or not passes(made, execution)
        case _:
            items[:] = data.draw(st.permutations(items))
    assert passes(made, execution) == is_sound(made, execution)


def test_what_is_wrong_is_said() -> None:
    run = Execution.of(num_stages=2, num_microbatches=2)
    zero, one = orders(*counted(run))
    crossed = Execution.of(num_stages=2, num_microbatches=2, schedule="interleaved", chunks_per_stage=2)
    first, second = orders(*counted(crossed))
    cases = [
        ([zero], run, "expected an order for each of 2 stages, got 1"),
        ([zero[:-1], one], run, "stage 0: expected backward of microbatch 1 through chunk 0, got no more"),
        ([zero, [*one, one[0]]], run, "stage 1: expected no more, got forward of microbatch 0 through chunk 0"),
        ([[*zero, Item(1, 0, "forward")], one], run, "stage 0: expected no more, got forward of microbatch 0 through"),
        ([[*zero, Item(0, 0, "weights")], one], run, "stage 0: expected no more, got weights of microbatch 0 through"),
        ([swapped(zero, 0, 1), one], run, "stage 0: expected forward of microbatch 0 through chunk 0, got forward of"),
        (
            [first, swapped(second, 1, 2)],
            crossed,
            "channel of forward from stage 0 to stage 1: expected forward of microbatch 1 through chunk 0, got forward",
        ),
        (
            [zero, swapped(one, 0, 1)],
            run,
            "stage 1 waits for ever for the end of forward of microbatch 0 through chunk 0 on stage 1 before the",
        ),
        ([zero, [*one[::2], *one[1::2]]], run, "stage 1 has 2 microbatches in flight, 1f1b at most 1; run backwards"),
    ]
    for lists, execution, message in cases:
        with pytest.raises(PlanError) as error:
            check(lists, *counted(execution))
        assert str(error.value).startswith(f"schedule: {message}")


def test_what_blocks_is_found_where_sends_wait() -> None:
    """A group of more microbatches than stages: the second of them that comes round finds no receive posted."""
    p, v, m = 2, 2, 4
    run = Execution.of(num_stages=p, num_microbatches=m, schedule="interleaved", chunks_per_stage=v)
    forward = [Item(c, i, "forward") for c in range(v) for i in range(m)]
    backward = [Item(c, i, "backward") for c in reversed(range(v)) for i in range(m)]
    lists = [[*forward, *backward]] * p
    assert is_run(lists, run, posted=10**6)
    assert sorted(progress(lists, run.schedule)) == sorted((stage, item) for stage in range(p) for item in lists[stage])
    assert not is_run(lists, run, posted=1)
    with pytest.raises(
        PlanError, match=r"stage \d waits for ever for the start of forward .* before the end of forward"
    ):
        check(lists, *counted(run))
