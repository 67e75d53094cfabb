"""The first report on a plan: `shardwright explain`, and the data of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwright.cost.prediction import Prediction
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.reports.comparison import LEGEND, Beside, alternatives, run_as
from shardwright.reports.encoded import encoded, encoded_line, sent_encoded
from shardwright.reports.exposed import time_data, where_the_time_goes
from shardwright.reports.facts import (
    AxisFacts,
    PlanFacts,
    SplitAlong,
    fits,
    memory_remark,
    memory_verdict,
    ranked_alternatives,
    serial_parts,
    step_parts,
    usable_bytes,
)
from shardwright.reports.foreign import foreign, foreign_line, foreign_parts
from shardwright.reports.modules import module_tree
from shardwright.reports.parameters import parameters_data
from shardwright.reports.peak import fullest, largest, peak_values
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.rounding import precision, rounded
from shardwright.reports.running import away, gathered, made_again, meshes, running_data, statistics, way
from shardwright.reports.scheduled import scheduled, scheduled_data
from shardwright.reports.stages import stage_facts, stages
from shardwright.reports.throughput import throughput
from shardwright.reports.trace import rewrite_trace, trace_data
from shardwright.reports.tree import Module, ModuleRow, Totals, own_by_use
from shardwright.reports.units import percent, plural, seconds, size
from shardwright.reports.wording import (
    axis_name,
    idle,
    links,
    memory_rows,
    memory_warning,
    modules_note,
    move_text,
    provenance,
    quality,
    remedies,
    rewrites,
    serial,
    standing,
    step,
    stored_text,
)
from shardwright.search.plan import Plan
from shardwright.search.request.spaces import batch_size

_NOUNS: dict[SplitAlong, str] = {
    "batch": "the batch",
    "sequence": "the sequence",
    "experts": "experts",
    "features": "features",
}
_MAX_MODULE_LINES = 40
_MAX_UNSPLIT = 12


class PlanReport(Report):
    """The work and the costs of a plan. `depth` limits the table of modules; by default the table fits a page."""

    def __init__(self, plan: Plan, depth: int | None = None, facts: PlanFacts | None = None) -> None:
        self.plan, self.depth, self.facts = plan, depth, facts or PlanFacts(plan)
        self.tree = module_tree(self.facts)

    def paragraphs(self) -> list[Paragraph]:
        return [
            _headline(self.facts),
            *stages(self.facts),
            where_the_time_goes(self.facts),
            *foreign(self.facts),
            _axes(self.facts),
            *gathered(self.facts),
            *made_again(self.facts),
            *away(self.facts),
            rounded(self.facts),
            *encoded(self.facts),
            self.modules(self.depth),
            _communication(self.facts),
            *scheduled(self.facts),
            _memory(self.facts),
            largest(self.facts),
            *alternatives(self.plan),
            *rewrite_trace(self.facts),
            _unsplit(self.facts),
        ]

    def modules(self, depth: int | None) -> Paragraph:
        """Return the tree of modules down to `depth`."""
        return _modules(self.facts, self.tree, depth)

    def data(self) -> dict[str, Any]:
        """Return the data; rows of the tree are listed once and referred to by number, to keep blocks small."""
        plan, cluster = self.plan, self.plan.cluster
        rows: dict[ModuleRow, int] = {}
        tree = _module_data(self.tree, rows)
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
            "idle": idle(plan),
            "step": described(plan.prediction),
            "sent": time_data(self.facts),
            "throughput": {**throughput(plan)._asdict(), "text": throughput(plan).line},
            "standing": standing(plan)._asdict(),
            "quality": quality(plan),
            "rewrites": rewrites(plan),
            "trace": trace_data(self.facts),
            "asked": plan.asked.to_json(),
            "capture_check": str(plan.capture_check or ""),
            **run_as(plan),
            **running_data(self.facts),
            "stages": [stage._asdict() for stage in stage_facts(self.facts)],
            "parameters": parameters_data(self.facts),
            "peak": [value._asdict() for value in peak_values(self.facts, fullest(self.facts))],
            "remedies": remedies(plan),
            "estimated": list(self.facts.estimated),
            "fits": fits(plan),
            "memory": memory_verdict(plan),
            "unfit": memory_remark(plan),
            "usable_bytes": usable_bytes(plan),
            "limit_bytes": plan.report.limit_bytes,
            "prediction": plan.prediction.to_json(),
            "axes": [
                {
                    **asdict(axis),
                    "is": axis_name(axis, plan.mesh),
                    "stored": {
                        kind: stored_text(axis, kind, plan.mesh) for kind, count in axis.num_weights.items() if count
                    },
                    "links": links(cluster, plan.mesh, axis.name),
                }
                for axis in self.facts.axes
            ],
            "schedules": scheduled_data(self.facts),
            "encoded": [asdict(one) for one in sent_encoded(self.facts)],
            "communication": [{**asdict(t), "text": move_text(t, plan.mesh)} for t in self.facts.traffic],
            "alternatives": [
                {
                    "name": a.name,
                    **run_as(a),
                    "fits": memory_verdict(plan, a) == "fits",
                    **Beside.alternative(plan, a)._asdict(),
                    "step": described(a.prediction),
                    "utilization": throughput(plan, a.prediction).utilization,
                    "prediction": a.prediction.to_json(),
                }
                for a in ranked_alternatives(plan)
            ],
            "legend": LEGEND,
            "foreign": [part._asdict() for part in foreign_parts(self.facts)],
            "unsplit": [asdict(u) for u in self.facts.unsplit],
            "rows": [_rounded(asdict(row)) for row in rows],
            "modules_note": modules_note(plan),
            "tree": tree,
        }


def _module_data(module: Module, rows: dict[ModuleRow, int], times: int = 1) -> dict[str, Any]:
    times *= len(module.members)
    return {
        "label": module.label,
        "count": len(module.members),
        "members": module.members,
        "differs": module.differs,
        "rows": [rows.setdefault(row, len(rows)) for row in module.rows],
        "children": [_module_data(child, rows, times) for child in module.children],
        "own": {"label": module.own_label(times), **module.own._asdict()},
        **module.each._asdict(),
    }


def _rounded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's data with four digits of seconds and whole bytes, to keep the page small."""

    def short(key: str, value: Any) -> Any:  # noqa: ANN401 - JSON
        if key == "seconds" or key.endswith("_s"):
            return float(f"{value:.4g}")
        if key == "sent_bytes":
            return round(value)
        return [_rounded(step) for step in value] if key == "steps" else value

    return {key: short(key, value) for key, value in data.items()}


def described(p: Prediction) -> dict[str, Any]:
    """Return the parts that add up to a step, and those that add up to it without overlap."""
    return {"parts": step_parts(p), "serial": serial_parts(p)}


# ---- paragraphs ----


def _headline(facts: PlanFacts) -> Paragraph:
    plan, p, cluster = facts.plan, facts.plan.prediction, facts.plan.cluster
    is_split = cluster.num_devices == 1 or any(axis.share_of_compute["whole"] < 1 for axis in facts.axes)
    devices = f"{plural(cluster.num_devices, 'device')} ({cluster.device.name})"
    return Paragraph(
        f"{plan.model} on {cluster.name}: {devices}, {meshes(plan.mesh, plan.execution)}"
        + (f", {count} microbatches" if (count := plan.mesh.num_microbatches) > 1 else ""),
        [
            *([f"not all used    {idle(plan)}"] if plan.idle else []),
            *([f"asked for       {plan.asked}"] if str(plan.asked) else []),
            f"predicted step  {step(p)}",
            f"throughput      {throughput(plan).line}",
            f"one by one      {serial(p)}; without overlap, as modules and communication are listed",
            f"memory          {size(p.memory.total_bytes)} of {size(p.device_bytes)} on {_each_device(plan)}"
            + memory_warning(plan, p.memory.total_bytes),
            *(f"would fit       {line}" for line in remedies(plan)),
            f"a step          {way(facts)}",
            f"beside others   {standing(plan).line}",
            f"quality         {quality(plan)}",
            *([f"rewrites        {rewrites(plan)}"] if plan.report.rewrites else []),
            f"precision       {precision(facts)}",
            *foreign_line(facts),
            *([f"not exact       {statistics(facts)}"] if facts.estimated else []),
            *([f"not exact       {line}"] if (line := encoded_line(facts)) else []),
            *([f"captured graph  {plan.capture_check}"] if plan.capture_check else []),
            f"cost figures    {provenance(cluster)}",
            *([] if is_split else [f"NOTHING IS SPLIT: {_why_whole(plan)}"]),
        ],
    )


def _why_whole(plan: Plan) -> str:
    size, devices = batch_size(plan.graph), plan.mesh.num_devices
    if size % devices:
        return f"the batch of {size} does not divide among {devices} devices; give another batch, or a smaller mesh"
    return "for a model this small, sharing work costs more than it saves"


def _axes(facts: PlanFacts) -> Paragraph:
    lines: list[str] = []
    for axis in facts.axes:
        title = f"{axis.name} ({axis.size})"
        crossed = links(facts.plan.cluster, facts.mesh, axis.name)
        name = axis_name(axis, facts.mesh)
        if axis.is_time:
            lines.append(f"{title}  {name}: {_splits(axis)}")
            continue
        lines.append(f"{title}  {name}, over {crossed}: {_splits(axis)}")
        lines.append(f"{' ' * len(title)}  weights: {_stored(axis, facts.mesh)}")
    return Paragraph("What each axis does", lines)


def _splits(axis: AxisFacts) -> str:
    total = sum(axis.num_operators.values())
    uses = [u for u in _NOUNS if axis.num_operators[u]]
    parts = [
        f"{_NOUNS[u]} in {axis.num_operators[u]} ({percent(axis.share_of_compute[u])} of compute)"
        for u in sorted(uses, key=lambda u: -axis.share_of_compute[u])
    ]
    return f"of {plural(total, 'operator')}, splits {', '.join(parts) or 'none'}"


def _stored(axis: AxisFacts, mesh: Mesh) -> str:
    return ", ".join(stored_text(axis, kind, mesh) for kind, n in axis.num_weights.items() if n) or "none"


def _modules(facts: PlanFacts, root: Module, depth: int | None) -> Paragraph:
    tree = list(root.walk())
    if depth is None:
        depth = 1
        while depth < 12 and sum(d <= depth + 1 for d, _, _ in tree) <= _MAX_MODULE_LINES:
            depth += 1
    shown = [(d, times, m) for d, times, m in tree if d <= depth]
    notes = [f"{m.label} differs {m.differs}" for _, _, m in shown if m.differs]
    if hidden := len(tree) - len(shown):
        more = f"{plural(hidden, 'module')} further inside: --depth {depth + 1} or the page of `shardwright view`"
        notes = [more, *notes]
    axes = [number for number, name in enumerate(facts.mesh.names) if name != TIME]
    columns = ("module", *(facts.mesh.names[axis] for axis in axes), ">compute", ">comm.", ">weights")
    rows = list(_module_rows(root, 0, 1, depth, axes))
    return Paragraph("Modules", [modules_note(facts.plan)], columns, rows, notes)


def _module_rows(module: Module, at: int, times: int, depth: int, axes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield a module, the modules inside it down to some depth, and its own part: the parts add up to it."""
    times *= len(module.members)
    uses = (_uses(module.compute_by_use(axis)) for axis in axes)
    yield _module_row("  " * at + _label(module), uses, module.each.times(times))
    if at == depth or not module.children:
        return
    for child in module.children:
        yield from _module_rows(child, at + 1, times, depth, axes)
    if module.rows:
        uses = (_uses(own_by_use(module.rows, axis)) for axis in axes)
        yield _module_row("  " * (at + 1) + module.own_label(times), uses, module.own.times(times))


def _module_row(name: str, uses: Iterable[str], total: Totals) -> tuple[str, ...]:
    return (name, *uses, seconds(total.compute_s), seconds(total.communication_s), size(total.stored_bytes))


def _label(module: Module) -> str:
    repeated = len(module.members)
    return module.label + (f" ({repeated} alike)" if repeated > 1 else "")


def _uses(seconds_of: Mapping[str, float]) -> str:
    """Return the kinds of dimension that an axis splits in most of this compute."""
    total = sum(seconds_of.values())
    main = [use for use, s in sorted(seconds_of.items(), key=lambda item: -item[1]) if s >= 0.05 * total]
    return "+".join(main) or "–"


def _communication(facts: PlanFacts) -> Paragraph:
    rows = [
        (plural(t.count, t.what), move_text(t, facts.mesh), t.axis, size(t.sent_bytes), seconds(t.seconds))
        for t in facts.traffic
    ]
    p = facts.plan.prediction
    took = f"{seconds(p.communication_s)} on its own, {seconds(p.exposed_s)} of the step"
    title = f"Communication ({size(p.communication_bytes)} sent by each device per step, {took})"
    stages = facts.plan.execution.schedule.num_stages
    largest = ", each as large as the largest" if facts.plan.execution.schedule.stage_sizes else ""
    lines = [f"listed: one device of each of the {stages} stages{largest}, added up; above: an equal share"]
    lines = lines if stages > 1 else []
    if not rows:
        return Paragraph(title, ["none"])
    return Paragraph(title, lines, ("what", "how", "axis", ">sent", ">time"), rows)


def _each_device(plan: Plan) -> str:
    """Return whose memory a prediction has, in words."""
    return "each device" + (" of the fullest stage" if plan.execution.schedule.num_stages > 1 else "")


def _memory(facts: PlanFacts) -> Paragraph:
    prediction = facts.plan.prediction
    memory = prediction.memory
    title = f"Memory ({size(memory.total_bytes)} at the peak, on {_each_device(facts.plan)})"
    peak = f"peak: {facts.names.moment(prediction.peak_at)}"
    return Paragraph(title, [peak], ("category", ">bytes", ">share", ""), memory_rows(memory))


def _unsplit(facts: PlanFacts) -> Paragraph:
    rows = [(f"{u.count} × {u.op}", u.axis, seconds(u.compute_s), u.reason, u.example) for u in facts.unsplit]
    if not rows:
        return Paragraph("Operators that run whole", ["none: every operator shares its work along every axis"])
    rest: Sequence[Any] = facts.unsplit[_MAX_UNSPLIT:]
    more = [f"and {plural(len(rest), 'more kind')}, {seconds(sum(u.compute_s for u in rest))}"] if rest else []
    columns = ("operators", "axis", ">time", "why", "for example")
    return Paragraph("Operators that run whole along an axis", [], columns, rows[:_MAX_UNSPLIT], more)
