"""The planning of a model: capture, search, proof.

model and batch ──capture──▶ serial graph ──Planner──▶ Plan ──check_plan──▶ a plan that is proven
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from shardwright.checking import CheckCapture, check_capture_of
from shardwright.cost.clusters.cluster import Cluster
from shardwright.judging import jury
from shardwright.lowering.runtime.precision import check_device
from shardwright.options import PlanOptions, Statistics
from shardwright.pcg.capture.alike import ForwardTrace
from shardwright.pcg.capture.capture import Captured, capture
from shardwright.pcg.capture.returned import Returned
from shardwright.pcg.collectives.sums import adds_alike
from shardwright.pcg.encodings import in_words
from shardwright.pcg.errors import PlanError
from shardwright.pcg.foreign import Call
from shardwright.pcg.graph import Graph
from shardwright.pcg.padding.longer import padded
from shardwright.pcg.padding.origins import paddings
from shardwright.pcg.padding.rows import with_rows
from shardwright.pcg.step.precisions import PrecisionMode, base_of, shown
from shardwright.reports.facts import fits
from shardwright.reports.wording import SEARCHED
from shardwright.search.check import check_plan
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.collector import collector_paused
from shardwright.search.plan import Alternative, CaptureCheck, Plan, fingerprint, most_frequent
from shardwright.search.request.spaces import batch_size
from shardwright.search.tree.encodings import extremes
from shardwright.search.tree.planner import Planner, Progress
from shardwright.verifier.choices import Certified
from shardwright.verifier.collectives import verify_schedule


@lru_cache(maxsize=1)
def certified_choices() -> Certified:
    """Return the split choices of nodes that carry a certificate; no others enter the search."""
    return Certified()


def certified_by(rules: str | os.PathLike[str] | None, progress: Progress | None) -> Certified:
    """Return the choices that a rule file allows, or those of the shipped catalogue."""
    if rules is None:
        return certified_choices()
    tell = progress or (lambda message: None)
    return Certified.of_file(Path(rules), tell, jury(tell))


@collector_paused()
def captured_for(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    asked: PlanOptions,
    progress: Progress | None,
    precision: PrecisionMode | None,
    statistics: Statistics,
    known: Sequence[Call] = (),
    returned: Returned | None = None,
    trace: ForwardTrace | None = None,
) -> Captured:
    """Capture a model in a precision, with these statistics; `known`: the foreign calls of a plan for this batch.

    `returned`: receives the form of what the model returns, which the graph then gives in place of the loss. `trace`:
    what `trace_of` has seen of the model on this batch.
    Raises as `capture` does.
    """
    if progress:
        progress(f"capturing {type(model).__name__}")
    return capture(
        model, kwargs or {}, args, strict=asked.strict, precision=precision,
        num_microbatches=statistics.num_microbatches, per_microbatch=statistics.modules,
        foreign=asked.foreign, find=not asked.strict and not known, known=known, returned=returned,
        trace=trace,
    )  # fmt: skip


def prove(plan: Plan, captured: Graph, certified: Certified) -> None:
    """Raise a `PlanError` unless a plan is proven of a captured graph. Rules are looked up where it has rewrites."""
    check_plan(plan, captured, certified, certified.by_name() if plan.report.rewrites else {})


def statistics_of(plan: Plan) -> Statistics:
    """Return the statistics that a plan's model is captured for."""
    return Statistics(plan.mesh.num_microbatches, plan.execution.per_microbatch)


def check_schedules(cluster: Cluster) -> None:
    """Prove the schedules that a cluster holds: right, of equal shares, and added up in the same order on all ranks.

    Raises:
        PlanError: one is not, with the chunk, rank and step.
    """
    schedules = cluster.schedules
    for schedule in () if schedules is None else schedules.own:
        verdict = verify_schedule(schedule)
        if not verdict.is_certified:
            raise PlanError(f"{schedule.name}: {verdict.refusals[0]}; plan without this schedule")
        if not schedule.collective.has_equal_units:
            problem = "expected as much for every rank, got other shares, or a custom collective"
            raise PlanError(f"{schedule.name}: {problem}; plan without this schedule")
        if not adds_alike(schedule):
            problem = "ranks would add up in other orders, so replicas would not stay equal"
            raise PlanError(f"{schedule.name}: {problem}; plan without this schedule")


class Traced(NamedTuple):
    """A model as the search takes it: captured in one precision.

    Attributes:
        model: the name of its class.
        graph: the serial graph.
        precision: the precision of the capture, as `Captured` has it.
        per_microbatch: the modules whose statistics are taken of each microbatch.
        check: how the capture compared with an eager step; None: it was not compared.
    """

    model: str
    graph: Graph
    precision: PrecisionMode | None
    per_microbatch: tuple[str, ...]
    check: CaptureCheck | None = None


Trace = Callable[[PrecisionMode | None], Traced]
"""Gives a model in a precision."""


def searched(
    model: nn.Module,
    cluster: Cluster,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    certified: Certified,
    asked: PlanOptions,
    progress: Progress | None,
    check_capture: CheckCapture,
) -> tuple[Plan, Captured]:
    """Return the best plan over all precisions, with the others as alternatives, and its capture."""
    found = list[Captured]()

    def traced(precision: PrecisionMode | None) -> Traced:
        captured = captured_for(model, args, kwargs, asked, progress, precision, asked.statistics)
        check = check_capture_of(model, captured, args, kwargs, check_capture, progress)
        found.append(captured)
        return Traced(type(model).__name__, captured.graph, captured.precision, captured.per_microbatch, check)

    plan, number = best_of(traced, cluster, certified, asked, progress)
    return plan, found[number]


def check_devices(asked: PlanOptions, cluster: Cluster) -> None:
    """Raise `PlanError` where the cluster's devices cannot run a precision; fp8 can be costed anywhere."""
    for own in asked.precisions:
        if own != "fp8":
            check_device(base_of(own), cluster.device.kind)


def best_of(
    trace: Trace, cluster: Cluster, certified: Certified, asked: PlanOptions, progress: Progress | None
) -> tuple[Plan, int]:
    """Return the best plan over all precisions, with the others as alternatives, and the number of its precision."""
    plans, rules = list[tuple[int, Plan]](), certified.by_name()
    check_schedules(cluster)
    for number, precision in enumerate(asked.precisions):
        traced = trace(precision)
        for encodings in extremes(asked.search.encodings):
            planner = Planner(
                cluster, certified, progress, rules, traced.precision, traced.per_microbatch, asked.reduce_dtype,
                asked.optimizer, encodings,
            )  # fmt: skip
            plan = _best(planner, traced.graph, traced.model, cluster, asked)
            prove(plan, traced.graph, certified)
            check_schedules(plan.cluster)
            plans.append((number, replace(plan, capture_check=traced.check)))
    number, best = min(plans, key=lambda own: (not fits(own[1]), own[1].prediction.step_s))
    others = tuple(
        Alternative(
            f"{SEARCHED}{p.mesh}, {shown(p.execution.precision)}{in_words(p.execution.encodings)}",
            p.mesh,
            p.prediction,
            fits(p),
            p.execution,
            most_frequent(p.graph),
        )
        for _, p in plans
        if (p.execution, p.graph) != (best.execution, best.graph)
    )
    return replace(best, alternatives=(*best.alternatives, *others)), number


def _best(planner: Planner, graph: Graph, model: str, cluster: Cluster, asked: PlanOptions) -> Plan:
    """Return the best plan of a graph; where padding is asked for, the best of the graphs with and without it."""
    numbers = _padded_for(asked, cluster)
    found, refused = list[Plan](), None
    begins = dict.fromkeys([*(paddings(graph, number) for number in numbers), ()])
    batches = dict.fromkeys([*(_more_rows(graph, number, asked) for number in numbers), ()])
    for own, rows in product(begins, batches):
        longer = padded(graph, own)
        try:
            plan = planner.plan(with_rows(longer, *rows) if rows else longer, model, **asked.search.words)
        except NoLayoutsError as error:  # such as of a pin that only the other graph can keep to
            refused = refused or error
            continue
        report = replace(plan.report, padding=own, rows=rows)
        found.append(replace(plan, fingerprint=fingerprint(graph), report=report))
    if not found and refused is not None:
        raise refused
    return min(found, key=lambda plan: (not fits(plan), plan.prediction.step_s))


def _more_rows(graph: Graph, number: int, asked: PlanOptions) -> tuple[int, ...]:
    """Return the batch's number of rows, and the one that so many devices share evenly; () where that is the same."""
    size = batch_size(graph)
    rows = -(-size // number) * number
    return () if rows == size or asked.statistics.modules else (size, rows)


def _padded_for(asked: PlanOptions, cluster: Cluster) -> list[int]:
    """Return numbers of devices to pad for: of an axis of the mesh, or of one machine and of all."""
    if asked.pad is not None:
        return [asked.pad] if asked.pad > 1 else []
    mesh = asked.search.mesh
    machine = [level.size for level in cluster.levels[:1]]
    sizes = [*machine, cluster.num_devices] if mesh is None else mesh.devices.sizes
    return sorted({size for size in sizes if size > 1})
