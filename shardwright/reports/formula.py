"""Closed forms of a plan's cost for people: `shardwright explain --formula`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwright.reports.facts import PlanFacts
from shardwright.reports.forms import Formulas
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.units import seconds, size

_WORDS = {
    "compute_s": "compute, forward and backward",
    "optimizer_s": "optimizer",
    "communication_s": "communication",
    "sent_bytes": "bytes that a device sends in a step",
    "stored_bytes": "bytes of parameters and optimizer states on a device",
}


class FormulaReport(Report):
    """The forms, and the limits within which they hold."""

    def __init__(self, facts: PlanFacts) -> None:
        self.facts, self.formulas = facts, Formulas(facts)

    def paragraphs(self) -> list[Paragraph]:
        forms, p = self.formulas, self.facts.prediction
        axis = "–" if forms.axis is None else self.facts.mesh.names[forms.axis]
        rows = f"rows of tables ({_list(sorted(forms.rows))}) do not"
        lines = [
            f"n = {forms.num_nodes}  {_nodes(self.facts)}; more share the batch, or what they store, along axis {axis}",
            f"b = {forms.batch}  examples of a step",
            f"h = {forms.hidden}  hidden size; of parameters, sizes {_list(forms.growing)} grow with it, {rows}",
        ]
        terms = []
        for name, form in forms.all.items():
            value = forms.at(form)
            shown = seconds(value) if name.endswith("_s") else size(value)
            terms.append(f"{_WORDS[name]}: {forms.expression(form)} = {shown}")
        hidden_s = p.communication_s - p.exposed_s
        step = (
            f"step: compute + optimizer + communication − hidden + slowdown; in the plan {seconds(hidden_s)} of "
            f"communication are hidden beside compute, and {seconds(p.step_s)} is the step. What is hidden has no "
            "closed form: the timeline says it"
        )
        return [
            Paragraph("Closed forms of a step, in seconds and bytes", lines), Paragraph("Forms", [*terms, step]),
            Paragraph("Where they hold", list(self.limits)),
        ]  # fmt: skip

    @property
    def limits(self) -> tuple[str, ...]:
        """The conditions that must be the same as in the plan."""
        moved = {axis for axis, *_ in self.formulas.moved}
        crossing = self.formulas.axis is not None and self.facts.mesh.names[self.formulas.axis] in moved
        here = "; along the axis of nodes for this number of nodes only, in time and in bytes" if crossing else ""
        return (
            "only for this plan's own layout, microbatches and recomputation; --what-if searches for another size",
            "while arithmetic or memory, whichever decides for a kernel, still does, at the rate that it reaches here",
            f"collectives: on the line of their curve that they lie on here{here}",
        )

    def data(self) -> dict[str, Any]:
        forms = self.formulas
        return {
            "nodes": forms.num_nodes,
            "batch": forms.batch,
            "hidden": forms.hidden,
            "grow": forms.growing,
            "rows": sorted(forms.rows),
            "forms": {
                name: {"expression": str(forms.expression(form)), "value": forms.at(form)}
                for name, form in forms.all.items()
            },
            "limits": list(self.limits),
        }


def _nodes(facts: PlanFacts) -> str:
    return "nodes" if len(facts.plan.cluster.levels) > 1 else "devices"


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"
