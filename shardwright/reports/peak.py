"""The memory at the peak of a stage, value by value; equal values of equal blocks together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from shardwright.cost.timeline.streams import SegmentTimeline
from shardwright.reports.again import names_of
from shardwright.reports.facts import PlanFacts
from shardwright.reports.report import Paragraph
from shardwright.reports.units import plural, size

_UNNAMED = {
    "buffers": "the batch, buffers and constants",
    "gathered": "sets of buffers for gathered weights",
    "communication": "buffers of connections",
    "context": "the driver, kernels and workspaces of libraries",
    "temporary": "messages between stages",
    "slack": "what the allocator holds beyond what is in use",
}
"""Descriptions of memory by category that belongs to no single value."""
MOST_VALUES = 12


class PeakValue(NamedTuple):
    """Values with one label in equal blocks that exist at the peak.

    blocks       that they lie in; "" for values in no block
    num_values   those of microbatches in flight counted one by one
    num_bytes    of all of them, on each device
    """

    category: str
    label: str
    blocks: str
    num_values: int
    num_bytes: float


_Held = dict[tuple[str, str], tuple[float, int]]
"""The bytes and the number of values, by category and name."""


def peak_values(facts: PlanFacts, stage: int) -> list[PeakValue]:
    """Return all memory of a stage at its peak, the largest first; it adds up to `Memory` in each category."""
    groups = defaultdict[tuple[str, str], list[tuple[str, float, int]]](list)
    for (category, name), (num_bytes, count) in _live(facts, stage).items():
        block, label = facts.names.of(name)
        groups[category, label].append((block, num_bytes, count))
    values = [
        PeakValue(*key, names_of(filter(None, (block for block, _, _ in members))),
                  sum(count for _, _, count in members), sum(num_bytes for _, num_bytes, _ in members))
        for key, members in groups.items()
    ]  # fmt: skip
    for category, label in _UNNAMED.items():
        if (num_bytes := _unnamed(facts, stage, category)) > 0:
            values.append(PeakValue(category, label, "", 1, num_bytes))
    return sorted(values, key=lambda value: -value.num_bytes)


def _unnamed(facts: PlanFacts, stage: int, category: str) -> float:
    """Return the bytes of a category that are always there and belong to no parameter."""
    if category == "slack":
        return facts.timeline.stages[stage].memory.slack_bytes
    program = facts.program.stages[stage]
    return program.state.get(category, 0.0) - sum(n for (other, _), n in program.held.items() if other == category)


def _live(facts: PlanFacts, stage: int) -> _Held:
    """Return named memory: of parameters, of microbatches in flight, and of the segment with the peak."""
    timeline = facts.timeline.stages[stage]
    held = facts.program.stages[stage].held
    held_now: _Held = {key: (num_bytes, 1) for key, num_bytes in held.items()}
    before = defaultdict[SegmentTimeline, int](int)
    for place in timeline.placed[: timeline.peak_place]:
        before[place.timeline] += 1
    for earlier, times in before.items():
        _add(held_now, _left(earlier), times)
    _add(held_now, _inside(timeline.placed[timeline.peak_place].timeline))
    return {key: (num_bytes, count) for key, (num_bytes, count) in held_now.items() if count > 0 and num_bytes > 0.5}


def _add(total: _Held, others: Mapping[tuple[str, str], tuple[float, int]], times: int = 1) -> None:
    for key, (num_bytes, count) in others.items():
        own_bytes, count_before = total.get(key, (0.0, 0))
        total[key] = own_bytes + times * num_bytes, count_before + times * count


def _left(timeline: SegmentTimeline) -> _Held:
    """Return the memory that a segment leaves behind, negative where it frees."""
    held: _Held = {}
    for buffer in timeline.segment.buffers:
        change = (buffer.taken is not None) - bool(buffer.freed)
        if change:
            _add(held, {(buffer.category, buffer.name): (change * buffer.num_bytes, change)})
    return held


def _inside(timeline: SegmentTimeline) -> _Held:
    """Return the memory that a segment has taken until its peak, less the memory that it has freed."""
    held: _Held = {}
    course = timeline.course()
    for number, given_back in course.buffers[: course.peak + 1]:
        buffer, change = timeline.segment.buffers[number], -1 if given_back else 1
        _add(held, {(buffer.category, buffer.name): (change * buffer.num_bytes, change)})
    return held


def fullest(facts: PlanFacts) -> int:
    """Return the stage with the highest peak."""
    return facts.timeline.stages.index(facts.timeline.fullest)


def largest(facts: PlanFacts) -> Paragraph:
    """Return the largest values at the peak of the fullest stage."""
    timeline, stage = facts.timeline, fullest(facts)
    values = peak_values(facts, stage)
    shown, rest = values[:MOST_VALUES], values[MOST_VALUES:]
    rows = [
        (v.category, v.label, v.blocks, f"{v.num_values} ×" if v.num_values > 1 else "", size(v.num_bytes))
        for v in shown
    ]
    where = f" of stage {stage}" if len(timeline.stages) > 1 else ""
    notes = [f"and {plural(len(rest), 'smaller kind')}: {size(sum(v.num_bytes for v in rest))}"] if rest else []
    title = f"Largest in memory at the peak{where} ({facts.names.moment(timeline.stages[stage].peak_at)})"
    return Paragraph(title, [], ("category", "what", "in", ">", ">bytes"), rows, notes)
