"""The pipeline stages of a plan: blocks, messages to the next stage, waits, memory."""

from __future__ import annotations

from typing import NamedTuple

from shardwright.pcg.step.meshes import stage_meshes
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.sections import sections, spread
from shardwright.reports.facts import PlanFacts
from shardwright.reports.report import Paragraph
from shardwright.reports.running import device_mesh
from shardwright.reports.units import percent, plural, ranges, seconds, size


class StageFacts(NamedTuple):
    """A stage, on each of its devices.

    has            its blocks, and the operators around them, in order; of each chunk
    mesh           of its devices
    sent_bytes     to the next stage, of a microbatch through all of its chunks
    """

    number: int
    has: tuple[str, ...]
    sent_bytes: float
    compute_s: float
    exposed_s: float
    bubble_s: float
    memory_bytes: int
    mesh: str


def stage_facts(facts: PlanFacts) -> list[StageFacts]:
    """Return the stages of a plan; none where it has but one."""
    run, count, made = facts.plan.execution, facts.plan.execution.schedule.num_stages, facts.program
    if count == 1:
        return []
    meshes = stage_meshes(facts.plan.mesh, run)
    cut = sections(Operations(facts.graph, run), {}, by_block=True)
    chunks = [_named([cut[number].name for number, _ in share]) for share in spread(cut, made.execution.schedule.split)]
    return [
        StageFacts(
            number,
            tuple(chunks[number::count]),
            sum(made.hops_bytes[number::count]),
            stage.compute_s,
            stage.exposed_s,
            stage.bubble_s,
            stage.memory.total_bytes,
            device_mesh(mesh),
        )
        for number, (stage, mesh) in enumerate(zip(facts.timeline.stages, meshes, strict=True))
    ]


def stages(facts: PlanFacts) -> list[Paragraph]:
    """Return a table of the stages, where there are several."""
    rows_of_stages, run, step_s = stage_facts(facts), facts.plan.execution, facts.plan.prediction.step_s
    if not rows_of_stages:
        return []
    chunks = f" of {run.schedule.chunks_per_stage} chunks each" if run.schedule.chunks_per_stage > 1 else ""
    title = f"Pipeline ({plural(len(rows_of_stages), 'stage')}{chunks}, schedule {run.schedule.name})"
    rows = [
        (str(s.number), " | ".join(s.has), size(s.sent_bytes), seconds(s.compute_s), seconds(s.exposed_s),
         f"{seconds(s.bubble_s)} ({percent(s.bubble_s / step_s if step_s else 0)})", size(s.memory_bytes))
        for s in rows_of_stages
    ]  # fmt: skip
    lines = ["sends: to the next stage, by each device, of one microbatch; its gradient comes back the same way"]
    columns = (">stage", "has", ">sends", ">compute", ">exposed", ">bubble", ">peak memory")
    if run.schedule.stage_sizes:
        columns = (columns[0], "mesh", *columns[1:])
        rows = [(row[0], s.mesh, *row[1:]) for row, s in zip(rows, rows_of_stages, strict=True)]
        lines.append("meshes: as layouts are by axis, a stage of fewer devices has larger parts of what is sent")
    return [Paragraph(title, lines, columns, rows)]


def _named(names: list[str]) -> str:
    """Return consecutively numbered blocks as a range, and operators in no block as a word."""
    parts: list[str] = []
    runs: list[tuple[str, list[int]]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        if not number.isdecimal():
            runs.append(("", []))
        elif runs and runs[-1][0] == stem and runs[-1][1][-1] + 1 == int(number):
            runs[-1][1].append(int(number))
        else:
            runs.append((stem, [int(number)]))
    for stem, numbers in runs:
        parts.append(f"{stem}.{ranges(numbers)}" if numbers else "other operators")
    return ", ".join(parts)
