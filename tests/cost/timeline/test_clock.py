"""The clock against a plain simulation: task by task, from one event to the next, in exact numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cost.timeline.clock import SHARING, Sharing, exposed_s, times
from shardwright.cost.timeline.tasks import COMPUTE, COPY, Task
from shardwright.pcg.choice import Transfers
from shardwright.pcg.errors import ClusterError

Times = tuple[list[float], list[float]]


def simulated(tasks: list[Task], sharing: Sharing) -> Times:
    """Start and end of every task: the first of each stream that waits for nothing runs, at the speed that it has."""
    left = [Fraction(task.seconds) for task in tasks]
    starts: dict[int, Fraction] = {}
    ends: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(ends) < len(tasks):
        for number, task in enumerate(tasks):
            first = all(i in ends for i in range(number) if tasks[i].stream == task.stream)
            if number not in starts and first and all(i in ends for i in task.after):
                starts[number] = now
                if not left[number]:
                    ends[number] = now
        running = [i for i in starts if i not in ends]
        if any(not left[i] for i in running):
            continue
        speeds = {i: speed(i, [tasks[j].stream for j in running], tasks[i].stream, sharing) for i in running}
        if not running:
            continue
        step = min(left[i] / speeds[i] for i in running)
        now += step
        for i in running:
            left[i] -= step * speeds[i]
            if not left[i]:
                ends[i] = now
    return [float(starts[i]) for i in range(len(tasks))], [float(ends[i]) for i in range(len(tasks))]


def speed(number: int, running: list[str], stream: str, sharing: Sharing) -> Fraction:
    """A copy is undisturbed; collectives share the links; beside them compute is slower, and they beside it."""
    collectives = sum(other not in (COMPUTE, COPY) for other in running)
    if stream == COPY or not collectives:
        return Fraction(1)
    if stream == COMPUTE:
        return Fraction(sharing.compute)
    return Fraction(sharing.communication if COMPUTE in running else 1.0) / collectives


@st.composite
def launched(draw: st.DrawFn) -> list[Task]:
    """Tasks on four streams that wait for a few earlier ones, some of which take no time."""
    tasks: list[Task] = []
    rare = draw(st.booleans())
    for number in range(draw(st.integers(1, 14))):
        waits = number and draw(st.integers(0, 3 if rare else 1)) == 0
        after = draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=2)) if waits else set[int]()
        seconds = draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 7.0]))
        tasks.append(Task(str(number), draw(st.sampled_from([COMPUTE, "x", "y", COPY])), seconds, tuple(sorted(after))))
    return tasks


@given(launched(), st.sampled_from([Sharing(1.0, 1.0), Sharing(0.5, 0.5), Sharing(0.75, 1.0), Sharing(0.75, 0.5)]))
@settings(max_examples=150)
def test_times_are_those_of_a_simulation_task_by_task(tasks: list[Task], sharing: Sharing) -> None:
    starts, ends = times(tasks, sharing)
    expected_starts, expected_ends = simulated(tasks, sharing)
    assert starts == pytest.approx(expected_starts, abs=1e-9)
    assert ends == pytest.approx(expected_ends, abs=1e-9)


def test_moments_inside_of_what_runs_undisturbed_in_itself() -> None:
    """Five seconds of compute in three tasks; a collective of the last two slows what is left to half."""
    tasks = [
        Task("wait", COPY, 2.0),
        Task("a", COMPUTE, 1.0), Task("b", COMPUTE, 2.0), Task("c", COMPUTE, 0.0), Task("d", COMPUTE, 2.0),
        Task("sum", "x", 1.0, (0,)),
    ]  # fmt: skip
    starts, ends = times(tasks, Sharing(0.5, 0.5))
    assert starts == pytest.approx([0.0, 0.0, 1.0, 4.0, 4.0, 2.0])
    assert ends == pytest.approx([2.0, 1.0, 4.0, 4.0, 6.0, 4.0])


def test_how_much_streams_disturb_each_other() -> None:
    """What is published of GPUs, and what is assumed of CPUs."""
    assert (SHARING["cuda"], SHARING["cpu"]) == (Sharing(0.84, 1.0), Sharing(0.5, 0.5))


def test_the_first_task_of_what_never_starts_is_named() -> None:
    tasks = [Task("a", "x", 1.0), Task("b", COMPUTE, 1.0, (3,)), Task("c", COMPUTE, 1.0), Task("d", COMPUTE, 1.0)]
    with pytest.raises(ClusterError) as error:
        times(tasks, SHARING["cpu"])
    assert str(error.value) == (
        "task 'b' on 'compute' waits for a task that is launched after it on the same stream; reorder them"
    )


@given(
    st.integers(1, 16),
    st.lists(st.integers(0, 16), min_size=1, max_size=4),
    st.sampled_from([*SHARING.values(), Sharing(1, 1)]),
)
def test_what_is_exposed_of_transfers_is_what_the_clock_says(part: int, beside: list[int], sharing: Sharing) -> None:
    """Each begins with its part of the work, and the next part waits for it."""
    tasks, sent, computed = [Task("before", "a", 3.0)], 0, 0
    for seconds in beside:
        tasks += [Task("sent", "a", float(seconds), (computed,)), Task("part", COMPUTE, float(part), (sent,))]
        sent, computed = len(tasks) - 2, len(tasks) - 1
    tasks.append(Task("after", "a", 2.0, (computed,)))
    _, ends = times(tasks, sharing)
    transfers = Transfers((3.0,), tuple((float(seconds),) for seconds in beside), (2.0,))
    compute_s = float(part * len(beside))
    assert exposed_s(transfers, compute_s, sharing) == pytest.approx(max(ends) - compute_s)


def test_nothing_takes_no_time() -> None:
    assert times([], SHARING["cuda"]) == ([], [])


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((0.0, 0.0), "Sharing.compute: expected a number above 0 and at most 1, got 0.0; 1 is undisturbed"),
        ((1.0, 0.0), "Sharing.communication: expected a number above 0 and at most 1, got 0.0; 1 is undisturbed"),
        (
            (0.25, 0.5),
            "Sharing: expected shares that add up to at least 1, got 0.75; otherwise overlap costs more than",
        ),
    ],
)
def test_shares_that_cannot_be(shares: tuple[float, float], message: str) -> None:
    with pytest.raises(ClusterError) as error:
        Sharing(*shares)
    assert str(error.value).startswith(message)
