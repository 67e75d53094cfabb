"""A timeline as a trace: the JSON that chrome://tracing and ui.perfetto.dev open.

A process per stage, with a track for its microbatches, one for every stream, and a counter of memory. Times are
microseconds. Format: "Trace Event Format" (Google, 2016): complete events (X), metadata (M), counters (C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shardwright.cost.timeline.streams import SegmentTimeline
from shardwright.cost.timeline.tasks import COMPUTE, COPY, Task
from shardwright.cost.timeline.timeline import PlacedSegment, StageTimeline, Timeline

MAX_TASKS = 200_000
"""The most tasks of a full trace: in longer ones, only the first segment of each kind and stage is shown task by task,
since viewers hold about a million events."""

TraceEvent = dict[str, Any]


Described = Callable[[Task], tuple[str, dict[str, Any]]]
"""A function from a task to its name for people and further facts about it, such as its shape."""


def _as_it_is(task: Task) -> tuple[str, dict[str, Any]]:
    return task.name, {}


def trace(timeline: Timeline, described: Described = _as_it_is) -> dict[str, Any]:
    """Return the trace, to be written with `json.dump`."""
    num_tasks = sum(len(place.timeline.segment.tasks) for stage in timeline.stages for place in stage.placed)
    events: list[TraceEvent] = []
    for number, stage in enumerate(timeline.stages):
        events += _apart(_stage_events(number, stage, described, everything=num_tasks <= MAX_TASKS))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _apart(events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield events so that those of one track do not overlap: each begins when the last one has ended, or later."""
    ended: dict[int, float] = {}
    for event in sorted(events, key=lambda e: e.get("ts", -1.0)):
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            event["ts"] = max(event["ts"], ended.get(event["tid"], 0.0))
            event["dur"] = end - event["ts"]
            ended[event["tid"]] = max(end, event["ts"])
        if event["ph"] != "X" or event["dur"] > 0:
            yield event


def _stage_events(number: int, stage: StageTimeline, described: Described, *, everything: bool) -> Iterator[TraceEvent]:
    streams = [
        COMPUTE,
        *sorted(s for s in stage.busy_s if s not in (COMPUTE, COPY)),
        *([COPY] if COPY in stage.busy_s else []),
    ]
    tracks = {"microbatches": 0, **{stream: i + 1 for i, stream in enumerate(streams)}}
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"stage {number}"}}
    for name, track in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": number, "tid": track, "args": {"name": name}}
    seen: set[SegmentTimeline] = set()
    bytes_ = stage.state_bytes
    for place in stage.placed:
        name = "end" if place.item is None else f"{place.item.direction} {place.item.microbatch}"
        if place.timeline.seconds > 0:
            yield _event(name, "segment", number, 0, place.start_s, place.timeline.seconds)
        if everything or place.timeline not in seen:
            yield from _tasks(place, number, tracks, described)
        seen.add(place.timeline)
        for moment, value in zip(*place.timeline.memory, strict=True):
            yield {
                "ph": "C",
                "name": "memory",
                "pid": number,
                "ts": _us(place.start_s + moment),
                "args": {"bytes": round(bytes_ + value)},
            }
        bytes_ += sum(place.timeline.net.values())


def _tasks(place: PlacedSegment, number: int, tracks: dict[str, int], described: Described) -> Iterator[TraceEvent]:
    timeline = place.timeline
    tasks = timeline.segment.tasks
    for task, start, end, offset in zip(tasks, timeline.starts, timeline.ends, timeline.offsets, strict=True):
        if end > start:
            name, known = described(task)
            begin_s = place.start_s + start + offset
            event = _event(name, task.stream, number, tracks[task.stream], begin_s, end - start)
            yield {**event, "args": {"verb": task.verb, **known}}
    yield from _folds(timeline, place.start_s, number, tracks)


def _folds(timeline: SegmentTimeline, start_s: float, number: int, tracks: dict[str, int]) -> Iterator[TraceEvent]:
    """Yield each fold's further blocks as one event on the compute stream."""
    computed = [i for i, task in enumerate(timeline.segment.tasks) if task.stream == COMPUTE]
    for fold in timeline.segment.folds:
        before, later = [i for i in computed if i < fold.end], [i for i in computed if i >= fold.end]
        if not before or not later:
            continue
        begin = timeline.ends[before[-1]] + timeline.offsets[before[-1]]
        end = min(
            begin + timeline.offsets[later[0]] - timeline.offsets[before[-1]],
            timeline.starts[later[0]] + timeline.offsets[later[0]],
        )
        yield _event(f"{fold.more} more of these blocks", "fold", number, tracks[COMPUTE], start_s + begin, end - begin)


def _event(name: str, category: str, number: int, track: int, start_s: float, seconds: float) -> TraceEvent:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": number,
        "tid": track,
        "ts": _us(start_s),
        "dur": _us(seconds),
    }


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 6)
