"""The search for a model's plan, over precisions, encodings and padding.

model and batch ──planning──▶ serial graph ──Planner──▶ Plan ──prove──▶ a plan that is proven
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from shardwright.cost.clusters.cluster import Cluster
from shardwright.options import CheckCapture, PlanOptions
from shardwright.pcg.encodings import in_words
from shardwright.pcg.graph import Graph
from shardwright.pcg.padding.longer import padded
from shardwright.pcg.padding.origins import paddings
from shardwright.pcg.padding.rows import with_rows
from shardwright.pcg.step.precisions import PrecisionMode, base_of, shown
from shardwright.planning import Traced, captured_for, check_schedules, prove
from shardwright.reports.facts import fits
from shardwright.reports.wording import SEARCHED
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.plan import Alternative, Plan, fingerprint, most_frequent
from shardwright.search.request.spaces import batch_size
from shardwright.search.tree.encodings import extremes
from shardwright.search.tree.planner import Planner, Progress
from shardwright.verifier.choices import Certified

if TYPE_CHECKING:
    from torch import nn

    from shardwright.pcg.capture.capture import Captured

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
    from shardwright.checking import check_capture_of  # a kept capture needs no torch

    found: list[Captured] = []

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
        if own is not None and own != "fp8":
            from shardwright.lowering.runtime.precision import check_device  # the model's own runs anywhere

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
