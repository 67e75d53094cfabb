"""The search for a model's plan, over precisions, encodings and padding.

model and batch ──planning──▶ serial graph ──Planner──▶ Plan ──prove──▶ a plan that is proven
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.program import Programs
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
    request: PlanOptions,
    progress: Progress | None,
    check_capture: CheckCapture,
) -> tuple[Plan, Captured]:
    """Return the best plan over all precisions, with the others as alternatives, and its capture."""
    from shardwright.checking import check_capture_of  # a kept capture needs no torch

    captures: list[Captured] = []

    def traced(precision: PrecisionMode | None) -> Traced:
        captured = captured_for(model, args, kwargs, request, progress, precision, request.statistics)
        check = check_capture_of(model, captured, args, kwargs, check_capture, progress)
        captures.append(captured)
        return Traced(type(model).__name__, captured.graph, captured.precision, captured.per_microbatch, check)

    plan, number, _ = best_of(traced, cluster, certified, request, progress)
    return plan, captures[number]


def check_devices(request: PlanOptions, cluster: Cluster) -> None:
    """Raise `PlanError` where the cluster's devices cannot run a precision; fp8 can be costed anywhere."""
    for precision in request.precisions:
        if precision is not None and precision != "fp8":
            from shardwright.lowering.runtime.precision import check_device  # the model's own runs anywhere

            check_device(base_of(precision), cluster.device.kind)


class Best(NamedTuple):
    """The best plan, the number of its precision, and the programs of its graph, whose parts the search has costed."""

    plan: Plan
    number: int
    programs: Programs


def best_of(
    trace: Trace, cluster: Cluster, certified: Certified, request: PlanOptions, progress: Progress | None
) -> Best:
    """Return the best plan over all precisions, with the others as alternatives."""
    plans, rules = list[Best](), certified.by_name()
    check_schedules(cluster)
    for number, precision in enumerate(request.precisions):
        traced = trace(precision)
        for encodings in extremes(request.search.encodings):
            planner = Planner(
                cluster, certified, progress, rules, traced.precision, traced.per_microbatch, request.reduce_dtype,
                request.optimizer, encodings,
            )  # fmt: skip
            plan = _best(planner, traced.graph, traced.model, cluster, request)
            prove(plan, traced.graph, certified)
            check_schedules(plan.cluster)
            plans.append(Best(replace(plan, capture_check=traced.check), number, planner.programs_of(plan)))
    best, number, programs = min(plans, key=lambda own: (not fits(own.plan), own.plan.prediction.step_s))
    others = tuple(
        Alternative(
            f"{SEARCHED}{p.mesh}, {shown(p.execution.precision)}{in_words(p.execution.encodings)}",
            p.mesh,
            p.prediction,
            fits(p),
            p.execution,
            most_frequent(p.graph),
        )
        for p, *_ in plans
        if (p.execution, p.graph) != (best.execution, best.graph)
    )
    return Best(replace(best, alternatives=(*best.alternatives, *others)), number, programs)


def _best(planner: Planner, graph: Graph, model: str, cluster: Cluster, request: PlanOptions) -> Plan:
    """Return the best plan of a graph; where padding is asked for, the best of the graphs with and without it."""
    numbers = _padded_for(request, cluster)
    plans, refused = list[Plan](), None
    begins = dict.fromkeys([*(paddings(graph, number) for number in numbers), ()])
    batches = dict.fromkeys([*(_more_rows(graph, number, request) for number in numbers), ()])
    for padding, rows in product(begins, batches):
        longer = padded(graph, padding)
        try:
            plan = planner.plan(with_rows(longer, *rows) if rows else longer, model, **request.search.words)
        except NoLayoutsError as error:  # such as of a pin that only the other graph can keep to
            refused = refused or error
            continue
        report = replace(plan.report, padding=padding, rows=rows)
        plans.append(replace(plan, fingerprint=fingerprint(graph), report=report))
    if not plans and refused is not None:
        raise refused
    return min(plans, key=lambda plan: (not fits(plan), plan.prediction.step_s))


def _more_rows(graph: Graph, number: int, request: PlanOptions) -> tuple[int, ...]:
    """Return the batch's number of rows, and the one that so many devices share evenly; () where that is the same."""
    size = batch_size(graph)
    rows = -(-size // number) * number
    return () if rows == size or request.statistics.modules else (size, rows)


def _padded_for(request: PlanOptions, cluster: Cluster) -> list[int]:
    """Return numbers of devices to pad for: of an axis of the mesh, or of one machine and of all."""
    if request.pad is not None:
        return [request.pad] if request.pad > 1 else []
    mesh = request.search.mesh
    machine = [level.size for level in cluster.levels[:1]]
    sizes = [*machine, cluster.num_devices] if mesh is None else mesh.devices.sizes
    return sorted({size for size in sizes if size > 1})
