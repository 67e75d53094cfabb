"""The timeline of a plan in words and tables: how busy each stream is, what is exposed, when memory is at its peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.memory import safe_bytes
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.tasks import COMPUTE
from shardwright.cost.timeline.timeline import StageTimeline, Timeline, simulate
from shardwright.pcg.step.execution import Execution
from shardwright.reports.explain import memory_warning
from shardwright.reports.sections import Explanation, Section, Table
from shardwright.reports.units import percent, plural, seconds, size
from shardwright.search.plan import Plan


def plan_timeline(plan: Plan, execution: Execution) -> Timeline:
    """The simulated step of a plan that is run in some way."""
    return simulate(program(plan.graph, plan.cluster, execution))


def moved(plan: Plan, cluster: Cluster) -> Plan:
    """The plan as it is costed on another cluster, whose devices may be those of several stages."""
    limit_bytes = safe_bytes(cluster.device.memory_bytes)
    return replace(plan, cluster=cluster, report=replace(plan.report, limit_bytes=limit_bytes))


def explain_timeline(plan: Plan, timeline: Timeline) -> Explanation:
    """The step, the stages where there are several, streams of the busiest and memory of the fullest one."""
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
    title, several = f"Timeline of {plan.model} on {plan.cluster.name}, mesh {plan.mesh}", len(timeline.stages) > 1
    used, available = plan.mesh.num_devices * len(timeline.stages), plan.cluster.num_devices
    title += f" for each of {len(timeline.stages)} stages" if several else ""
    title += f"; {used} of {plural(available, 'device')} in use" if used < available else ""
    return Explanation((
        Section(title, lines),
        *((_stages(timeline),) if several else ()),
        _streams(busiest, timeline, _of(busiest, timeline)),
        _memory(fullest, _of(fullest, timeline)),
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


def _of(stage: StageTimeline, timeline: Timeline) -> str:
    """Which stage is meant, where there are several."""
    return f" of stage {timeline.stages.index(stage)}" if len(timeline.stages) > 1 else ""


def _stages(timeline: Timeline) -> Section:
    columns = (("stage", True), ("compute", True), ("exposed", True), ("bubble", True), ("of the step", True),
               ("peak memory", True), ("at the peak", False))  # fmt: skip
    rows = tuple(
        (
            str(number),
            seconds(stage.compute_s),
            seconds(stage.exposed_s),
            seconds(stage.bubble_s),
            percent(stage.bubble_s / timeline.step_s if timeline.step_s else 0.0),
            size(stage.memory.total_bytes),
            stage.peak_at,
        )
        for number, stage in enumerate(timeline.stages)
    )
    return Section("Stages", (), Table(columns, rows))


def _streams(stage: StageTimeline, timeline: Timeline, which: str) -> Section:
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
    return Section(
        f"Streams{which}", (), Table((("stream", False), ("busy", True), ("share", True), ("", False)), rows)
    )


def _memory(stage: StageTimeline, which: str) -> Section:
    total = max(stage.memory.total_bytes, 1)
    rows = tuple(
        (name, size(num_bytes), percent(num_bytes / total))
        for name, num_bytes in stage.memory.by_category().items()
        if num_bytes
    )
    return Section(
        f"Memory{which} at the peak", (), Table((("category", False), ("bytes", True), ("share", True)), rows)
    )
