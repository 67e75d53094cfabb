"""The timeline of a plan in words and tables: how busy each stream is, what is exposed, when memory is at its peak."""

from __future__ import annotations

from typing import Any

from shardwright.cost.timeline.execution import Execution
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.tasks import COMPUTE
from shardwright.cost.timeline.timeline import StageTimeline, Timeline, simulate
from shardwright.search.explain import memory_warning
from shardwright.search.plan import Plan
from shardwright.search.sections import Explanation, Section, Table
from shardwright.search.units import percent, seconds, size


def plan_timeline(plan: Plan, execution: Execution) -> Timeline:
    """The simulated step of a plan that is run in some way."""
    return simulate(program(plan.graph, plan.cluster, execution))


def explain_timeline(plan: Plan, timeline: Timeline) -> Explanation:
    """The step, streams and memory of the busiest and the fullest stage."""
    busiest, fullest = timeline.busiest, timeline.fullest
    memory = fullest.memory.total_bytes
    lines = (
        f"step            {seconds(timeline.step_s)}",
        f"compute         {_share(busiest.compute_s, timeline)}, what communication beside it slows down included",
        f"exposed         {_share(busiest.exposed_s, timeline)} in which compute waits for communication or copies",
        f"bubble          {_share(busiest.bubble_s, timeline)} in which there is nothing to do",
        f"memory          {size(memory)} of {size(plan.cluster.device.memory_bytes)} at the peak, after "
        f"{seconds(fullest.peak_s)}" + memory_warning(plan, memory),
        f"at the peak     {fullest.peak_at}",
    )
    return Explanation((
        Section(f"Timeline of {plan.model} on {plan.cluster.name}, mesh {plan.mesh}", lines),
        _streams(busiest, timeline),
        _memory(fullest),
    ))  # fmt: skip


def describe_timeline(timeline: Timeline) -> dict[str, Any]:
    """The same for programs."""
    return {
        "step_s": timeline.step_s,
        "stages": [
            {
                "compute_s": stage.compute_s,
                "exposed_s": stage.exposed_s,
                "bubble_s": stage.bubble_s,
                "busy_s": dict(stage.busy_s),
                "memory": stage.memory.by_category(),
                "peak_s": stage.peak_s,
                "peak_at": stage.peak_at,
            }
            for stage in timeline.stages
        ],
    }


def _share(part_s: float, timeline: Timeline) -> str:
    return f"{seconds(part_s)} ({percent(part_s / timeline.step_s)})" if timeline.step_s else "0"


def _streams(stage: StageTimeline, timeline: Timeline) -> Section:
    names = sorted(stage.busy_s, key=lambda stream: (stream != COMPUTE, stream))
    rows = tuple(
        (
            name if name == COMPUTE or name == "copy" else f"collectives of {name}",
            seconds(stage.busy_s[name]),
            percent(stage.busy_s[name] / timeline.step_s if timeline.step_s else 0.0),
            "█" * round(30 * stage.busy_s[name] / (timeline.step_s or 1.0)),
        )
        for name in names
    )
    return Section("Streams", (), Table((("stream", False), ("busy", True), ("share", True), ("", False)), rows))


def _memory(stage: StageTimeline) -> Section:
    total = max(stage.memory.total_bytes, 1)
    rows = tuple(
        (name, size(num_bytes), percent(num_bytes / total))
        for name, num_bytes in stage.memory.by_category().items()
        if num_bytes
    )
    return Section("Memory at the peak", (), Table((("category", False), ("bytes", True), ("share", True)), rows))
