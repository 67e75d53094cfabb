"""Plans beside each other: step, compute, exposed communication and memory."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.cost.predict import Prediction
from shardwright.cost.timeline.memory import MemoryVerdict
from shardwright.pcg.mesh import Mesh
from shardwright.reports.facts import memory_verdict, ranked_alternatives
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.units import seconds, size
from shardwright.reports.wording import faster_or_slower
from shardwright.search.plan import Plan

_COLUMNS = ("plan", "mesh", ">step", "", ">compute", ">exposed", ">memory", "")


class ComparisonReport(Report):
    """One plan beside the baselines and the best plans of other meshes; or several, the first one as the measure."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self.plans = plans

    def paragraphs(self) -> list[Paragraph]:
        plans = list(self.plans.values())
        return [alternatives(plans[0]) if len(plans) == 1 else self._side_by_side()]

    def data(self) -> dict[str, object]:
        return {name: plan.prediction.to_json() for name, plan in self.plans.items()}

    def _side_by_side(self) -> Paragraph:
        first = next(iter(self.plans.values())).prediction
        rows = [_row(n, p.mesh, p.prediction, first, memory_verdict(p, p.prediction)) for n, p in self.plans.items()]
        several = len({plan.fingerprint for plan in self.plans.values()}) > 1
        return Paragraph(
            "Plans", ["these plans are for different models or batches"] if several else [], _COLUMNS, rows
        )


def alternatives(plan: Plan) -> Paragraph:
    """The plan beside the baselines and the best plans of other meshes."""
    own = plan.prediction
    everything = [("this plan", plan.mesh, own), *((a.name, a.mesh, a.prediction) for a in ranked_alternatives(plan))]
    rows = [_row(name, mesh, p, own, memory_verdict(plan, p)) for name, mesh, p in everything]
    return Paragraph("Compared with", ["by the timeline, in which communication and compute overlap"], _COLUMNS, rows)


ABSURD = 10
"""How many times slower than the plan is not worth a comparison."""


def _remark(own: Prediction, measure: Prediction, memory: MemoryVerdict) -> str:
    if memory != "fits":
        return memory
    return "absurd" if own.step_s > ABSURD * measure.step_s else ""


def _row(name: str, mesh: Mesh, own: Prediction, measure: Prediction, memory: MemoryVerdict) -> tuple[str, ...]:
    beside = "" if own is measure else faster_or_slower(own.step_s, measure.step_s)
    return (name, str(mesh), seconds(own.step_s), beside, seconds(own.compute_s), seconds(own.exposed_s),
            size(own.memory.total_bytes), _remark(own, measure, memory))  # fmt: skip
