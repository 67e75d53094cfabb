"""The facts of a plan in words: an axis, a move, the quality of the plan, the source of its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.groups import group_of
from shardwright.cost.prediction import Prediction
from shardwright.cost.timeline.memory import Memory, Stored, kept_bytes, verdict
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.moves import MOVES
from shardwright.pcg.offers import EXCHANGES
from shardwright.pcg.types import TensorType
from shardwright.reports.facts import (
    AxisFacts,
    SplitAlong,
    StoredAs,
    Traffic,
    fits,
    memory_verdict,
    ranked_alternatives,
    serial_parts,
    step_parts,
    usable_bytes,
)
from shardwright.reports.lifetimes import how_often, lifetime_name, lifetime_names
from shardwright.reports.running import again_name
from shardwright.reports.units import bar, percent, plural, seconds, size, times
from shardwright.search.plan import Alternative, Plan

SEARCHED = "search on "
ESTIMATED = "estimated"
"""A remark on plans costed by one block for all its equals. `SEARCHED` begins the names of the search's own plans."""
THE_SAME = "the same"

# ---- axes ----

_NAMES: dict[SplitAlong, str] = {
    "batch": "data parallel", "sequence": "sequence parallel", "experts": "expert parallel",
    "features": "tensor parallel",
}  # fmt: skip
_MUCH = 0.25
"""The least share of compute or of weights by which an axis gets its name."""
_ABOUT = 0.05
"""The largest relative difference between two predictions that count as the same."""


def axis_name(axis: AxisFacts, mesh: Mesh) -> str:
    """Return an axis's name by the split of most of its compute and the storage of most of its weights."""
    if axis.is_time:
        return "microbatches, one after the other on the same devices"
    uses = sorted(_NAMES, key=lambda use: -axis.share_of_compute[use])
    main = [u for u in uses if axis.share_of_compute[u] >= _MUCH] or uses[:1]
    if not any(axis.num_operators[u] for u in main):
        return "zero-redundancy storage" if axis.num_weights["gathered"] else "replication"
    name, gathered = " and ".join(_NAMES[u] for u in main), axis.share_of_weights["gathered"] >= _MUCH
    if not gathered:
        return name
    stay = lifetime_names(axis.num_gathered, mesh)
    return f"{name} with gathered weights" + (f" ({stay})" if stay else "")


_STORED: dict[StoredAs, str] = {
    "whole": "whole on every device",
    "sharded": "sharded as they are used",
    "gathered": "stored sharded and gathered for use",
}


def stored_text(axis: AxisFacts, kind: StoredAs, mesh: Mesh) -> str:
    """Return the storage in words: `145 stored sharded and gathered for use (49 ZeRO-1, 96 ZeRO-3)`."""
    counts = Counter[str]()
    for zero, count in axis.num_gathered.items() if kind == "gathered" else ():
        counts[lifetime_name(zero, mesh)] += count
    counted = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return f"{axis.num_weights[kind]} {_STORED[kind]}" + (f" ({counted})" if counted else "")


def links(cluster: Cluster, mesh: Mesh, axis: str) -> str:
    """Return the levels of the network that one group of the axis crosses."""
    group = group_of(mesh.device_sizes, mesh.index(axis), cluster.levels)
    crossed = [level.name for level, split in zip(cluster.levels, group.splits, strict=True) if split > 1]
    return " and ".join(crossed) or "one device"


# ---- moves ----


def move_text(traffic: Traffic, mesh: Mesh) -> str:
    """Return the collectives of a change of layout, forward and backward, and how often they run, in words."""
    if traffic.what == "constant":
        return "each device takes its slice"
    if (exchange := EXCHANGES.get(traffic.what)) is not None:
        return f"{exchange.words}{how_often(traffic.num_forward, mesh)}; so are gradients"
    forward, backward = (how_often(count, mesh) for count in (traffic.num_forward, traffic.num_backward))
    if (traffic.what, traffic.before, traffic.after) == ("weight", "S", "C"):
        return f"all-gathered{forward}; gradients reduce-scattered{backward}"
    often = backward or forward if traffic.num_forward >= traffic.num_backward else backward
    moved_again = "; the value again for backward" if traffic.num_forward > traffic.num_backward > 0 else ""
    return MOVES[traffic.before, traffic.after].words + ("," if often.startswith(" ") else "") + often + moved_again


# ---- the whole plan ----


def memory_warning(plan: Plan, used_bytes: int) -> str:
    """Return a warning about `used_bytes` on the plan's devices, or "" if they fit."""
    if verdict(used_bytes, plan.prediction.device_bytes) == "may not fit":
        return ": WARNING, it MAY NOT FIT: the last tenth of the memory is in use, and predictions are not that exact"
    limit = min(plan.report.limit_bytes, plan.prediction.device_bytes)
    return "" if used_bytes <= limit else f": DOES NOT FIT, the limit is {size(limit)}"


def remedies(plan: Plan) -> list[str]:
    """Return changes with which a plan would fit, a line each; none if it fits."""
    listed = plan.report.remedies
    if fits(plan):
        return []
    lines = [f"{remedy.what}: a step of {seconds(remedy.step_s)}" for remedy in listed]
    lines = lines or ["nothing was found that would fit: more devices, a smaller batch, offload or pipeline stages"]
    return [*_too_large(plan), *lines]


def _too_large(plan: Plan) -> list[str]:
    """Return a line about the largest weight if it does not fit even in equal slices."""
    graph, num_devices = plan.graph, plan.cluster.num_devices
    sizes = {str(leaf.attr("target")): kept_bytes(_stored(graph.types[leaf.name]), plan.execution)
            for leaf in graph.leaves("parameter")}  # fmt: skip
    largest = max(sizes, key=sizes.__getitem__, default="")
    usable = usable_bytes(plan)
    if not largest or not usable or sizes[largest] / num_devices <= usable:
        return []
    least = ceil(sizes[largest] / usable)
    each = f"{size(sizes[largest] / num_devices)} on each of {num_devices} devices in equal slices"
    states = "with its gradient and optimizer states"
    return [f"{largest} alone takes {each}, {states}: at least {least} devices have to share it"]


def _stored(kind: TensorType) -> Stored:
    return Stored(kind.num_elements, kind.dtype, kind.grad, True, kind.dtype, kind.shape)


def infeasible(plan: Plan) -> str:
    """Return a message that a plan does not fit, with the excess and remedies."""
    used, limit = plan.prediction.memory.total_bytes, usable_bytes(plan)
    least = (
        f"the smallest plan found needs {size(used)} on each device, {size(used - limit)} more than the {size(limit)}"
    )
    return f"no plan fits: {least} that may be used; what would: " + "; ".join(remedies(plan))


def outdated(before: Prediction, now: Prediction) -> str:
    """Return a message if a file's prediction differs from the present one of its plan; "" if they agree."""
    pairs = (before.step_s, now.step_s), (before.memory.total_bytes, now.memory.total_bytes)
    if all(abs(a - b) <= _ABOUT * b for a, b in pairs):
        return ""
    was, new = (f"{seconds(p.step_s)} and {size(p.memory.total_bytes)}" for p in (before, now))
    return (
        f"it says a step of {was} on each device, the prediction now made of its plan is {new}; the file was edited, "
        "or another version wrote it: plan again"
    )


def memory_rows(memory: Memory) -> list[tuple[str, str, str, str]]:
    """Return the memory in use by category: name, bytes, share and a bar."""
    total = max(memory.total_bytes, 1)
    return [
        (name, size(num_bytes), percent(num_bytes / total), bar(num_bytes / total))
        for name, num_bytes in memory.by_category().items()
        if num_bytes
    ]


def sum_of(parts: Mapping[str, float]) -> str:
    """Return the parts in a line, `compute 380 ms, optimizer 1.19 ms`, without parts of no time."""
    total_s = sum(parts.values())
    return ", ".join(f"{name} {seconds(own_s)}" for name, own_s in parts.items() if own_s > 1e-9 * total_s) or "nothing"


def step(p: Prediction) -> str:
    """Return the predicted step, and the parts that add up to it."""
    return f"{seconds(p.step_s)}: {sum_of(step_parts(p))}"


def serial(p: Prediction) -> str:
    """Return the step without overlap, by which modules and communication are listed."""
    return f"{seconds(p.serial_s)}: {sum_of(serial_parts(p))}"


def modules_note(plan: Plan) -> str:
    """Return a note on the times in the table of modules."""
    p, count, stages = plan.prediction, plan.mesh.num_microbatches, plan.execution.schedule.num_stages
    rest = f"the optimizer's {seconds(p.optimizer_s)} are not among them" if p.optimizer_s else ""
    listed = f"{seconds(p.compute_s + p.communication_s)} with nothing overlapping, of a step of {seconds(p.step_s)}"
    together = "all repeats of a block" + (f" and all {count} microbatches" if count > 1 else "")
    whose = f"one device, {listed}"
    if stages > 1:
        largest = ", each as large as the largest" if plan.execution.schedule.stage_sizes else ""
        whose = f"one device of each of the {stages} stages{largest}, added up, in a step of {seconds(p.step_s)}"
    return f"{together} together; compute and communication of {whose}" + (f"; {rest}" if rest else "")


class Standing(NamedTuple):
    """A comparison of a plan with another, in a few words."""

    headline: str
    text: str

    @property
    def line(self) -> str:
        """Return headline and text in one line."""
        return self.headline + (" " if self.text.startswith(("as ", "than ")) else ": ") + self.text


def standing(plan: Plan) -> Standing:
    """Compare a plan with the best plan by hand that fits, or with a faster plan that fits."""
    ranked = ranked_alternatives(plan)
    fitting = [a for a in ranked if memory_verdict(plan, a) == "fits"]
    if not ranked:
        return Standing("not compared", "no other plan was tried")
    if not fitting:
        least = min(ranked, key=lambda a: a.prediction.memory.total_bytes)
        who = f"none of {len(ranked)} other plans does; the smallest" if len(ranked) > 1 else "the only other plan"
        needs = f"{who}, {called(least)}, needs {size(least.prediction.memory.total_bytes)}"
        return Standing("nothing else fits" if fits(plan) else "nothing fits", needs)
    best = fitting[0]
    if not fits(plan):
        return Standing("does not fit", f"{called(best)} does, with a step of {seconds(best.prediction.step_s)}")
    by_hand = [a for a in fitting if SEARCHED not in a.name]
    if by_hand and not faster_or_slower(best.prediction.step_s, plan.prediction.step_s).endswith("faster"):
        best = by_hand[0]
    kind = "other plan" if SEARCHED in best.name else "plan by hand"
    headline = faster_or_slower(plan.prediction.step_s, best.prediction.step_s)
    than = "as" if headline == THE_SAME else "than"
    step = seconds(best.prediction.step_s) + (f", {ESTIMATED}" if best.estimated else "")
    most = max((a.execution.schedule.num_stages for a in by_hand), default=1)
    if SEARCHED not in best.name and plan.execution.schedule.num_stages > 1 == most:
        staged = any(a.execution.schedule.num_stages > 1 and SEARCHED not in a.name for a in plan.alternatives)
        step += "; none by hand with stages fits" if staged else "; none by hand has stages"
    return Standing(headline, f"{than} the best {kind} that fits: {called(best)}, {step}")


def called(other: Alternative) -> str:
    """Return the name of an alternative, with its recomputation if the name does not include it."""
    mode = again_name(other.execution)
    return other.name + (f", {mode} recomputation" if mode and "recomputation" not in other.name else "")


def quality(plan: Plan) -> str:
    """Return the proven distance of the plan from the best one, within the space of `SearchReport.bound_s`."""
    report = plan.report
    meshes = plural(report.num_meshes, "mesh", "meshes")
    searched = f"{meshes} searched in {seconds(report.seconds)}"
    if report.stopped:
        early = f"{seconds(report.seconds)}, ended by {report.stopped} before it was through"
        searched = f"{meshes}, of which the search of {early}, may have left out some"
    searched = f"by the cost model; {searched}"
    if not fits(plan):
        return f"no plan within memory was found; this is the smallest, {searched}"
    if report.bound_s <= 0:
        return f"no bound was proven; {searched}"
    gap = plan.prediction.step_s / report.bound_s - 1
    cut = plural(plan.mesh.num_microbatches, "microbatch", "microbatches")
    recomputing = "the same recomputation" if isinstance(plan.execution.recompute, str) else "nothing made again"
    searched = f"in {cut} with {recomputing}, whatever memory they take, {searched}"
    if gap < -5e-5:
        return f"proven better than every layout of the operators as they were written, {searched}"
    if gap < 5e-5:
        return f"proven optimal among the layouts searched {searched}"
    most = "0.1 %" if gap < 1e-3 else percent(gap)
    return f"at most {most} above the optimum of the layouts searched {searched}"


def rewrites(plan: Plan) -> str:
    """Return the certified rules that changed the model's own operators, and how often."""
    steps = Counter(rule for rewrite in plan.report.rewrites for rule, _ in rewrite.steps)
    return ", ".join(f"{n} × {rule}" for rule, n in steps.items())


def idle(plan: Plan) -> str:
    """Return the unused devices of the cluster and the reason, `3 of 7 devices idle: …`, or ""."""
    left_out = plan.idle
    return (
        f"{left_out.num_devices} of {plan.cluster.num_devices + left_out.num_devices} devices idle: {left_out.reason}"
        if left_out
        else ""
    )


def provenance(cluster: Cluster) -> str:
    """Return the source of the figures behind predictions, and advice if they are guesses."""
    if cluster.provenance != "default":
        return cluster.provenance
    return f"built-in defaults, not of this machine; measure it with `shardwright calibrate {cluster.num_devices}`"


def faster_or_slower(step_s: float, plan_s: float) -> str:
    """Return a step time relative to the plan's, in words."""
    ratio = step_s / plan_s if min(step_s, plan_s) > 0 else 1.0
    if abs(ratio - 1) < 5e-4:
        return THE_SAME
    factor, word = (ratio, "slower") if ratio > 1 else (1 / ratio, "faster")
    return f"{times(factor)} {word}" if factor >= 2 else f"{percent(factor - 1)} {word}"
