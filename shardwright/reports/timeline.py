"""The timeline of a plan: the load of each stream, exposed time, and the moment of peak memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.memory import safe_bytes
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.streams import SegmentTimeline
from shardwright.cost.timeline.tasks import COMPUTE, Task
from shardwright.cost.timeline.timeline import StageTimeline, Timeline, simulate
from shardwright.cost.timeline.trace import trace
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.meshes import num_devices
from shardwright.reports.facts import PlanFacts
from shardwright.reports.named import Names
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.running import meshes, way
from shardwright.reports.units import bar, percent, plural, ranges, seconds, shape, size
from shardwright.reports.wording import memory_rows, memory_warning
from shardwright.search.plan import Plan

END = "end of the step"
"""The name of the part after the last backward: the optimizer's update."""


def plan_timeline(plan: Plan, execution: Execution) -> Timeline:
    """Return the simulated step of a plan under an execution."""
    return simulate(program(plan.graph, plan.cluster, execution))


def moved(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan for costing on another cluster, whose devices may be those of several stages."""
    limit_bytes = safe_bytes(cluster.device.memory_bytes)
    return replace(plan, cluster=cluster, report=replace(plan.report, limit_bytes=limit_bytes))


def step_trace(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as a trace. Tasks are named by module and operator, with shape and bytes."""
    names = Names(plan.graph)

    def described(task: Task) -> tuple[str, dict[str, Any]]:
        result = names.result(task.name)
        known = {} if result is None else {"shape": f"{shape(result.shape)} {result.dtype}", "bytes": result.num_bytes}
        return names.whole(task.name), known

    return trace(timeline, described)


class StepPass(NamedTuple):
    """Equal passes of one stage: "forward" of microbatches "2–4", counted from 1; or the end of the step."""

    name: str
    microbatches: str
    num_alike: int
    total_s: float


def step_passes(timeline: Timeline) -> list[StepPass]:
    """Return the passes of the busiest stage, equal ones together; their seconds add up to the step."""
    placed = timeline.busiest.placed
    ends = [*(place.start_s for place in placed[1:]), timeline.step_s]
    groups: dict[tuple[str, SegmentTimeline], list[tuple[int, float]]] = {}
    for place, end in zip(placed, ends, strict=True):
        name, number = (place.item.direction, place.item.microbatch + 1) if place.item else (END, 0)
        groups.setdefault((name, place.timeline), []).append((number, end - place.start_s))
    return [
        StepPass(name, "" if name == END else ranges([n for n, _ in members]), len(members), sum(s for _, s in members))
        for (name, _), members in groups.items()
    ]


class TimelineReport(Report):
    """The step, the stages if there are several, streams of the busiest and memory of the fullest stage."""

    def __init__(self, plan: Plan, timeline: Timeline) -> None:
        self.plan, self.timeline = plan, timeline
        self.is_pipeline = len(timeline.stages) > 1
        self._names = Names(plan.graph)

    def paragraphs(self) -> list[Paragraph]:
        stages = [self._stages()] if self.is_pipeline else []
        return [self._headline(), *(stages or [self._parts()]), self._streams(), self._memory()]

    def data(self) -> dict[str, Any]:
        stages = [
            {**_stage_data(stage), "peak_at": self._names.moment(stage.peak_at)} for stage in self.timeline.stages
        ]
        return {"step_s": self.timeline.step_s, "num_microbatches": self._num_microbatches, "stages": stages}

    def _headline(self) -> Paragraph:
        plan, busiest, fullest = self.plan, self.timeline.busiest, self.timeline.fullest
        used, available = num_devices(plan.mesh, plan.execution), plan.cluster.num_devices
        title = f"Timeline of {plan.model} on {plan.cluster.name}, {meshes(plan.mesh, plan.execution)}"
        title += f"; {used} of {plural(available, 'device')} in use" if used < available else ""
        memory = fullest.memory.total_bytes
        return Paragraph(title, [
            f"step            {seconds(self.timeline.step_s)}",
            f"a step          {self._way()}",
            f"compute         {self._part(busiest.compute_s)}, what communication beside it slows down included",
            f"exposed         {self._part(busiest.exposed_s)} in which compute waits for communication or copies",
            f"bubble          {self._part(busiest.bubble_s)} in which there is nothing to do",
            f"memory          {size(memory)} of {size(fullest.device_bytes)} at the peak, after "
            f"{seconds(fullest.peak_s)}" + memory_warning(plan, memory),
            f"at the peak     {self._names.moment(fullest.peak_at)}",
        ])  # fmt: skip

    @property
    def _num_microbatches(self) -> int:
        return len({place.item.microbatch for place in self.timeline.busiest.placed if place.item is not None})

    def _way(self) -> str:
        """Return the way in which the step is run here, which may differ from the plan's."""
        plan, times = self.plan, self._num_microbatches // self.plan.mesh.num_microbatches
        return way(PlanFacts(plan), times)

    def _parts(self) -> Paragraph:
        """Return the passes, equal ones together, and the end of the step; they add up to it."""
        rows = [
            (p.name, p.microbatches, seconds(p.total_s / p.num_alike), seconds(p.total_s),
             percent(self._share(p.total_s)))
            for p in step_passes(self.timeline)
        ]  # fmt: skip
        columns = ("", "microbatches", ">each", ">together", ">share")
        return Paragraph("Microbatches", [], columns, rows)

    def _part(self, part_s: float) -> str:
        return f"{seconds(part_s)} ({percent(self._share(part_s))})" if seconds(part_s) != "0" else "0"

    def _share(self, part_s: float) -> float:
        return part_s / self.timeline.step_s if self.timeline.step_s else 0.0

    def _of(self, stage: StageTimeline) -> str:
        """Return the number of the stage in words if there are several, or ""."""
        return f" of stage {self.timeline.stages.index(stage)}" if self.is_pipeline else ""

    def _stages(self) -> Paragraph:
        rows = [
            (str(number), seconds(stage.compute_s), seconds(stage.exposed_s), seconds(stage.bubble_s),
             percent(self._share(stage.bubble_s)), size(stage.memory.total_bytes),
             self._names.moment(stage.peak_at))
            for number, stage in enumerate(self.timeline.stages)
        ]  # fmt: skip
        columns = (">stage", ">compute", ">exposed", ">bubble", ">of the step", ">peak memory", "at the peak")
        return Paragraph("Stages", [], columns, rows)

    def _streams(self) -> Paragraph:
        stage = self.timeline.busiest
        rows = [
            (name if name in (COMPUTE, "copy") else f"collectives of {name}", seconds(busy_s),
             percent(self._share(busy_s)), bar(self._share(busy_s)))
            for name, busy_s in sorted(stage.busy_s.items(), key=lambda item: (item[0] != COMPUTE, item[0]))
        ]  # fmt: skip
        return Paragraph(f"Streams{self._of(stage)}", [], ("stream", ">busy", ">share", ""), rows)

    def _memory(self) -> Paragraph:
        stage = self.timeline.fullest
        rows = [cells[:3] for cells in memory_rows(stage.memory)]
        return Paragraph(f"Memory{self._of(stage)} at the peak", [], ("category", ">bytes", ">share"), rows)


def _stage_data(stage: StageTimeline) -> dict[str, Any]:
    return {
        "compute_s": stage.compute_s,
        "exposed_s": stage.exposed_s,
        "bubble_s": stage.bubble_s,
        "busy_s": dict(stage.busy_s),
        "memory": stage.memory.by_category(),
        "peak_s": stage.peak_s,
    }
