"""A plan beside the plan of a question: why not that strategy, or what if the cluster or the batch changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from shardwright.reports.comparison import run_as
from shardwright.reports.exposed import KINDS, exposed_by_kind
from shardwright.reports.facts import PlanFacts, fits, memory_verdict, step_parts, usable_bytes
from shardwright.reports.report import OWN, Paragraph, Report
from shardwright.reports.units import percent, seconds, size, times
from shardwright.reports.wording import THE_SAME, axis_name, faster_or_slower, idle, rewrites
from shardwright.search.plan import Plan
from shardwright.search.request.spaces import batch_size, sequence_length

_Row = tuple[str, ...]
_Number = Callable[[float], str]
_WAITS = "exposed communication"
_SMALL = 1e-3
"""The share of a step below which a part is not mentioned."""


class WhyNotReport(Report):
    """The time of a strategy and its parts, or the reason why it cannot be run.

    Attributes:
        plan: that the question is about.
        title: of the strategy.
        other: the strategy's best plan; None where it cannot be run.
        reason: why not.
        rewritten: whether `other` begins from operators that the plan has rewritten, not from the model's own.
    """

    def __init__(
        self, plan: Plan, title: str, other: Plan | None, reason: str = "", *, rewritten: bool = False
    ) -> None:
        self.plan, self.title, self.other, self.reason, self.rewritten = plan, title, other, reason, rewritten

    @property
    def verdict(self) -> str:
        """The result in a line: `2.4 % slower: a step of 1.60 s`."""
        plan, other = self.plan, self.other
        if other is None:
            return f"cannot be run: {self.reason}"
        if not fits(other):
            return _too_large(other)
        if not fits(plan):
            return f"it fits, with a step of {seconds(other.prediction.step_s)}; this plan does not"
        comparison = faster_or_slower(other.prediction.step_s, plan.prediction.step_s)
        step = f"a step of {_not(seconds(other.prediction.step_s), seconds(plan.prediction.step_s))}"
        if not comparison.endswith("faster"):
            return "as fast as this plan" if comparison == THE_SAME else f"{comparison}: {step}"
        why = f"; this plan keeps to what was asked for: {plan.asked}" if str(plan.asked) else ""
        return f"{comparison}: {step}{why}"

    def paragraphs(self) -> list[Paragraph]:
        title = f"Why not {self.title}"
        if self.other is None:
            return [Paragraph(title, [self.verdict])]
        rows = [*_times(self.plan, self.other), *_memory(self.plan, self.other), *_ways(self.plan, self.other)]
        begin = (
            f"both begin from operators that this plan has rewritten ({rewrites(self.plan)}); give the model to begin"
        )
        notes = [f"{begin} from its own"] if self.rewritten else []
        return [Paragraph(title, [self.verdict], ("", f">{OWN}", f">{self.title}", ">more"), rows, notes)]

    def data(self) -> dict[str, Any]:
        other = self.other and _data(self.other)
        return {"strategy": self.title, "verdict": self.verdict, "plan": _data(self.plan), "other": other}


class WhatIfReport(Report):
    """The plan as it is and as it would be, side by side, and the `changes` of the question."""

    def __init__(self, plan: Plan, other: Plan, changes: Mapping[str, str]) -> None:
        self.plan, self.other, self.changes = plan, other, changes

    def paragraphs(self) -> list[Paragraph]:
        title = f"What if {', '.join(f'{name}={change}' for name, change in self.changes.items())}"
        plan, other = self.plan, self.other
        rows = [
            *_setting(plan, other), *_times(plan, other), *_throughput(plan, other), *_memory(plan, other),
            *_ways(plan, other),
        ]  # fmt: skip
        return [Paragraph(title, list(self._verdict()), ("", f">{OWN}", ">then", ">more"), rows)]

    def _verdict(self) -> Iterator[str]:
        plan, other = self.plan, self.other
        steps = _not(seconds(other.prediction.step_s), seconds(plan.prediction.step_s))
        yield f"a step of {steps}: {_more(plan, other)} a second on each device"
        if other.idle:
            yield f"not all used: {idle(other)}"
        if not fits(other):
            yield _too_large(other)
        if plan.asked.mesh is not None and other.asked.mesh is None:
            requested, count = plan.asked.mesh, other.cluster.num_devices
            yield f"mesh {requested} was asked for, which is none of {count} devices: now the search chose"
        if isinstance(plan.asked.stages, tuple) and other.asked.stages != plan.asked.stages:
            requested, count = " + ".join(map(str, plan.asked.stages)), other.cluster.num_devices
            yield f"stages of {requested} devices were asked for, not of {count}: now the search chose"

    def data(self) -> dict[str, Any]:
        return {"changes": dict(self.changes), "plan": _data(self.plan), "other": _data(self.other)}


def _too_large(plan: Plan) -> str:
    used, limit = plan.prediction.memory.total_bytes, usable_bytes(plan)
    over = f", {size(used - limit)} more than the {size(limit)} that may be used" if used > limit else ""
    return f"{memory_verdict(plan)}: the smallest plan found takes {size(used)} on each device{over}"


def _not(new: str, old: str) -> str:
    """Return both values, `1.60 s, not 1.47 s`, or one if they are equal."""
    return new if new == old else f"{new}, not {old}"


def _more(plan: Plan, other: Plan) -> str:
    """Return the change of rate in words: `2.4 % fewer examples`, or tokens if examples differ in length."""
    lengths = [sequence_length(p.graph) or 1 for p in (plan, other)]
    ratio = _per_device(other) * lengths[1] / (_per_device(plan) * lengths[0])
    things = "examples" if lengths[0] == lengths[1] else "tokens"
    if abs(ratio - 1) < 5e-4:
        return f"as many {things}"
    if ratio >= 2:
        return f"{times(ratio)} as many {things}"
    return f"{percent(abs(ratio - 1))} {'more' if ratio > 1 else 'fewer'} {things}"


def _data(plan: Plan) -> dict[str, Any]:
    return {
        **run_as(plan), "num_devices": plan.cluster.num_devices, "batch": batch_size(plan.graph), "fits": fits(plan),
        "examples_per_s_per_device": _per_device(plan), "exposed": exposed_by_kind(plan),
        "prediction": plan.prediction.to_json(),
    }  # fmt: skip


# ---- rows: a name, this plan, the other, the difference ----


def _setting(plan: Plan, other: Plan) -> Iterator[_Row]:
    """Yield rows for the values that the question changed."""
    pairs = {
        "devices": [str(p.cluster.num_devices) for p in (plan, other)],
        "batch": [str(batch_size(p.graph)) for p in (plan, other)],
        "sequence": [str(sequence_length(p.graph) or "") for p in (plan, other)],
    }
    for inner, outer in zip(plan.cluster.levels, other.cluster.levels, strict=False):
        pairs[inner.name] = [f"{size(x.bandwidth_bytes_per_s)}/s" for x in (inner, outer)]
    pairs["bf16 peak"] = [f"{p.cluster.device.flops_per_s.get('bf16', 0) / 1e12:.0f} TFLOPS" for p in (plan, other)]
    yield from ((name, *pair, "") for name, pair in pairs.items() if pair[0] != pair[1])


def _times(plan: Plan, other: Plan) -> Iterator[_Row]:
    """Yield the step, its parts, and the parts of its waits; small parts are left out."""
    least_s = _SMALL * min(p.prediction.step_s for p in (plan, other))
    yield _difference("step", plan.prediction.step_s, other.prediction.step_s, seconds, least_s)
    parts, others = step_parts(plan.prediction), step_parts(other.prediction)
    for name, own_s in parts.items():
        if max(abs(own_s), abs(others[name])) < least_s:
            continue
        yield _difference(f"  {name}", own_s, others[name], seconds, least_s)
        if name == _WAITS:
            mine, its = exposed_by_kind(plan), exposed_by_kind(other)
            for kind in KINDS:
                pair = mine.get(kind, 0.0), its.get(kind, 0.0)
                if max(pair) >= least_s:
                    yield _difference(f"    of {kind}", *pair, seconds, least_s)


def _throughput(plan: Plan, other: Plan) -> Iterator[_Row]:
    mine, its = _per_device(plan), _per_device(other)
    yield _difference("examples/s", mine * plan.cluster.num_devices, its * other.cluster.num_devices, _plain)
    yield _difference("  per device", mine, its, _plain)
    lengths = sequence_length(plan.graph), sequence_length(other.graph)
    if lengths[0] is not None and lengths[1] is not None:
        yield _difference("  tokens per device", mine * lengths[0], its * lengths[1], _plain)


def _memory(plan: Plan, other: Plan) -> Iterator[_Row]:
    """Yield the bytes at the peak, and the categories whose amounts differ."""
    mine, its = plan.prediction.memory, other.prediction.memory
    yield _difference("memory", mine.total_bytes, its.total_bytes, size)
    categories, others = mine.by_category(), its.by_category()
    for name, num_bytes in categories.items():
        if abs(num_bytes - others[name]) > 0.01 * max(mine.total_bytes, its.total_bytes):
            yield _difference(f"  {name}", num_bytes, others[name], size)
    if usable_bytes(plan) != usable_bytes(other):
        yield _difference("  that may be used", usable_bytes(plan), usable_bytes(other), size)


def _ways(plan: Plan, other: Plan) -> Iterator[_Row]:
    """Yield the way in which both plans are run, including the common parts."""
    mine, its = PlanFacts(plan), PlanFacts(other)
    runs = [run_as(p) for p in (plan, other)]
    yield "mesh", *(p["mesh"] for p in runs), ""
    for pair in zip_longest(_axes(mine), _axes(its), fillvalue=""):
        yield "  axis", *pair, ""
    yield "microbatches", *(str(p["num_microbatches"]) for p in runs), ""
    yield "weights", _kept(mine), _kept(its), ""
    if any(p["lifetimes"] for p in runs):
        yield "  gathered as in", *(p["lifetimes"] or "–" for p in runs), ""
    yield "made again", *(p["again"] or "nothing" for p in runs), ""


def _axes(facts: PlanFacts) -> list[str]:
    """Return the name of each axis of devices without its gathered weights, which have their own row."""
    return [f"{a.name}: {axis_name(a, facts.mesh).partition(' with')[0]}" for a in facts.axes if not a.is_time]


def _kept(facts: PlanFacts) -> str:
    """Return the number of parameters by storage: `193 whole, 98 sharded`."""
    ways = Counter(
        next((k for k in ("gathered", "sharded") if k in kinds), "whole") for kinds in facts.storage.values()
    )
    return ", ".join(f"{count} {how}" for how, count in ways.most_common())


def _difference(name: str, mine: float, its: float, number: _Number, least: float = 0.0) -> _Row:
    more = "" if abs(its - mine) <= least or number(mine) == number(its) else number(abs(its - mine))
    return name, _signed(mine, number), _signed(its, number), more and ("+" if its > mine else "−") + more


def _signed(value: float, number: _Number) -> str:
    return number(value) if value >= 0 or number(-value) == "0" else f"−{number(-value)}"


def _plain(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _per_device(plan: Plan) -> float:
    """Return the examples per second on each device, idle devices included."""
    devices = plan.cluster.num_devices + (plan.idle.num_devices if plan.idle else 0)
    return max(batch_size(plan.graph), 1) / plan.prediction.step_s / devices
