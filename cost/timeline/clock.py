"""When the tasks of a segment start and end: an event simulation of its streams.

Between two events all speeds are constant. Tasks of one stream between which nothing happens, as no other stream waits
for one or lets one wait, are one *run*; only runs make events, and the moments inside follow from how they progressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.cost.clusters.device import DeviceKind
from shardwright.cost.timeline.tasks import COMPUTE, COPY, Task
from shardwright.pcg.errors import ClusterError

INFINITY = float("inf")
EARLY = 1e-12
"""Work of less than this share of a task is done: rounding of sums of times."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The speeds of compute and of communication while both run, as shares of what each reaches alone."""

    compute: float
    communication: float

    def __post_init__(self) -> None:
        for name in ("compute", "communication"):
            if not 0 < getattr(self, name) <= 1:
                problem = f"expected a number above 0 and at most 1, got {getattr(self, name)!r}; 1 is undisturbed"
                raise ClusterError(f"Sharing.{name}: {problem}")
        if self.compute + self.communication < 1:
            total = self.compute + self.communication
            problem = (
                f"expected shares that add up to at least 1, got {total:g}; otherwise overlap costs more than waiting"
            )
            raise ClusterError(f"Sharing: {problem}")


SHARING: dict[DeviceKind, Sharing] = {"cuda": Sharing(0.84, 1.0), "cpu": Sharing(0.5, 0.5)}
"""cuda: compute is 18.9 % slower on average beside collectives, whose kernels take multiprocessors and bandwidth of the
memory; published: Lee et al., "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
Learning" (2025), abstract, which names no slowdown of the collectives. cpu: gloo's threads copy and add on the cores
that compute; assumed to share them evenly."""


@dataclass(slots=True)
class _Run:
    """Tasks of one stream, the runs of others that it waits for, and its progress: seconds done by time."""

    stream: str
    members: list[int]
    seconds: float = 0.0
    after: list[_Run] = field(default_factory=list)
    left: float = 0.0
    end: float = INFINITY
    moments: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)


def times(tasks: Sequence[Task], sharing: Sharing) -> tuple[list[float], list[float]]:
    """Start and end of every task.

    Raises:
        ClusterError: a task waits for one that is launched after it on its own stream.
    """
    runs = _runs(tasks)
    queues: dict[str, list[_Run]] = {}
    for run in reversed(runs):  # the next one is the last of its queue
        queues.setdefault(run.stream, []).append(run)
    running: list[_Run] = []
    idle, now = list(queues), 0.0
    while True:
        idle = _start(idle, queues, running, now)
        if not running:
            break
        now = _advance(running, sharing, now)
        over = [run for run in running if run.left <= EARLY * run.seconds]
        for run in over:
            run.end = now
            running.remove(run)
            idle.append(run.stream)
    for run in runs:
        if run.end == INFINITY:
            stuck = tasks[run.members[0]]
            problem = "waits for a task that is launched after it on the same stream; reorder them"
            raise ClusterError(f"task {stuck.name!r} on {stuck.stream!r} {problem}")
    return _moments(tasks, runs)


def _runs(tasks: Sequence[Task]) -> list[_Run]:
    awaited = {other for task in tasks for other in task.after}
    runs: list[_Run] = []
    of: dict[int, _Run] = {}
    last: dict[str, _Run] = {}
    for number, task in enumerate(tasks):
        run = last.get(task.stream)
        if run is None or task.after or run.members[-1] in awaited:
            run = last[task.stream] = _Run(task.stream, [])
            runs.append(run)
        run.members.append(number)
        run.seconds += task.seconds
        of[number] = run
    for run in runs:
        run.left = run.seconds
        run.after = [of[other] for other in tasks[run.members[0]].after]
    return runs


def _start(idle: list[str], queues: Mapping[str, list[_Run]], running: list[_Run], now: float) -> list[str]:
    """Start what can start now; the streams that are left. What takes no time is over at once, and may release more."""
    again = True
    while again:
        again, waiting = False, list[str]()
        for stream in idle:
            queue = queues[stream]
            while queue:
                run = queue[-1]
                if any(other.end > now for other in run.after):
                    waiting.append(stream)
                    break
                queue.pop()
                run.moments.append(now)
                run.done.append(0.0)
                if run.seconds > 0:
                    running.append(run)
                    break
                run.end = now
                again = True
        idle = waiting
    return idle


def _advance(running: Sequence[_Run], sharing: Sharing, now: float) -> float:
    """Let the running ones go on until the first of them ends: the time then."""
    if len(running) == 1:
        (run,) = running
        now += run.left
        run.left = 0.0
    else:
        speeds = _speeds([run.stream for run in running], sharing)
        step = min(run.left / speed for run, speed in zip(running, speeds, strict=True))
        now += step
        for run, speed in zip(running, speeds, strict=True):
            run.left -= step * speed
    for run in running:
        run.moments.append(now)
        run.done.append(run.seconds - run.left)
    return now


def _speeds(streams: Sequence[str], sharing: Sharing) -> list[float]:
    collectives = len(streams) - (COMPUTE in streams) - (COPY in streams)
    if not collectives:
        return [1.0] * len(streams)
    beside = sharing.communication if COMPUTE in streams else 1.0
    return [sharing.compute if s == COMPUTE else 1.0 if s == COPY else beside / collectives for s in streams]


def _moments(tasks: Sequence[Task], runs: Sequence[_Run]) -> tuple[list[float], list[float]]:
    """The moments at which the tasks inside of runs start and end."""
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    for run in runs:
        begin = run.moments[0]
        for number, end in zip(run.members, _ends(run, tasks), strict=True):
            starts[number], ends[number] = begin, end
            begin = end
    return starts, ends


def _ends(run: _Run, tasks: Sequence[Task]) -> Iterator[float]:
    piece, total = 0, 0.0
    moments, done = run.moments, run.done
    for number in run.members[:-1]:
        total += tasks[number].seconds
        while piece + 2 < len(done) and done[piece + 1] < total:
            piece += 1
        if piece + 1 >= len(done) or done[piece + 1] <= done[piece]:
            yield moments[piece]
            continue
        share = (total - done[piece]) / (done[piece + 1] - done[piece])
        yield moments[piece] + min(share, 1.0) * (moments[piece + 1] - moments[piece])
    yield run.end
