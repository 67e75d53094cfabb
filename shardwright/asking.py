"""Questions about a plan that need another search: why not that strategy, what if the cluster or the batch changed.

plan ──its graph without parallel operators──▶ serial graph ──Planner──▶ another Plan ──▶ report of both

The model is needed only for another batch, whose graph is not in the plan.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.cost.clusters.changes import Change, ChangeLike, changed
from shardwright.cost.clusters.cluster import Cluster
from shardwright.options import KINDS
from shardwright.pcg.arguments import Argument, checked
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.foreign import calls
from shardwright.pcg.graph import Graph
from shardwright.pcg.padding.longer import padded
from shardwright.planning import certified_choices, statistics_of
from shardwright.reports.asking import WhatIfReport, WhyNotReport
from shardwright.search.check import lengthened
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.plan import Plan, fingerprint
from shardwright.search.request.asked import MEMORY, Bound, parse
from shardwright.search.request.options import SearchOptions
from shardwright.search.request.spaces import Space, batch_size, sequence_length, strategy, token_shapes
from shardwright.search.tree.planner import Planner, Progress

PlanLike = Plan | str | os.PathLike[str]
Arguments = tuple[Sequence[Any], Mapping[str, Any]]
BATCH, SEQ = "batch", "seq"


@checked(PlanError, **KINDS, name=Argument((str,), "the name of a strategy, such as 'fsdp'"))
def why_not(
    plan: PlanLike,
    name: str,
    model: nn.Module | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    progress: Progress | None = None,
) -> WhyNotReport:
    """Compare a plan with the best plan of a strategy, with its own degrees, microbatches and recomputation.

    The strategy is applied as people set it: every block has the same recomputation, and no rule rewrites the model.
    The plans by hand that the plan was compared with are made in the same way.

    Args:
        plan: or a plan file.
        name: "ddp", "zero-1", "zero-2", "fsdp", "hsdp", "tp", "cp", "ulysses", "ring" or another of `STRATEGIES`.
        model: the plan's, to start from its own operators where the plan has rewritten them; optional, as `args` are.
        args: example inputs of one global batch, positional, with a `model`.
        kwargs: the same, by name.
        progress: called with a line of text now and then.

    Raises:
        PlanError: the name is unknown, or the model is not the plan's.
    """
    plan, asked_strategy = _loaded(plan), strategy(name)
    spaces = asked_strategy.spaces(plan.cluster) if plan.cluster.num_devices > 1 else []
    if not spaces:
        return WhyNotReport(
            plan,
            asked_strategy.title,
            None,
            f"it needs {asked_strategy.needs}, which {plan.cluster.name} does not have",
        )
    graph = plan.graph.erased()
    if model is not None:
        captured = _captured(plan, model, args, kwargs or {})
        if fingerprint(captured) != plan.fingerprint:
            raise PlanError(
                f"{type(model).__name__} with this batch is not what the plan is for; give its own, or none"
            )
        graph = lengthened(plan, captured)
    request = SearchOptions(pins=tuple(pin for pin in plan.asked.pins if _is_memory(pin)))
    try:
        other = _search(plan, graph, plan.cluster, request, progress, spaces)
    except NoLayoutsError as error:
        return WhyNotReport(plan, asked_strategy.title, None, str(error))
    return WhyNotReport(plan, asked_strategy.title, other, rewritten=model is None and bool(plan.report.rewrites))


def _is_memory(pin: str) -> bool:
    return any(isinstance(one, Bound) and one.what == MEMORY for one in parse(pin))


@checked(PlanError, **KINDS)
def what_if(
    plan: PlanLike,
    model: nn.Module | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nodes: ChangeLike | None = None,
    bandwidth: ChangeLike | None = None,
    memory: ChangeLike | None = None,
    flops: ChangeLike | None = None,
    batch: ChangeLike | None = None,
    seq: ChangeLike | None = None,
    progress: Progress | None = None,
) -> WhatIfReport:
    """Search for the best plan on a changed cluster or batch, and report it beside the given plan.

    Each change is a factor, as "2x" or "0.5x", or a value, as 16 or "80GB". The search has the constraints of the
    plan's search, except for a mesh of another number of devices.

    Args:
        plan: or a plan file.
        model: the plan's; needed for another `batch` or `seq`, whose graph no plan has.
        args: example inputs of one global batch, positional, of any size: they are enlarged or cut as needed.
        kwargs: the same, by name.
        nodes: machines.
        bandwidth: of the links between machines, or of all links of one machine; a factor.
        memory: of each device.
        flops: arithmetic of each device; a factor. The speed of its memory stays.
        batch: examples of a step: dimension 0 of the inputs.
        seq: their length: dimension 1 of all inputs that are as long there as the token ids.
        progress: called with a line of text now and then.

    Raises:
        ClusterError: a change is not understood, or does not determine a cluster.
        PlanError: nothing is changed, the model is missing or not the plan's, or the plan's constraints cannot be met.
    """
    plan = _loaded(plan)
    given = {"nodes": nodes, "bandwidth": bandwidth, "memory": memory, "flops": flops, BATCH: batch, SEQ: seq}
    changes = {name: Change.of(name, value) for name, value in given.items() if value is not None}
    if not changes:
        raise PlanError(f"what if what? Change at least one of {', '.join(given)}")
    graph = plan.graph.erased()
    cluster = changed(plan.cluster, {name: c for name, c in changes.items() if name not in (BATCH, SEQ)})
    if BATCH in changes or SEQ in changes:
        sizes = new_sizes(plan, changes)
        if model is None:
            raise PlanError(
                f"{' and '.join(name for name in (BATCH, SEQ) if name in changes)}: the plan has the graph of its own "
                "batch only; give the model too, to capture that of another one (on the command line FILE.py:FUNCTION "
                "or --hf-config config.json)"
            )
        captured = _captured(plan, model, *resized(plan, args, kwargs or {}, sizes))
        graph = padded(captured, plan.report.padding)
        _check_model(graph, plan, model)
    other_devices = cluster.num_devices != plan.cluster.num_devices
    request = replace(plan.asked, mesh=None, roles=None) if other_devices else plan.asked
    if other_devices and isinstance(request.stages, tuple):
        request = replace(request, stages="auto")
    other = _search(plan, graph, cluster, request, progress)
    return WhatIfReport(plan, other, {name: change.text for name, change in changes.items()})


def new_sizes(plan: Plan, changes: Mapping[str, Change]) -> tuple[int, int | None]:
    """Return the batch and the length of sequences (None: there are none, or of several lengths) after the changes."""
    old = batch_size(plan.graph), sequence_length(plan.graph)
    batch = changes[BATCH].count(BATCH, old[0]) if BATCH in changes else old[0]
    if SEQ not in changes:
        return batch, old[1]
    if old[1] is None:
        raise PlanError("seq: no input of the model has token ids of several positions, so there is no sequence")
    return batch, changes[SEQ].count(SEQ, old[1])


def resized(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: tuple[int, int | None]) -> Arguments:
    """Return a model's arguments with every tensor repeated and cut to the new sizes.

    Where tensors have several sizes along dimension 0, all grow by the factor of the plan's batch. The sequence is
    dimension 1 of tensors that are as long there as token ids are.
    """
    tensors = [x for x in tree_leaves((tuple(args), dict(kwargs))) if isinstance(x, Tensor)]
    lengths = {shape[1] for shape in token_shapes(plan.graph)}
    several, old = len({x.shape[0] for x in tensors if x.ndim}) > 1, batch_size(plan.graph)
    batch, seq = sizes
    if several and batch % old:
        raise PlanError(f"batch={batch}: the inputs have several sizes along dimension 0; give a multiple of {old}")

    def large(x: object) -> object:
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        x = _as_long(x, 0, x.shape[0] * (batch // old) if several else batch)
        return _as_long(x, 1, seq) if seq is not None and x.ndim > 1 and x.shape[1] in lengths - {1} else x

    return tuple(tree_map(large, tuple(args))), tree_map(large, dict(kwargs))


def _as_long(x: Tensor, dim: int, size: int) -> Tensor:
    if x.shape[dim] == size:
        return x
    times = [1] * x.ndim
    times[dim] = -(-size // max(x.shape[dim], 1))
    return x.detach().repeat(times).narrow(dim, 0, size)


def _loaded(plan: PlanLike) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.load(plan)


def _captured(plan: Plan, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph:
    statistics = statistics_of(plan)
    return capture(
        model, kwargs, args, precision=plan.execution.precision,
        num_microbatches=statistics.num_microbatches, per_microbatch=statistics.modules, known=calls(plan.graph),
    ).graph  # fmt: skip


def _check_model(graph: Graph, plan: Plan, model: nn.Module) -> None:
    """Raise `PlanError` where a graph has other parameters than the plan."""
    mine, its = (
        {str(leaf.attr("target")): g.types[leaf.name].shape for leaf in g.leaves("parameter")}
        for g in (graph, plan.graph)
    )
    odd = min(name for name in mine | its if mine.get(name) != its.get(name)) if mine != its else ""
    if odd:
        shapes = (" × ".join(map(str, x[odd])) if odd in x else "missing" for x in (its, mine))
        raise PlanError(
            f"{type(model).__name__} is not the model that the plan is for: {odd!r} is {next(shapes)} in the plan, "
            f"{next(shapes)} in the model"
        )


def _search(
    plan: Plan,
    graph: Graph,
    cluster: Cluster,
    request: SearchOptions,
    progress: Progress | None,
    spaces: Sequence[Space] | None = None,
) -> Plan:
    run, certified = plan.execution, certified_choices()
    planner = Planner(
        cluster, certified, progress, certified.by_name(), run.precision, run.per_microbatch, run.reduce_dtype,
        run.assumed.optimizer, run.encodings,
    )  # fmt: skip
    microbatches = plan.mesh.num_microbatches if run.per_microbatch else request.microbatches
    request = replace(request, microbatches=microbatches)
    if spaces is not None:
        request = replace(request, stages=None, schedule=None)
    return planner.plan(
        graph, plan.model, spaces=spaces, by_hand=spaces is not None, compared=spaces is None, **request.words
    )
