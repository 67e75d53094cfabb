"""What a step waits for: the time in which compute stands still, by what is sent meanwhile."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

from shardwright.cost.timeline.streams import SegmentTimeline
from shardwright.cost.timeline.tasks import COMPUTE, Task
from shardwright.reports.timeline import plan_timeline
from shardwright.search.plan import Plan

KINDS = ("weights", "gradients", "activations", "copies")


def exposed_by_kind(plan: Plan) -> dict[str, float]:
    """Seconds by what is sent: weights, gradients or activations; they add up to `Prediction.exposed_s`.

    Where several are sent at once they share the time.
    """
    busiest, found = plan_timeline(plan, plan.execution).busiest, defaultdict[str, float](float)
    for place in busiest.placed:
        for kind, waited_s in _waited(place.timeline).items():
            found[kind] += waited_s
    total_s = sum(found.values())
    return {kind: busiest.exposed_s * own / total_s for kind, own in found.items()} if total_s > 0 else {}


def _waited(timeline: SegmentTimeline) -> Mapping[str, float]:
    """How long tasks of each kind run while compute does not, folds included."""
    found = defaultdict[str, float](float)
    tasks = list(zip(timeline.segment.tasks, timeline.segment.copies(), timeline.starts, timeline.ends, strict=True))
    busy = [(start, end) for task, _, start, end in tasks if task.stream == COMPUTE and end > start]
    for task, copies, start, end in tasks:
        if task.stream != COMPUTE and end > start:
            found[_kind(task)] += copies * max(0.0, end - start - _overlap(busy, start, end))
    return found


def _overlap(busy: list[tuple[float, float]], start: float, end: float) -> float:
    """For how long compute, whose tasks come one after the other, is busy between two times."""
    first = max(bisect_left(busy, (start, start)) - 1, 0)
    total = 0.0
    for own_start, own_end in busy[first:]:
        if own_start >= end:
            break
        total += max(0.0, min(end, own_end) - max(start, own_start))
    return total


def _kind(task: Task) -> str:
    if task.blocks:
        return "activations"
    sent = {message.collective for message in task.messages}
    if not sent:
        return "copies"
    return "weights" if sent == {"all_gather"} else "gradients"
