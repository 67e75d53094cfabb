"""The parts that a plan is made of and proven by: the capture of a model, certified choices, schedules.

model and batch ──capture──▶ serial graph ──searching, or a file──▶ Plan ──prove──▶ a plan that is proven

A run with a given plan loads this, and not the search.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.options import PlanOptions, Statistics
from shardwright.pcg.errors import PlanError
from shardwright.pcg.foreign import Call
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.precisions import PrecisionMode
from shardwright.search.check import check_plan
from shardwright.search.collector import collector_paused
from shardwright.search.plan import CaptureCheck, Plan
from shardwright.verifier.choices import Certified

if TYPE_CHECKING:
    from torch import nn

    from shardwright.pcg.capture.alike import ForwardTrace
    from shardwright.pcg.capture.capture import Captured
    from shardwright.pcg.capture.returned import Returned
    from shardwright.search.tree.planner import Progress


@lru_cache(maxsize=1)
def certified_choices() -> Certified:
    """Return the split choices of nodes that carry a certificate; no others enter the search."""
    return Certified()


def certified_by(rules: str | os.PathLike[str] | None, progress: Progress | None) -> Certified:
    """Return the choices that a rule file allows, or those of the shipped catalogue."""
    if rules is None:
        return certified_choices()
    from shardwright.judging import jury  # of rules that are not shipped alone

    tell = progress or (lambda message: None)
    return Certified.of_file(Path(rules), tell, jury(tell))


@collector_paused()
def captured_for(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    request: PlanOptions,
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
    from shardwright.pcg.capture.capture import capture  # a kept capture needs no torch

    if progress:
        progress(f"capturing {type(model).__name__}")
    return capture(
        model, kwargs or {}, args, strict=request.strict, precision=precision,
        num_microbatches=statistics.num_microbatches, per_microbatch=statistics.modules,
        foreign=request.foreign, find=not request.strict and not known, known=known, returned=returned,
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
    if cluster.schedules is None:
        return
    from shardwright.pcg.collectives.sums import adds_alike  # most clusters have no schedules
    from shardwright.verifier.collectives import verify_schedule

    for schedule in cluster.schedules.given:
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
