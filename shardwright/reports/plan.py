"""Everything that a person asks about a plan first: `shardwright explain`, and the data of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwright.pcg.mesh import TIME
from shardwright.reports.comparison import alternatives
from shardwright.reports.facts import AxisFacts, PlanFacts, SplitAlong, StoredAs, fits, ranked_alternatives
from shardwright.reports.modules import Module, ModuleRow, module_tree
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.units import percent, plural, seconds, size
from shardwright.reports.wording import (
    axis_name,
    links,
    memory_rows,
    memory_warning,
    move_text,
    precision,
    provenance,
    quality,
    remedies,
    rewrites,
    way,
)
from shardwright.search.plan import Plan

_NOUNS: dict[SplitAlong, str] = {"batch": "the batch", "sequence": "the sequence", "features": "features"}
_STORED: dict[StoredAs, str] = {
    "whole": "whole on every device",
    "sharded": "sharded as they are used",
    "gathered": "stored sharded, gathered for each use",
}
_MAX_MODULE_LINES = 40
_MAX_UNSPLIT = 12


class PlanReport(Report):
    """What a plan does and costs. `depth` limits the table of modules, which else fits a page."""

    def __init__(self, plan: Plan, depth: int | None = None) -> None:
        self.plan, self.depth, self.facts = plan, depth, PlanFacts(plan)

    def paragraphs(self) -> list[Paragraph]:
        return [
            _headline(self.facts),
            _axes(self.facts),
            _modules(self.facts, self.depth),
            _communication(self.facts),
            _memory(self.plan),
            alternatives(self.plan),
            _unsplit(self.facts),
        ]

    def data(self) -> dict[str, Any]:
        """Rows of the tree are listed once and referred to by number, so that blocks which differ stay small."""
        plan, cluster = self.plan, self.plan.cluster
        rows: dict[ModuleRow, int] = {}
        tree = _module_data(module_tree(self.facts), rows)
        return {
            "model": plan.model,
            "fingerprint": plan.fingerprint,
            "cluster": {
                "name": cluster.name,
                "device": cluster.device.name,
                "num_devices": cluster.num_devices,
                "memory_bytes": cluster.device.memory_bytes,
                "provenance": provenance(cluster),
            },
            "quality": quality(plan),
            "rewrites": rewrites(plan),
            "way": way(plan),
            "remedies": remedies(plan),
            "precision": {"name": plan.precision, "operators": dict(self.facts.dtypes)},
            "fits": fits(plan),
            "limit_bytes": plan.report.limit_bytes,
            "prediction": plan.prediction.to_json(),
            "axes": [
                {
                    **asdict(axis),
                    "is": axis_name(axis),
                    "is_time": axis.name == TIME,
                    "links": links(cluster, plan.mesh, axis.name),
                }
                for axis in self.facts.axes
            ],
            "communication": [{**asdict(t), "text": move_text(t)} for t in self.facts.traffic],
            "alternatives": [
                {"name": a.name, "mesh": str(a.mesh), "fits": a.fits, "prediction": a.prediction.to_json()}
                for a in ranked_alternatives(plan)
            ],
            "unsplit": [asdict(u) for u in self.facts.unsplit],
            "rows": [_rounded(asdict(row)) for row in rows],
            "tree": tree,
        }


def _module_data(module: Module, rows: dict[ModuleRow, int]) -> dict[str, Any]:
    return {
        "label": module.label,
        "count": len(module.members),
        "members": " ".join(module.members) if len(module.members) > 1 else "",
        "rows": [rows.setdefault(row, len(rows)) for row in module.rows],
        "children": [_module_data(child, rows) for child in module.children],
        **_rounded(module.each._asdict()),
    }


def _rounded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Four digits of seconds and whole bytes are enough, and make the page small."""

    def short(key: str, value: Any) -> Any:  # noqa: ANN401 - JSON
        if key == "seconds" or key.endswith("_s"):
            return float(f"{value:.4g}")
        if key == "sent_bytes":
            return round(value)
        return [_rounded(step) for step in value] if key == "steps" else value

    return {key: short(key, value) for key, value in data.items()}


# ---- paragraphs ----


def _headline(facts: PlanFacts) -> Paragraph:
    plan, p, cluster = facts.plan, facts.plan.prediction, facts.plan.cluster
    is_split = cluster.num_devices == 1 or any(axis.share_of_compute["whole"] < 1 for axis in facts.axes)
    parts = f"compute {seconds(p.compute_s)}, optimizer {seconds(p.optimizer_s)}, communication "
    parts += f"{seconds(p.communication_s)}, of which {seconds(p.exposed_s)} exposed" if p.communication_s else "none"
    parts += f", bubble {seconds(p.bubble_s)}" if p.bubble_s > 1e-9 * p.step_s else ""
    devices = f"{plural(cluster.num_devices, 'device')} ({cluster.device.name})"
    return Paragraph(
        f"{plan.model} on {cluster.name}: {devices}, mesh {plan.mesh}",
        [
            f"predicted step  {seconds(p.step_s)}: {parts}",
            f"memory          {size(p.memory.total_bytes)} of {size(cluster.device.memory_bytes)} on each device"
            + memory_warning(plan, p.memory.total_bytes),
            *(f"would fit       {line}" for line in remedies(plan)),
            f"a step          {way(plan)}",
            f"quality         {quality(plan)}",
            *([f"rewrites        {rewrites(plan)}"] if plan.report.rewrites else []),
            f"precision       {precision(facts)}",
            f"cost figures    {provenance(cluster)}",
            *([] if is_split else ["NOTHING IS SPLIT: for a model this small, sharing work costs more than it saves"]),
        ],
    )


def _axes(facts: PlanFacts) -> Paragraph:
    lines: list[str] = []
    for axis in facts.axes:
        title = f"{axis.name} ({axis.size})"
        crossed = links(facts.plan.cluster, facts.mesh, axis.name)
        if axis.name == TIME:
            lines.append(f"{title}  {axis_name(axis)}: {_splits(axis)}")
            continue
        lines.append(f"{title}  {axis_name(axis)}, over {crossed}: {_splits(axis)}")
        lines.append(f"{' ' * len(title)}  weights: {_stored(axis)}")
    return Paragraph("What each axis does", lines)


def _splits(axis: AxisFacts) -> str:
    total = sum(axis.num_operators.values())
    uses = [u for u in _NOUNS if axis.num_operators[u]]
    parts = [
        f"{_NOUNS[u]} in {axis.num_operators[u]} ({percent(axis.share_of_compute[u])} of compute)"
        for u in sorted(uses, key=lambda u: -axis.share_of_compute[u])
    ]
    return f"of {plural(total, 'operator')}, splits {', '.join(parts) or 'none'}"


def _stored(axis: AxisFacts) -> str:
    return ", ".join(f"{n} {_STORED[kind]}" for kind, n in axis.num_weights.items() if n) or "none"


def _modules(facts: PlanFacts, depth: int | None) -> Paragraph:
    tree = list(module_tree(facts).walk())
    if depth is None:
        depth = 1
        while depth < 12 and sum(d <= depth + 1 for d, _ in tree) <= _MAX_MODULE_LINES:
            depth += 1
    shown = [(d, m) for d, m in tree if 0 < d <= depth]
    rows = [
        ("  " * (d - 1) + _label(m), *(_uses(m, axis) for axis in range(len(facts.mesh))), seconds(m.total.compute_s),
         seconds(m.total.communication_s), size(m.total.stored_bytes))
        for d, m in shown
    ]  # fmt: skip
    hidden = len(tree) - 1 - len(shown)
    more = f"{plural(hidden, 'module')} further inside: --depth {depth + 1} or the page of `shardwright view`"
    columns = ("module", *facts.mesh.names, ">compute", ">comm.", ">weights")
    return Paragraph("Modules (per device and step; weights as stored)", [more] if hidden else [], columns, rows)


def _label(module: Module) -> str:
    repeated = len(module.members)
    return module.label + (f" ({repeated} alike)" if repeated > 1 else "")


def _uses(module: Module, axis: int) -> str:
    """Along what the axis splits most of a module's compute."""
    seconds_of = module.compute_by_use(axis)
    total = sum(seconds_of.values())
    main = [use for use, s in sorted(seconds_of.items(), key=lambda item: -item[1]) if s >= 0.05 * total]
    return "+".join(main) or "–"


def _communication(facts: PlanFacts) -> Paragraph:
    rows = [
        (plural(t.count, t.what), move_text(t), t.axis, size(t.sent_bytes), seconds(t.seconds)) for t in facts.traffic
    ]
    p = facts.plan.prediction
    took = f"{seconds(p.communication_s)} on its own, {seconds(p.exposed_s)} of the step"
    title = f"Communication ({size(p.communication_bytes)} sent by each device per step, {took})"
    if not rows:
        return Paragraph(title, ["none"])
    return Paragraph(title, [], ("what", "how", "axis", ">sent", ">time"), rows)


def _memory(plan: Plan) -> Paragraph:
    memory = plan.prediction.memory
    title = f"Memory ({size(memory.total_bytes)} at the peak, on each device)"
    peak = f"peak: {plan.prediction.peak_at}"
    return Paragraph(title, [peak], ("category", ">bytes", ">share", ""), memory_rows(memory))


def _unsplit(facts: PlanFacts) -> Paragraph:
    rows = [(u.axis, f"{u.count} × {u.op}", seconds(u.compute_s), u.reason, u.example) for u in facts.unsplit]
    if not rows:
        return Paragraph("Operators that run whole", ["none: every operator shares its work along every axis"])
    rest: Sequence[Any] = facts.unsplit[_MAX_UNSPLIT:]
    more = [f"and {plural(len(rest), 'more kind')}, {seconds(sum(u.compute_s for u in rest))}"] if rest else []
    columns = ("axis", "operators", ">time", "why", "for example")
    return Paragraph("Operators that run whole along an axis", more, columns, rows[:_MAX_UNSPLIT])
