"""A plan in words and tables.

`explain(plan)` gives sections; `str` of them is plain text, and the command line sets them in colour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import Prediction
from shardwright.cost.timeline.memory import Verdict, verdict
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import MOVES
from shardwright.reports.anatomy import Anatomy, AxisUse, Traffic, Unsplit, Use
from shardwright.reports.sections import Explanation, Section, Table
from shardwright.reports.tree import Module, module_tree
from shardwright.reports.units import percent, plural, seconds, size
from shardwright.search.plan import Plan

_NAMES: dict[Use, str] = {"batch": "data parallel", "sequence": "sequence parallel", "features": "tensor parallel"}
_NOUNS: dict[Use, str] = {"batch": "the batch", "sequence": "the sequence", "features": "features"}
_MAX_MODULE_LINES = 40
_MAX_UNSPLIT = 12


def explain(plan: Plan, depth: int | None = None) -> Explanation:
    """Everything that a person asks about a plan first. `depth` limits the table of modules, which else fits a page."""
    anatomy = Anatomy(plan)
    sections = (
        _headline(anatomy),
        _axes(anatomy),
        _modules(anatomy, depth),
        _communication(anatomy),
        _memory(plan),
        compare(plan),
        _unsplit(anatomy),
    )
    return Explanation(tuple(s for s in sections if s.lines or s.table))


# ---- the plan as a whole ----


def _headline(anatomy: Anatomy) -> Section:
    plan, p, cluster = anatomy.plan, anatomy.plan.prediction, anatomy.plan.cluster
    is_split = cluster.num_devices == 1 or any(axis.share_of_compute["whole"] < 1 for axis in anatomy.axes)
    parts = f"compute {seconds(p.compute_s)}, optimizer {seconds(p.optimizer_s)}, communication "
    parts += f"{seconds(p.communication_s)}, of which {seconds(p.exposed_s)} exposed" if p.communication_s else "none"
    parts += f", bubble {seconds(p.bubble_s)}" if p.bubble_s > 1e-9 * p.step_s else ""
    devices = f"{plural(cluster.num_devices, 'device')} ({cluster.device.name})"
    return Section(
        f"{plan.model} on {cluster.name}: {devices}, mesh {plan.mesh}",
        (
            f"predicted step  {seconds(p.step_s)}: {parts}",
            f"memory          {size(p.memory.total_bytes)} of {size(cluster.device.memory_bytes)} on each device"
            + memory_warning(plan, p.memory.total_bytes),
            f"quality         {quality(plan)}",
            *((f"rewrites        {rewrites(plan)}",) if plan.report.rewrites else ()),
            f"cost figures    {provenance(cluster)}",
            *(() if is_split else ("NOTHING IS SPLIT: for a model this small, sharing work costs more than it saves",)),
        ),
    )


def memory_warning(plan: Plan, used_bytes: int) -> str:
    """What has to be said about so much memory on the plan's devices; nothing where it fits."""
    if verdict(used_bytes, plan.cluster.device.memory_bytes) == "may not fit":
        return ": WARNING, it MAY NOT FIT: the last tenth of the memory is in use, and predictions are not that exact"
    limit = min(plan.report.limit_bytes, plan.cluster.device.memory_bytes)
    return "" if used_bytes <= limit else f": DOES NOT FIT, the limit is {size(limit)}"


def memory_verdict(plan: Plan, prediction: Prediction) -> Verdict:
    """Whether a prediction for the plan's cluster fits its devices."""
    return verdict(prediction.memory.total_bytes, plan.cluster.device.memory_bytes)


def fits(plan: Plan) -> bool:
    """Whether the plan keeps to the memory limit of its search, and out of the last tenth of the memory."""
    safe = memory_verdict(plan, plan.prediction) == "fits"
    return safe and plan.prediction.memory.total_bytes <= plan.report.limit_bytes


def quality(plan: Plan) -> str:
    """How far the plan can be from the best one, as proven by the search for plans without rewrites."""
    report = plan.report
    meshes = plural(report.num_meshes, "mesh", "meshes")
    searched = f"by the cost model without overlap; {meshes} searched in {seconds(report.seconds)}"
    if not fits(plan):
        return f"no plan within memory was found; this is the smallest, {searched}"
    if report.bound_s <= 0:
        return f"no bound was proven; {searched}"
    gap = plan.prediction.serial_s / report.bound_s - 1
    if gap < -5e-5:
        return f"proven better than every layout of the operators as they were written, {searched}"
    if gap < 5e-5:
        return f"proven optimal among the layouts searched, {searched}"
    most = "0.1 %" if gap < 1e-3 else percent(gap)
    return f"at most {most} above the optimum of the layouts searched, {searched}"


def rewrites(plan: Plan) -> str:
    """The certified rules that changed the model's own operators, and how often."""
    steps = Counter(rule for rewrite in plan.report.rewrites for rule, _ in rewrite.steps)
    return ", ".join(f"{n} × {rule}" for rule, n in steps.items())


def provenance(cluster: Cluster) -> str:
    """Where the figures that predictions rest on come from, and what to do about guesses."""
    if cluster.provenance != "default":
        return cluster.provenance
    return f"built-in defaults, not of this machine; measure it with `shardwright calibrate {cluster.num_devices}`"


# ---- axes ----


def _axes(anatomy: Anatomy) -> Section:
    lines: list[str] = []
    for axis in anatomy.axes:
        crossed = links(anatomy.plan.cluster, anatomy.mesh, axis.name)
        lines.append(f"{axis.name} ({axis.size})  {axis_name(axis)}, over {crossed}: {_splits(axis)}")
        lines.append(f"{' ' * len(f'{axis.name} ({axis.size})')}  weights: {_stored(axis)}")
    return Section("What each axis does", tuple(lines))


def axis_name(axis: AxisUse) -> str:
    """What people call it, by where most of the compute is split."""
    uses = sorted(_NAMES, key=lambda use: -axis.share_of_compute[use])
    main = [u for u in uses if axis.share_of_compute[u] >= 0.25] or uses[:1]
    if not any(axis.num_operators[u] for u in main):
        return "zero-redundancy storage" if axis.num_weights["gathered"] else "replication"
    name = " and ".join(_NAMES[u] for u in main)
    return name + (" with gathered weights (ZeRO-3)" if axis.num_weights["gathered"] else "")


def _splits(axis: AxisUse) -> str:
    total = sum(axis.num_operators.values())
    uses = [u for u in _NOUNS if axis.num_operators[u]]
    parts = [
        f"{_NOUNS[u]} in {axis.num_operators[u]} ({percent(axis.share_of_compute[u])} of compute)"
        for u in sorted(uses, key=lambda u: -axis.share_of_compute[u])
    ]
    return f"of {plural(total, 'operator')}, splits {', '.join(parts) or 'none'}"


def _stored(axis: AxisUse) -> str:
    words = {
        "whole": "whole on every device",
        "sharded": "sharded as they are used",
        "gathered": "stored sharded, gathered for each use",
    }
    return ", ".join(f"{n} {words[kind]}" for kind, n in axis.num_weights.items() if n) or "none"


def links(cluster: Cluster, mesh: Mesh, axis: str) -> str:
    """The levels of the network that one group of the axis crosses."""
    index = mesh.index(axis)
    inner = 1
    for extent in mesh.sizes[index + 1 :]:
        inner *= extent
    outer, reach, names = inner * mesh.sizes[index], 1, list[str]()
    for level in cluster.levels:
        if outer > reach and inner < reach * level.size:
            names.append(level.name)
        reach *= level.size
    return " and ".join(names) or "one device"


# ---- modules ----


def _modules(anatomy: Anatomy, depth: int | None) -> Section:
    tree = list(module_tree(anatomy).walk())
    if depth is None:
        depth = 1
        while depth < 12 and sum(d <= depth + 1 for d, _ in tree) <= _MAX_MODULE_LINES:
            depth += 1
    shown = [(d, m) for d, m in tree if 0 < d <= depth]
    names = anatomy.mesh.names
    columns = [
        ("module", False),
        *((name, False) for name in names),
        ("compute", True),
        ("comm.", True),
        ("weights", True),
    ]
    rows = [
        ("  " * (d - 1) + _label(m), *(_uses(m, axis) for axis in range(len(names))), seconds(m.total.compute_s),
         seconds(m.total.communication_s), size(m.total.stored_bytes))
        for d, m in shown
    ]  # fmt: skip
    hidden = len(tree) - 1 - len(shown)
    more = (
        (f"{plural(hidden, 'module')} further inside: --depth {depth + 1} or the page of `shardwright view`",)
        if hidden
        else ()
    )
    return Section("Modules (per device and step; weights as stored)", more, Table(tuple(columns), tuple(rows)))


def _label(module: Module) -> str:
    repeated = len(module.members)
    return module.label + (f" ({repeated} alike)" if repeated > 1 else "")


def _uses(module: Module, axis: int) -> str:
    """Along what the axis splits most of a module's compute."""
    seconds_of: dict[str, float] = {}
    for _, inner in module.walk():
        for row in inner.rows:
            if row.kind == "operator":
                seconds_of[row.use[axis]] = seconds_of.get(row.use[axis], 0.0) + row.compute_s
    total = sum(seconds_of.values())
    main = [use for use, s in sorted(seconds_of.items(), key=lambda item: -item[1]) if s >= 0.05 * total]
    return "+".join(main) or "–"


# ---- communication and memory ----


def move_text(traffic: Traffic) -> str:
    """What happens to a value when its layout changes, forward and backward."""
    if traffic.what == "constant":
        return "each device takes its slice"
    if (traffic.what, traffic.before, traffic.after) == ("weight", "S", "C"):
        return "all-gathered, again in backward; gradients reduce-scattered"
    return MOVES[traffic.before, traffic.after].words


def _communication(anatomy: Anatomy) -> Section:
    rows = tuple(
        (plural(t.count, t.what), move_text(t), t.axis, size(t.sent_bytes), seconds(t.seconds)) for t in anatomy.traffic
    )
    p = anatomy.plan.prediction
    took = f"{seconds(p.communication_s)} on its own, {seconds(p.exposed_s)} of the step"
    title = f"Communication ({size(p.communication_bytes)} sent by each device per step, {took})"
    columns = (("what", False), ("how", False), ("axis", False), ("sent", True), ("time", True))
    return Section(title, () if rows else ("none",), Table(columns, rows) if rows else None)


def _memory(plan: Plan) -> Section:
    memory = plan.prediction.memory
    total = max(memory.total_bytes, 1)
    rows = tuple(
        (name, size(num_bytes), percent(num_bytes / total), "█" * round(30 * num_bytes / total))
        for name, num_bytes in memory.by_category().items()
        if num_bytes
    )
    columns = (("category", False), ("bytes", True), ("share", True), ("", False))
    title = f"Memory ({size(memory.total_bytes)} at the peak, on each device)"
    return Section(title, (f"peak: {plan.prediction.peak_at}",), Table(columns, rows))


# ---- comparison ----

_COMPARED = (("plan", False), ("mesh", False), ("step", True), ("", False), ("compute", True), ("exposed", True),
             ("memory", True), ("", False))  # fmt: skip


def compare(plan: Plan) -> Section:
    """The plan beside the baselines and the best plans of other meshes."""
    others = sorted(plan.alternatives, key=lambda a: a.prediction.step_s)
    own = plan.prediction
    rows = [_comparison("this plan", plan.mesh, own, own, memory_verdict(plan, own))]
    rows += [_comparison(a.name, a.mesh, a.prediction, own, memory_verdict(plan, a.prediction)) for a in others]
    return Section(
        "Compared with", ("by the timeline, in which communication and compute overlap",), Table(_COMPARED, tuple(rows))
    )


def compare_plans(plans: Mapping[str, Plan]) -> Section:
    """Several plans beside each other, the first one as the measure."""
    first = next(iter(plans.values()))
    models = {plan.fingerprint for plan in plans.values()}
    rows = tuple(
        _comparison(n, p.mesh, p.prediction, first.prediction, memory_verdict(p, p.prediction))
        for n, p in plans.items()
    )
    note = ("these plans are for different models or batches",) if len(models) > 1 else ()
    return Section("Plans", note, Table(_COMPARED, rows))


def _comparison(name: str, mesh: Mesh, own: Prediction, plan: Prediction, memory: Verdict) -> tuple[str, ...]:
    return (name, str(mesh), seconds(own.step_s), "" if own is plan else faster_or_slower(own.step_s, plan.step_s),
            seconds(own.compute_s), seconds(own.exposed_s), size(own.memory.total_bytes),
            "" if memory == "fits" else memory)  # fmt: skip


def faster_or_slower(step_s: float, plan_s: float) -> str:
    """How another step time compares with the plan's."""
    ratio = step_s / plan_s if plan_s > 0 else 1.0
    if abs(ratio - 1) < 5e-4:
        return "the same"
    factor, word = (ratio, "slower") if ratio > 1 else (1 / ratio, "faster")
    return f"{factor:.1f} × {word}" if factor >= 2 else f"{percent(factor - 1)} {word}"


def _unsplit(anatomy: Anatomy) -> Section:
    everything = anatomy.unsplit
    rows = tuple(
        (u.axis, f"{u.count} × {u.op}", seconds(u.compute_s), u.reason, u.example) for u in everything[:_MAX_UNSPLIT]
    )
    if not rows:
        return Section("Operators that run whole", ("none: every operator shares its work along every axis",))
    rest: Sequence[Unsplit] = everything[_MAX_UNSPLIT:]
    more = (f"and {plural(len(rest), 'more kind')}, {seconds(sum(u.compute_s for u in rest))}",) if rest else ()
    columns = (("axis", False), ("operators", False), ("time", True), ("why", False), ("for example", False))
    return Section("Operators that run whole along an axis", more, Table(columns, rows))
