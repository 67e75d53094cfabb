"""Streams: order, contention, folds, and memory over time, on segments written by hand or drawn at random."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.timeline.clock import SHARING, Sharing
from shardwright.cost.timeline.streams import run
from shardwright.cost.timeline.tasks import COMPUTE, COPY, Buffer, Fold, Recorder, Segment, Task
from shardwright.pcg.errors import ClusterError
from tests.each import each

FREE = Sharing(1.0, 1.0)
GPU, CPU = SHARING["cuda"], SHARING["cpu"]


def two(compute_s: float, other_s: float, stream: str = "x") -> Segment:
    return Segment((Task("a", COMPUTE, compute_s), Task("b", stream, other_s)))


def test_streams_run_side_by_side() -> None:
    found = run(two(3.0, 5.0), FREE)
    assert (found.seconds, found.busy_s, found.waiting_s) == (5.0, {COMPUTE: 3.0, "x": 5.0}, 2.0)


def test_compute_beside_communication_is_slowed() -> None:
    """10 s of each: at 0.84 of its speed compute has 1.6 s left when communication ends; half speeds win nothing."""
    assert run(two(10.0, 10.0), GPU).seconds == pytest.approx(11.6)
    assert run(two(10.0, 10.0), CPU).seconds == pytest.approx(20.0)
    assert run(two(10.0, 4.0), CPU).seconds == pytest.approx(14.0)
    assert run(two(10.0, 10.0, COPY), CPU).seconds == 10.0


def test_collectives_of_two_axes_share_the_links() -> None:
    segment = Segment((Task("a", "x", 4.0), Task("b", "y", 10.0)))
    found = run(segment, FREE)
    assert found.ends[0] == pytest.approx(8.0)
    assert found.seconds == pytest.approx(14.0)


def test_a_task_waits_for_those_of_other_streams() -> None:
    segment = Segment((Task("a", COMPUTE, 2.0), Task("b", "x", 3.0, (0,)), Task("c", COMPUTE, 1.0, (1,))))
    found = run(segment, CPU)
    assert (found.starts, found.ends) == ([0.0, 2.0, 5.0], [2.0, 5.0, 6.0])
    assert found.waiting_s == 3.0


def test_tasks_that_take_no_time_release_others_at_once() -> None:
    segment = Segment((Task("a", "x", 0.0), Task("b", COMPUTE, 0.0, (0,)), Task("c", "x", 1.0, (1,))))
    assert run(segment, CPU).seconds == 1.0
    assert run(Segment(), CPU).seconds == 0.0


def test_what_waits_for_itself_is_refused() -> None:
    segment = Segment((Task("a", COMPUTE, 1.0, (1,)), Task("b", COMPUTE, 1.0)))
    with pytest.raises(ClusterError, match="task 'a' on 'compute' waits for a task that is launched after it"):
        run(segment, CPU)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((0.0, 1.0), "Sharing.compute: expected a number above 0 and at most 1, got 0.0; 1 is undisturbed"),
        ((1.0, 1.5), "Sharing.communication: expected a number above 0 and at most 1, got 1.5"),
        ((0.5, 0.4), "Sharing: expected shares that add up to at least 1, got 0.9; otherwise overlap costs more"),
    ],
)
def test_shares_that_cannot_be_are_refused(shares: tuple[float, float], message: str) -> None:
    with pytest.raises(ClusterError) as error:
        Sharing(*shares)
    assert str(error.value).startswith(message)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Tasks on three streams that wait for earlier ones, and buffers that some of them take and later ones free."""
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, 12))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set[int]()
        seconds = draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
        tasks.append(Task(str(number), draw(st.sampled_from([COMPUTE, "x", "y", COPY])), seconds, tuple(after)))
    buffers: list[Buffer] = []
    for taken in range(len(tasks)):
        freed = draw(st.sets(st.integers(taken, len(tasks) - 1), min_size=1, max_size=2))
        buffers.append(Buffer(draw(st.sampled_from("pq")), draw(st.integers(1, 9)), taken, (taken, *freed)))
    return Segment(tuple(tasks), tuple(buffers))


@given(segments(), st.sampled_from([FREE, GPU, CPU]))
def test_a_timeline_lies_between_the_busiest_stream_and_the_serial_sum(segment: Segment, sharing: Sharing) -> None:
    found = run(segment, sharing)
    streams = {task.stream for task in segment.tasks}
    alone = {stream: sum(t.seconds for t in segment.tasks if t.stream == stream) for stream in streams}
    assert found.seconds >= max(alone.values()) - 1e-9
    assert found.seconds <= sum(t.seconds for t in segment.tasks_in_all()) + 1e-9
    for stream in streams:
        assert alone[stream] - 1e-9 <= found.busy_s[stream] <= found.seconds + 1e-9


@given(segments(), st.sampled_from([FREE, GPU, CPU]))
def test_order_is_kept(segment: Segment, sharing: Sharing) -> None:
    found = run(segment, sharing)
    for number, task in enumerate(segment.tasks):
        assert all(found.ends[other] <= found.starts[number] for other in task.after)
    for stream in {task.stream for task in segment.tasks}:
        own = [i for i, task in enumerate(segment.tasks) if task.stream == stream]
        assert all(found.ends[a] <= found.starts[b] for a, b in pairwise(own))


@given(segments(), st.sampled_from([FREE, GPU, CPU]))
def test_what_is_taken_is_given_back_and_the_peak_is_the_most_at_once(segment: Segment, sharing: Sharing) -> None:
    found = run(segment, sharing)
    assert all(abs(num_bytes) < 1e-9 for num_bytes in found.net.values())
    assert min(found.memory.values) >= 0
    assert found.peak_bytes == max(found.memory.values)
    assert list(found.memory.times_s) == sorted(found.memory.times_s)
    largest = max(b.num_bytes for b in segment.buffers)
    assert largest <= found.peak_bytes <= sum(b.num_bytes for b in segment.buffers)


def test_the_peak_has_a_moment_and_a_task() -> None:
    """The second task takes most; what was there before is given back only after it."""
    tasks = (Task("a", COMPUTE, 1.0), Task("b", COMPUTE, 2.0), Task("c", COMPUTE, 1.0))
    buffers = (Buffer("p", 5, None, (1,)), Buffer("q", 4, 1, (2,)), Buffer("p", 1, 2, ()))
    found = run(Segment(tasks, buffers), FREE)
    assert (found.peak, found.peak_s, found.peak_task) == ({"p": 0.0, "q": 4.0}, 1.0, "b")
    assert found.net == {"p": -4.0, "q": 0.0}


def repeated(
    times: int, comm_s: float, *, unrolled: int | None = None, before_s: float = 0.0, stream: str = "x"
) -> Segment:
    """Blocks of two kernels with a collective that runs beside the next one, and one from before; each keeps a byte."""
    recorder = Recorder(overlap=True)
    recorder.compute("before", 1.0)
    recorder.launch("sum before", stream, before_s, blocks=False)
    copies, starts = unrolled or times, list[int]()
    for _ in range(copies):
        starts.append(len(recorder.tasks))
        task = recorder.compute("a", 2.0)
        recorder.take("kept", 1, task)
        recorder.take("moment", 3, task, (recorder.compute("b", 1.0),))
        recorder.launch("sum", stream, comm_s, blocks=False)
    starts.append(len(recorder.tasks))
    task = recorder.compute("after", 1.0)
    recorder.take("moment", 7, task, (task,))
    if copies < times:
        recorder.folds.append(Fold(starts[1], starts[2], times - copies))
    return recorder.segment()


@each("sharing", [FREE, GPU, CPU])
@each("comm_s", [0.5, 2.9, 3.0, 5.0])
@each("times", [4, 10, 100])
def test_a_fold_is_what_it_stands_for(sharing: Sharing, comm_s: float, times: int) -> None:
    folded, whole = (run(repeated(times, comm_s, unrolled=n), sharing) for n in (3, None))
    assert folded.seconds == pytest.approx(whole.seconds, rel=0.02)
    if comm_s <= 3.0 or sharing is not CPU:  # else more and more collectives wait, and run alone in the end
        assert folded.busy_s == pytest.approx(whole.busy_s, rel=0.03)
    assert (folded.net, folded.peak) == (whole.net, whole.peak)
    assert folded.peak_s == pytest.approx(whole.peak_s, rel=0.02)
    in_all = [sum(task.seconds for task in s.tasks_in_all()) for s in (repeated(times, comm_s, unrolled=3),
                                                                     repeated(times, comm_s))]  # fmt: skip
    assert in_all[0] == pytest.approx(in_all[1])


@each("sharing", [GPU, CPU])
@each("comm_s", [0.5, 2.0])
@each("before_s", [1.0, 4.0, 9.0, 30.0, 1000.0])
@each("times", [4, 10, 100])
def test_a_fold_is_not_like_its_second_block_while_that_waits_for_what_was_before(
    sharing: Sharing, comm_s: float, before_s: float, times: int
) -> None:
    folded, whole = (run(repeated(times, comm_s, unrolled=n, before_s=before_s), sharing) for n in (3, None))
    assert folded.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert folded.busy_s[COMPUTE] == pytest.approx(whole.busy_s[COMPUTE], rel=0.02)
    assert (folded.net, folded.peak) == (whole.net, whole.peak)


@each("sharing", [GPU, CPU])
def test_folds_come_in_any_order(sharing: Sharing) -> None:
    """As those of an encoder and a decoder do in backward; of both, blocks are copied."""

    def twice(*, unrolled: int) -> Segment:
        recorder, folds = Recorder(overlap=True), list[Fold]()
        for number in range(2):
            recorder.launch(f"sum before {number}", "x", 9.0, blocks=False)
            starts = list[int]()
            for _ in range(unrolled):
                starts.append(len(recorder.tasks))
                recorder.compute(f"a{number}", 3.0)
                recorder.launch(f"sum {number}", "x", 0.5, blocks=False)
            if unrolled < 20:
                folds.append(Fold(starts[1], starts[2], 20 - unrolled))
        recorder.folds += reversed(folds)
        return recorder.segment()

    folded, whole = (run(twice(unrolled=n), sharing) for n in (3, 20))
    assert folded.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert folded.busy_s[COMPUTE] == pytest.approx(whole.busy_s[COMPUTE], rel=0.02)


@each("sharing", [GPU, CPU])
@each("before_s", [4.0, 30.0])
def test_copies_from_before_a_fold_disturb_nobody(sharing: Sharing, before_s: float) -> None:
    copied = (repeated(60, 0.5, unrolled=n, before_s=before_s, stream=COPY) for n in (3, None))
    folded, whole = (run(segment, sharing) for segment in copied)
    assert folded.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert folded.busy_s[COMPUTE] == pytest.approx(whole.busy_s[COMPUTE])


def test_microbatches_differ_in_what_is_summed_and_in_what_stays() -> None:
    tasks = (Task("a", COMPUTE, 1.0), Task("sum", "x", 4.0, (0,), "last"))
    buffers = (Buffer("gradients", 2, 0, (), "first"), Buffer("temporary", 2, 0, (0,), "later"))
    segment = Segment(tasks, buffers)
    assert run(segment.in_microbatch(first=True, last=False), FREE).seconds == 1.0
    assert run(segment.in_microbatch(first=False, last=True), FREE).seconds == 5.0
    assert run(segment.in_microbatch(first=True, last=False), FREE).net == {"gradients": 2.0}
    assert run(segment.in_microbatch(first=False, last=False), FREE).net == {"temporary": 0.0}


def test_blocking_collectives_hold_up_the_next_kernel_and_without_overlap_all_do() -> None:
    for overlap, blocks, seconds in ((True, True, 4.0), (False, False, 4.0), (True, False, 2.0)):
        recorder = Recorder(overlap)
        recorder.compute("a", 1.0)
        recorder.launch("sum", "x", 1.0 if not blocks or overlap else 2.0, blocks=blocks)
        recorder.launch("copy", COPY, 1.0, blocks=blocks, after=(1,))
        recorder.compute("b", 1.0)
        assert run(recorder.segment(), FREE).seconds == (seconds if blocks or not overlap else 3.0)
