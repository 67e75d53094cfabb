"""Plans beside each other: step, compute, exposed communication and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from shardwright.cost.prediction import Prediction
from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.lifetimes import lifetimes
from shardwright.pcg.step.meshes import stage_meshes
from shardwright.reports.facts import fits, memory_remark, memory_verdict, ranked_alternatives, usable_bytes
from shardwright.reports.lifetimes import lifetime_names
from shardwright.reports.report import OWN, Paragraph, Report
from shardwright.reports.running import again_name, device_mesh
from shardwright.reports.throughput import throughput
from shardwright.reports.units import percent, seconds, size
from shardwright.reports.wording import ESTIMATED, SEARCHED, faster_or_slower
from shardwright.search.plan import Alternative, Plan
from shardwright.search.request.spaces import BATCH_AXES, batch_size

_COLUMNS = ("plan", "mesh", ">mb.", "weights", "again", ">step", "", ">MFU", ">compute", ">exposed", ">memory", "")


class ComparisonReport(Report):
    """A plan beside the baselines and the best plans of other meshes; or several plans beside the first."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self.plans = plans

    def paragraphs(self) -> list[Paragraph]:
        plans = list(self.plans.values())
        return alternatives(plans[0]) if len(plans) == 1 else self._side_by_side()

    def data(self) -> dict[str, object]:
        return {
            name: run_as(p) | p.prediction.to_json() | {"throughput": throughput(p)._asdict()}
            for name, p in self.plans.items()
        }

    def _side_by_side(self) -> list[Paragraph]:
        """Return the plans in the given order; later ones that do not fit come in a second table."""
        first = next(iter(self.plans.values()))
        plans = self.plans.values()
        columns = [Beside.itself(p) if p is first else Beside.of(first, p.prediction, memory_remark(p)) for p in plans]
        named = zip(self.plans.items(), columns, strict=True)
        rows = [
            (p is first or fits(p), _row(name, _columns(p), p.prediction, remark, throughput(p).utilization))
            for (name, p), remark in named
        ]
        several = len({plan.fingerprint for plan in self.plans.values()}) > 1
        lines = ["these plans are for different models or batches"] if several else []
        paragraphs = [Paragraph("Plans", [*lines, LEGEND], _COLUMNS, [row for fitting, row in rows if fitting])]
        if unfit := [row for fitting, row in rows if not fitting]:
            paragraphs.append(Paragraph("Do not fit", [], _COLUMNS, unfit))
        return paragraphs


def alternatives(plan: Plan) -> list[Paragraph]:
    """Return the plan beside the baselines and the best plans of other meshes.

    Plans that do not fit are in a second table, the smallest first, as on the page: their speed is no measure.
    """

    def row(name: str, shown: Plan | Alternative, compared: Beside) -> tuple[str, ...]:
        return _row(name, _columns(shown), shown.prediction, compared, throughput(plan, shown.prediction).utilization)

    def rows(others: Iterable[Alternative]) -> list[tuple[str, ...]]:
        return [row(a.name, a, Beside.alternative(plan, a)) for a in others]

    ranked = ranked_alternatives(plan)
    fitting = [a for a in ranked if memory_verdict(plan, a) == "fits"]
    unfit = sorted((a for a in ranked if a not in fitting), key=lambda a: a.prediction.memory.total_bytes)
    first_row = row(OWN, plan, Beside.itself(plan))
    lines = ["by the timeline, in which communication and compute overlap", LEGEND]
    if any(a.estimated for a in plan.alternatives):
        lines.append(f"{ESTIMATED}: of one block for all that are equal; the others are of the whole graph")
    paragraphs = [Paragraph("Compared with", lines, _COLUMNS, [first_row, *rows(fitting)])]
    if unfit:
        paragraphs.append(Paragraph(f"Do not fit in {size(usable_bytes(plan))}", [], _COLUMNS, rows(unfit)))
    return paragraphs


LEGEND = (
    "mb.: microbatches of a step; weights: how long gathered ones stay; again: what backward makes again; MFU: model"
    " FLOPs utilization, without what is made again"
)


def run_as(plan: Plan | Alternative) -> dict[str, Any]:
    """Return the way in which a plan is run, in the words of all reports."""
    zeros = plan.lifetimes if isinstance(plan, Alternative) else set(lifetimes(plan.graph).values())
    return {
        "mesh": stages_mesh(plan),
        "num_microbatches": plan.mesh.num_microbatches,
        "lifetimes": lifetime_names(zeros, plan.mesh),
        "again": again_name(plan.execution),
    }


def stages_mesh(plan: Plan | Alternative) -> str:
    """Return the mesh of devices, `4 × [dp=8]` for several stages, or all meshes: `[dp=8] + [dp=4]`."""
    count, mesh = plan.execution.schedule.num_stages, device_mesh(plan.mesh)
    if plan.execution.schedule.stage_sizes:
        return " + ".join(map(device_mesh, stage_meshes(plan.mesh, plan.execution)))
    return f"{count} × {mesh}" if count > 1 else mesh


def _columns(plan: Plan | Alternative) -> tuple[str, ...]:
    return tuple(map(str, run_as(plan).values()))


def slower(plans: Mapping[str, Plan], margin: float) -> str:
    """Return a message if the first plan is slower than another that fits by more than `margin` of its step, or "".

    For a single plan, the others are its alternatives. Raises `PlanError` where a plan is of another model.
    """
    (name, first), *rest = plans.items()
    if alien := next((other for other, plan in rest if plan.fingerprint != first.fingerprint), None):
        raise PlanError(f"{alien} is a plan of another model, batch or precision than {name}; compare plans of one")
    others = {other: plan.prediction for other, plan in rest if fits(plan)}
    if not rest:
        others = {a.name: a.prediction for a in first.alternatives if memory_verdict(first, a) == "fits"}
    best = min(others, key=lambda other: others[other].step_s, default="")
    if not best or first.prediction.step_s <= (1 + margin) * others[best].step_s:
        return ""
    steps = f"{seconds(first.prediction.step_s)} beside {seconds(others[best].step_s)}"
    return f"{name} is slower than {best}, {steps}: {percent(first.prediction.step_s / others[best].step_s - 1)}"


ABSURD = 10
"""The number of times slower than the plan from which a comparison is pointless."""


class Beside(NamedTuple):
    """The remarks about a plan beside another: how much faster it is, and others; each may be "".

    A plan that does not fit is not called faster or slower: it cannot be run.
    """

    faster: str
    remark: str

    @classmethod
    def itself(cls, plan: Plan) -> Beside:
        """Return the remarks about the plan itself."""
        return cls("", memory_remark(plan))

    @classmethod
    def of(cls, plan: Plan, other: Prediction, unfit: str) -> Beside:
        """Return the remarks about another prediction beside a plan. `unfit`: the remark if its memory does not fit."""
        step_s = plan.prediction.step_s
        if unfit:
            return cls("", unfit)
        return cls(faster_or_slower(other.step_s, step_s), "absurd" if other.step_s > ABSURD * step_s else "")

    @classmethod
    def alternative(cls, plan: Plan, other: Alternative) -> Beside:
        """Return the remarks about one of the plan's alternatives."""
        unfit = memory_remark(plan, other)
        compared, remedy = cls.of(plan, other.prediction, unfit), f" (would fit {other.remedy})" if other.remedy else ""
        remarks = compared.remark + remedy, undivided(plan, other), ESTIMATED * other.estimated
        return cls(compared.faster, ", ".join(filter(None, remarks)))


def undivided(plan: Plan, other: Alternative) -> str:
    """Return a remark if a plan by hand has devices that cannot share the batch and compute the same, or ""."""
    if SEARCHED in other.name:
        return ""
    size, mesh = batch_size(plan.graph), other.mesh
    degree = prod(n for name, n in zip(mesh.names, mesh.sizes, strict=True) if name in BATCH_AXES)
    if size // mesh.num_microbatches % degree == 0:
        return ""
    cut = f" in {mesh.num_microbatches} microbatches" if mesh.num_microbatches > 1 else ""
    return f"the batch of {size}{cut} does not divide among {degree}"


def _row(
    name: str, way: tuple[str, ...], cost: Prediction, compared: Beside, utilization: float | None
) -> tuple[str, ...]:
    used = "" if utilization is None else percent(utilization)
    return (name, *way, seconds(cost.step_s), compared.faster, used, seconds(cost.compute_s), seconds(cost.exposed_s),
            size(cost.memory.total_bytes), compared.remark)  # fmt: skip
