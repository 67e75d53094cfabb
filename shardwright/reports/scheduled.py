"""Collectives that a plan runs by schedules: where they differ from the library's choice, and what a step gains."""

from __future__ import annotations

from typing import Any

from shardwright.reports.facts import PlanFacts
from shardwright.reports.report import Paragraph
from shardwright.reports.units import percent, plural, seconds, size
from shardwright.search.picked import Use, by_library, clipping, uses

_MOST_ROWS = 12


def scheduled(facts: PlanFacts) -> list[Paragraph]:
    """Return a table of the collectives that run by schedules, where the plan was to choose any."""
    plan = facts.plan
    if plan.cluster.schedules is None:
        return []
    rows, clip = [use for use in uses(plan) if use.schedule is not None], clipping(plan)
    library = plan.cluster.backend
    title = "Collectives by schedules"
    if not rows and clip.schedule is None:
        why = "no schedule fits a group of this plan and is worth running in place of"
        return [Paragraph(title, [f"none: {why} {library}'s own algorithms"])]
    before_s, after_s = by_library(plan), plan.prediction.step_s
    gain = f"a step takes {seconds(after_s)}, and {seconds(before_s)} where {library} runs all collectives"
    hidden = len(rows) - _MOST_ROWS
    notes = [f"and {plural(hidden, 'more row')}, which save less"] if hidden > 0 else []
    if any(not use.is_priced for use in rows):
        notes.append(f"the step's time counts sums over several axes as {library}'s; what they save comes on top")
    if clip.schedule is not None:
        notes.append(f"clipping sums over {clip.axis} by {clip.schedule.name}")
    columns = ("what", "axis", ">bytes", ">times", "schedule", ">time", f"{library}'s choice", ">its time", ">saved")
    return [Paragraph(title, [f"{gain} ({percent(1 - after_s / before_s)} less)"], columns,
                      [_row(use, plan.execution.schedule.num_stages) for use in rows[:_MOST_ROWS]], notes)]  # fmt: skip


def _row(use: Use, num_stages: int) -> tuple[str, ...]:
    stage = f", stage {use.stage}" if num_stages > 1 else ""
    name = use.schedule.name if use.schedule is not None else ""
    return (use.collective + stage, use.axis, size(use.num_bytes), str(use.times), name, seconds(use.seconds),
            use.library, seconds(use.library_s), seconds(use.saved_s))  # fmt: skip


def scheduled_data(facts: PlanFacts) -> dict[str, Any] | None:
    """Return the same as data; None where the plan was not to choose."""
    plan = facts.plan
    if plan.cluster.schedules is None:
        return None
    rows = [{**use._asdict(), "schedule": use.schedule and use.schedule.name} for use in uses(plan)]
    return {"library_step_s": by_library(plan), "step_s": plan.prediction.step_s, "collectives": rows}
