"""The plan of another batch or mode over the parameters of a plan, which stay as they are stored.

Mesh, stages, roles, pins and how a step is run are the plan's. Only the layouts of the other graph are chosen, for a
number of microbatches in which each has no more examples than before. So nothing is searched, and parameters, gradients
and optimizer states keep their place. A batch that the devices cannot share evenly is also tried with rows added
(`pcg.padding.rows`), and a larger one in as many microbatches as before. The fastest plan that fits is taken.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts, R
from shardwright.pcg.mesh import TIME
from shardwright.pcg.padding.longer import padded
from shardwright.pcg.padding.rows import with_rows
from shardwright.pcg.results import gives_results
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.sections import sections, spread
from shardwright.pcg.step.time import check_time
from shardwright.search.choices.domain import CertifiedSplits
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.solving import Candidate, Solver, different, over_time, rank
from shardwright.search.plan import Plan, Rewrite, SearchReport, fingerprint, stored
from shardwright.search.request.limits import Limits
from shardwright.search.request.pins import limits_of
from shardwright.search.request.restrict import FREE, check_roles
from shardwright.search.request.spaces import batch_size, microbatch_counts
from shardwright.search.rewrites.replay import replay
from shardwright.substitutions.equations import Equation

_MOST_TRIES = 4
"""The most numbers of microbatches that are tried until one fits."""


def _as_stored(plan: Plan, graph: Graph) -> dict[str, Layouts]:
    """Return how a graph's parameters are stored: as in a plan, which has those whole that it does not read."""
    whole = (R,) * len(plan.mesh.devices.names)
    return dict.fromkeys(stored(graph), whole) | stored(plan.graph)


def reshaped(plan: Plan, graph: Graph, certified: CertifiedSplits, rules: Mapping[str, Equation]) -> Plan:
    """Return the plan of another serial graph of the same model, over the parameters of a plan.

    If none of the numbers of microbatches that are tried fits, it is the smallest plan.

    Raises:
        PlanError: the graph cannot be run so, or no layouts go together with the stored parameters.
    """
    start, solver = time.perf_counter(), Solver(plan.cluster, certified)
    longer, padding = padded(graph, plan.report.padding), plan.report.padding
    offered = _as_it_is(plan, longer), _in_as_many(plan, longer), _with_rows(plan, longer)
    ways = [way for way in offered if way is not None]
    laid_out, refused = list[tuple[Candidate, SearchReport]](), list[PlanError]()
    for way in ways:
        serial, rewrites = _rewritten(plan, way.graph, rules)
        try:
            check_roles(serial, plan.mesh.devices, _roles(plan))
            best = _best(plan, serial, way.counts, solver)
        except PlanError as error:
            refused.append(error)
            continue
        limit = solver.limit_of(best.prediction.device_bytes)
        laid_out.append((best, SearchReport(0.0, 1, 0.0, limit, rewrites, rows=way.rows, padding=padding)))
    if not laid_out:
        raise refused[0]
    best, report = min(laid_out, key=lambda pair: rank(pair[0]))
    report = replace(report, seconds=round(time.perf_counter() - start, 3))
    return replace(
        plan, graph=best.graph, fingerprint=fingerprint(graph), prediction=best.prediction, alternatives=(),
        report=report, execution=best.execution, capture_check=None,
    )  # fmt: skip


def best_together(
    shapes: Sequence[tuple[Plan, Graph, float]], certified: CertifiedSplits, rules: Mapping[str, Equation]
) -> list[Plan]:
    """Return the plans of several batches over the same stored parameters, whose weighted steps have the least sum.

    `shapes`: of each batch its best plan, its serial graph and its weight. The parameters are stored as in one of these
    plans, the one with which the sum is least; plans that fit are preferred, and plans that leave devices idle are not
    among them.

    Raises:
        PlanError: no plan stores parameters so that all batches can be run.
    """
    best: tuple[tuple[bool, float], list[Plan]] | None = None
    refused = [PlanError("every plan of one of the shapes leaves devices idle; give a mesh of all devices")]
    for stored_as, _, _ in shapes:
        if stored_as.idle is not None:
            continue
        try:
            plans = [
                stored if stored is stored_as else reshaped(stored_as, graph, certified, rules)
                for stored, graph, _ in shapes
            ]
        except PlanError as error:
            refused.append(error)
            continue
        excess = any(p.prediction.memory.total_bytes > p.report.limit_bytes for p in plans)
        total_s = sum(weight * p.prediction.step_s for p, (_, _, weight) in zip(plans, shapes, strict=True))
        if best is None or (excess, total_s) < best[0]:
            best = (excess, total_s), plans
    if best is None:
        raise refused[-1]
    return best[1]


def _roles(plan: Plan) -> tuple[str, ...]:
    return plan.asked.roles or (FREE,) * len(plan.mesh.devices)


class _Way(NamedTuple):
    """A serial graph of the batch, the numbers of microbatches to try, and the numbers of rows if some are added."""

    graph: Graph
    counts: Sequence[int]
    rows: tuple[int, ...] = ()


def _as_it_is(plan: Plan, graph: Graph) -> _Way:
    return _Way(graph, _counts(plan, graph))


def _in_as_many(plan: Plan, graph: Graph) -> _Way | None:
    """Return a larger batch in as many microbatches as the plan's, so that each has more examples than before."""
    size, count = batch_size(graph), plan.mesh.num_microbatches
    is_larger = size > batch_size(plan.graph) and not gives_results(graph)
    return _Way(graph, [count]) if is_larger and size % count == 0 else None


def _with_rows(plan: Plan, graph: Graph) -> _Way | None:
    """Return the graph with as few rows added as the devices can share evenly in each microbatch.

    None where they can share it as it is. Statistics of microbatches by themselves would be of added rows too.
    """
    share, inputs = _shared(plan)
    if not inputs or plan.execution.per_microbatch:
        return None
    (size, before), count = (_num_rows(g, inputs) for g in (graph, plan.graph)), 1
    if not size or not before:
        return None
    if not gives_results(graph) and not plan.report.obstacle:
        count = -(-size // (before // plan.mesh.num_microbatches))
    rows = -(-size // (share * count)) * share * count
    return None if rows == size else _Way(with_rows(graph, size, rows), [count], (size, rows))


def _shared(plan: Plan) -> tuple[int, set[str]]:
    """Return the number of devices among which a plan divides the rows of inputs, and the names of these inputs.

    So it does with inputs that it divides among microbatches alone, and with the values that have rows added to them.
    """
    graph, mesh = plan.graph, plan.mesh
    if plan.report.rows:
        size, rows = plan.report.rows
        inputs_shared = [
            x for x in graph.leaves("input") if (shape := graph.types[x.name].shape) and shape[0] % size == 0
        ]
        longer = [graph.types[node.name].layouts for node in graph.nodes if graph.types[node.name].shape[:1] == (rows,)]
        split = {i for layouts in longer for i, x in enumerate(layouts) if x.is_shard and x.dim == 0}
        names = {str(leaf.attr("target")) for leaf in inputs_shared}
        return prod(mesh.sizes[axis] for axis in split if mesh.names[axis] != TIME), names
    source = {leaf.name: str(leaf.attr("target")) for leaf in graph.leaves("input")}
    axes, inputs = set[int](), set[str]()
    for node in graph.nodes:
        if node.is_parallel and node.inputs[0] in source:
            source[node.name] = source[node.inputs[0]]
        layouts = graph.types[node.name].layouts if node.name in source else ()
        if sharding := [i for i, x in enumerate(layouts) if x.is_shard and x.dim == 0]:
            axes.update(sharding)
            inputs.add(source[node.name])
    return prod(mesh.sizes[axis] for axis in axes if mesh.names[axis] != TIME), inputs


def _num_rows(graph: Graph, inputs: Collection[str]) -> int:
    """Return the number of rows of these inputs, which each has at least once."""
    return gcd(*(graph.types[x.name].shape[0] for x in graph.leaves("input") if x.attr("target") in inputs))


def _best(plan: Plan, graph: Graph, counts: Sequence[int], solver: Solver) -> Candidate:
    """Return the first plan that fits, or else the smallest. Raises `PlanError` where nothing can be laid out."""
    best: Candidate | None = None
    refused: PlanError | None = None
    for count, run in product(counts, _runs(plan, graph)):
        try:
            candidate = _laid_out(plan, graph, count, run, solver)
        except PlanError as error:
            refused = error
            continue
        best = candidate if best is None else min(best, candidate, key=rank)
        if best.fits:
            break
    if best is None:
        assert refused is not None
        raise refused
    return best


def _rewritten(plan: Plan, graph: Graph, rules: Mapping[str, Equation]) -> tuple[Graph, tuple[Rewrite, ...]]:
    """Return the graph with the plan's rewrites where they all apply to it as well, else as it is."""
    with suppress(PlanError):
        return replay(graph, plan.report.rewrites, rules, plan.mesh), plan.report.rewrites
    return graph, ()


def _counts(plan: Plan, graph: Graph) -> list[int]:
    """Return numbers of microbatches with no more examples in each than in the plan's, the fewest first; then 1.

    Where modules have statistics of each microbatch by itself, the number is the plan's. It is 1 where the batch cannot
    be cut, or the program gives the model's results.
    """
    if gives_results(graph):
        return [1]
    if plan.execution.per_microbatch or plan.report.obstacle:
        return [plan.mesh.num_microbatches]
    size, most = batch_size(graph), batch_size(plan.graph) // plan.mesh.num_microbatches
    counts = [n for n in microbatch_counts(size) if size // n <= most] or [size or 1]
    return list(dict.fromkeys([*counts[:_MOST_TRIES], 1]))


def _runs(plan: Plan, graph: Graph) -> list[Execution]:
    """Return how a step may be run: as in the plan, or otherwise if the graph lacks what it names."""
    run = plan.execution.scheduled(split=_split(plan, graph))
    if gives_results(graph):  # there is no backward for which to make anything again
        return [replace(run, recompute="none", offload="none")]
    runs = [run]
    if not isinstance(run.recompute, str):
        runs += [replace(run, recompute=mode) for mode in ("full", "none")]
    return runs if isinstance(run.offload, str) else [*runs, *(replace(run, offload="none") for run in runs)]


def _split(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """Return how many sections of another graph each virtual stage has, such that parameters stay in their stages.

    Graphs of other batches and modes may have other sections between the blocks.
    """
    split, home = plan.execution.schedule.split, dict[object, int]()
    if not split:
        return split
    ours = sections(Operations(plan.graph, plan.execution), {}, by_block=True)
    theirs = sections(Operations(graph), {}, by_block=True)
    for stage, share in enumerate(spread(ours, split)):
        for number, _ in share:
            home |= {plan.graph.by_name[leaf].attr("target"): stage for leaf in ours[number].stretch.leaves}
    counts, stage = [0] * len(split), 0
    for section in theirs:
        targets = [graph.by_name[leaf].attr("target") for leaf in section.stretch.leaves]
        stage = max(stage, min((home[target] for target in targets if target in home), default=stage))
        counts[stage] += 1
    return split if [s.name for s in ours] == [s.name for s in theirs] else tuple(counts)


def _laid_out(plan: Plan, graph: Graph, count: int, run: Execution, solver: Solver) -> Candidate:
    """Return the best layouts in so many microbatches. Raises `PlanError` where there are none."""
    mesh, devices = over_time(plan.mesh.devices, count), plan.mesh.devices
    limits, _ = limits_of(graph, devices, plan.asked.pins)
    limits = replace(limits, stored=tuple(sorted(_as_stored(plan, graph).items())))
    folded = _folded(graph, run, limits)
    zeros = different(ZEROS, mesh)
    candidate = solver.solve(folded, mesh, _roles(plan), plan.model, run, zeros, zeros[-1], limits=limits)
    whole = solver.again_whole(graph, folded, candidate) if candidate.folded else candidate
    if count > 1:
        check_time(whole.graph, whole.execution)
    return whole


def _folded(graph: Graph, run: Execution, limits: Limits) -> Folded:
    """Return the graph with equal blocks folded, where all of them are run and stored alike."""
    folded = fold(graph)
    unfolded = (
        not isinstance(run.recompute, str) or run.schedule.num_stages > 1 or limits.tell_apart(graph, folded.alike)
    )
    return Folded(graph) if unfolded else folded
