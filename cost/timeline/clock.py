"""An event simulation of a segment's streams: the times at which its tasks start and end.

Between two events, at which a task ends, all speeds are constant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwright.cost.clusters.device import DeviceKind
from shardwright.cost.timeline.tasks import COMPUTE, COPY, Task
from shardwright.pcg.choice import Transfers
from shardwright.pcg.errors import ClusterError

INFINITY = float("inf")
EARLY = 1e-12
"""A task with less than this share left is done: the rest is rounding of sums of times."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The speeds of compute and of communication while both run, as shares of their speeds alone."""

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

    @property
    def least(self) -> float:
        """The least that a second of communication adds to a step, however much compute runs beside it."""
        return (1 - self.compute) / self.communication

    @property
    def most(self) -> float:
        """The largest `overlap` for which `pace` is the rate of both at once, or 1000."""
        return min(self.compute / (1 - self.communication), 1e3) if self.communication < 1 else 1e3

    def pace(self, overlap: float) -> float:
        """Return the most seconds of work done in a second: by compute alone, communication alone, or both.

        A second of communication counts as `overlap`, if compute can run beside it.
        """
        return max(1.0, overlap, self.compute + overlap * self.communication)


SHARING: dict[DeviceKind, Sharing] = {"cuda": Sharing(0.84, 1.0), "cpu": Sharing(0.5, 0.5)}
"""cuda: compute is 18.9 % slower on average beside collectives, whose kernels take multiprocessors and bandwidth of the
memory; published: Lee et al., "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
Learning" (2025), abstract, which names no slowdown of the collectives. cpu: gloo's threads copy and add on the cores
that compute; assumed to share them evenly."""


def exposed_s(sent: Transfers[float], compute_s: float, sharing: Sharing) -> float:
    """Return the seconds by which transfers make an operator that computes for `compute_s` take longer."""
    part_s = compute_s / max(1, len(sent.during))
    late_s = sum(_both_s(part_s, sum(sent_meanwhile), sharing) - part_s for sent_meanwhile in sent.during)
    return sum(sent.before) + late_s + sum(sent.after)


def _both_s(compute_s: float, communication_s: float, sharing: Sharing) -> float:
    """Return the seconds of compute and communication that begin together."""
    if communication_s / sharing.communication <= compute_s / sharing.compute:
        return compute_s + communication_s * (1 - sharing.compute) / sharing.communication
    return communication_s + compute_s * (1 - sharing.communication) / sharing.compute


def times(tasks: Sequence[Task], sharing: Sharing) -> tuple[list[float], list[float]]:
    """Return the start and end of every task.

    Raises:
        ClusterError: a task waits for one that is launched after it on its own stream.
    """
    starts, ends = [0.0] * len(tasks), [INFINITY] * len(tasks)
    queues = dict[str, list[int]]()
    for number in reversed(range(len(tasks))):  # the next task is the last of its queue
        queues.setdefault(tasks[number].stream, []).append(number)
    running, left, now = dict[str, int](), dict[str, float](), 0.0  # by stream: the task, and seconds of it
    idle, waiting = list(queues), dict[int, list[str]]()  # streams; by task, the streams that wait for it
    known = dict[tuple[str, ...], dict[str, float]]()  # speeds by what runs
    while True:
        _start(tasks, queues, idle, waiting, running, left, starts, ends, now)
        if not running:
            break
        if len(running) == 1:  # undisturbed
            stream, number = running.popitem()
            ends[number] = now = now + left[stream]
            idle = [stream, *waiting.pop(number, ())]
            continue
        if (speeds := known.get(streams := tuple(running))) is None:
            speeds = known[streams] = _speeds(streams, sharing)
        step_s = min([left[stream] / speed for stream, speed in speeds.items()])
        now += step_s
        for stream, speed in speeds.items():
            left[stream] -= step_s * speed
            if left[stream] <= EARLY * tasks[running[stream]].seconds:
                ends[number := running.pop(stream)] = now
                idle += (stream, *waiting.pop(number, ()))
    if INFINITY in ends:
        stuck = tasks[ends.index(INFINITY)]
        problem = "waits for a task that is launched after it on the same stream; reorder them"
        raise ClusterError(f"task {stuck.name!r} on {stuck.stream!r} {problem}")
    return starts, ends


def _start(
    tasks: Sequence[Task], queues: Mapping[str, list[int]], idle: list[str], waiting: dict[int, list[str]],
    running: dict[str, int], left: dict[str, float], starts: list[float], ends: list[float], now: float,
) -> None:  # fmt: skip
    """Let idle streams start their next tasks, or wait. A task of no time ends at once, and may release others."""
    while idle:
        queue = queues[stream := idle.pop()]
        while queue and stream not in running:
            task = tasks[number := queue[-1]]
            for other in task.after:
                if ends[other] > now:
                    waiting.setdefault(other, []).append(stream)
                    break
            else:
                queue.pop()
                starts[number] = now
                if task.seconds > 0:
                    running[stream], left[stream] = number, task.seconds
                else:
                    ends[number] = now
                    idle += waiting.pop(number, ())
                continue
            break


def _speeds(streams: Collection[str], sharing: Sharing) -> dict[str, float]:
    collectives = len(streams) - (COMPUTE in streams) - (COPY in streams)
    if not collectives:
        return dict.fromkeys(streams, 1.0)
    collective_speed = sharing.communication if COMPUTE in streams else 1.0
    return {
        s: sharing.compute if s == COMPUTE else 1.0 if s == COPY else collective_speed / collectives for s in streams
    }
