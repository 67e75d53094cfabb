"""The parts of a step's time: waits of compute, and messages sent beside it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import Any, NamedTuple, get_args

from shardwright.cost.timeline.streams import SegmentTimeline
from shardwright.cost.timeline.tasks import COMPUTE, COPY
from shardwright.pcg.stages import STAGES
from shardwright.pcg.step.verbs import VERBS, SentKind
from shardwright.reports.facts import PlanFacts, step_parts
from shardwright.reports.report import Paragraph
from shardwright.reports.units import percent, seconds
from shardwright.search.plan import Plan

_Key = tuple[str, str]
"""The kind of a message, and its stream."""
KINDS = tuple(filter(None, get_args(SentKind)))


class Sent(NamedTuple):
    """Messages of one kind over one axis (or copies to and from the host), in the busiest stage.

    exposed_s   while compute stands still; messages that are sent at once share the time
    hidden_s    while compute runs
    """

    kind: str
    axis: str
    exposed_s: float
    hidden_s: float


def sent(facts: PlanFacts) -> list[Sent]:
    """Return all messages, the longest waits first; exposed seconds add up to the timeline's `exposed_s`.

    Sums that go on beside the next segments are hidden, except for the time that the end of the step waits for them.
    """
    stage, parts_s = facts.timeline.busiest, defaultdict[_Key, list[float]](lambda: [0.0, 0.0, 0.0])
    for timeline, count in Counter(place.timeline for place in stage.placed).items():
        for key, mine_s in _sent(timeline).items():
            parts_s[key] = [total_s + count * part_s for total_s, part_s in zip(parts_s[key], mine_s, strict=True)]
    ready_s = max((place.start_s + place.timeline.ready_s for place in stage.placed[:-1]), default=0.0)
    late_s = sum(part[2] for part in parts_s.values())
    late = min(1.0, max(0.0, stage.placed[-1].start_s - ready_s) / late_s) if late_s > 0 else 0.0
    waits = {key: waited_s + late * after_s for key, (waited_s, _, after_s) in parts_s.items()}
    total_s = sum(waits.values())
    share = stage.exposed_s / total_s if total_s > 0 else 0.0
    listed = [Sent(*key, share * waits[key], part[1] + (1 - late) * part[2]) for key, part in parts_s.items()]
    return sorted(listed, key=lambda s: (-s.exposed_s, -s.hidden_s))


def exposed_by_kind(plan: Plan) -> dict[str, float]:
    """Return seconds by kind (weights, gradients or activations); their sum is `Prediction.exposed_s`."""
    by_kind = defaultdict[str, float](float)
    for each in sent(PlanFacts(plan)):
        if each.exposed_s > 0:
            by_kind[each.kind] += each.exposed_s
    return dict(by_kind)


def _sent(timeline: SegmentTimeline) -> dict[_Key, list[float]]:
    """Return how long tasks run while compute does not, while it does, and after the segment; folds included."""
    parts_s = defaultdict[_Key, list[float]](lambda: [0.0, 0.0, 0.0])
    tasks = list(zip(timeline.segment.tasks, timeline.segment.copies(), timeline.starts, timeline.ends, strict=True))
    busy = [(start, end) for task, _, start, end in tasks if task.stream == COMPUTE and end > start]
    for (task, copies, start, end), offset in zip(tasks, timeline.offsets, strict=True):
        if task.stream != COMPUTE and end > start:
            beside_s, parts = _overlap(busy, start, end), parts_s[VERBS[task.verb].sends, task.stream]
            after_s = min(end - start - beside_s, max(0.0, end + offset - timeline.ready_s))
            for part, part_s in enumerate((end - start - beside_s - after_s, beside_s, after_s)):
                parts[part] += copies * max(0.0, part_s)
    return parts_s


def _overlap(busy: list[tuple[float, float]], start: float, end: float) -> float:
    """Return how long compute is busy between two times; its tasks come one after the other."""
    first = max(bisect_left(busy, (start, start)) - 1, 0)
    total = 0.0
    for own_start, own_end in busy[first:]:
        if own_start >= end:
            break
        total += max(0.0, min(end, own_end) - max(start, own_start))
    return total


# ---- for people ----


def where_the_time_goes(facts: PlanFacts) -> Paragraph:
    """Return the parts of a step, which add up to it: waits by kind of message, and hidden seconds."""
    p = facts.plan.prediction
    rows = [(name, seconds(own_s), percent(own_s / p.step_s if p.step_s else 0), hidden)
            for name, own_s, hidden in _rows(facts) if own_s > 1e-9 * p.step_s or hidden]  # fmt: skip
    lines = ["hidden: sent while compute runs, and so no part of the step"] if any(row[3] for row in rows) else []
    return Paragraph("Where the time goes", lines, ("", ">of the step", ">share", ">hidden"), rows)


def _rows(facts: PlanFacts) -> list[tuple[str, float, str]]:
    """Return name, seconds of the step, and hidden seconds."""
    rows: list[tuple[str, float, str]] = []
    for name, own_s in step_parts(facts.plan.prediction).items():
        if name != "exposed communication":
            rows.append((name, own_s, ""))
        else:
            rows += [(sent_text(s), s.exposed_s, seconds(s.hidden_s)) for s in sent(facts)]
    return rows


def sent_text(each: Sent) -> str:
    """Return a message's wait in words: `waits for weights over y`."""
    where = {COPY: "", STAGES: " of several stages"}.get(each.axis, f" over {each.axis}")
    return f"waits for {each.kind}{where}"


def time_data(facts: PlanFacts) -> list[dict[str, Any]]:
    """Return the messages for programs."""
    return [{**each._asdict(), "text": sent_text(each)} for each in sent(facts)]
