"""The blocks of each stage of a plan, its recomputation, and how long it keeps gathered weights.

Layouts are known. The timeline says what a stage needs and what is left of its memory, and that is given away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import inf

from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node, Source, make_attrs
from shardwright.pcg.layout import R
from shardwright.pcg.parallel import COMBINE, PARTITION
from shardwright.pcg.stages import Stages, cut
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero, lifetimes, with_lifetimes
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.recompute import BlockRecompute, Recompute
from shardwright.pcg.step.sections import sections, spread
from shardwright.pcg.step.time import as_run
from shardwright.search.effort import MOST_SPREADS
from shardwright.search.exact.keeping import Keeping
from shardwright.search.exact.solving import Candidate, Solver, different, rank


def spread_out(
    solver: Solver,
    candidate: Candidate,
    repeats: Mapping[str, int] | None = None,
    modes: Sequence[Recompute] = (),
) -> Candidate:
    """Return a plan with its blocks spread over its stages such that it fits, if it can, and is as fast as can be.

    The next spread leaves free what a stage needs beside its blocks by the timeline. `modes`: the recomputations of
    which each stage may have its own.
    """
    run, repeats = candidate.execution, repeats or {}
    if run.schedule.num_stages == 1 or not (candidate.fits or not solver.fits(candidate.prediction)):
        return candidate
    limits = solver.stage_limits(run, candidate.mesh)
    programs, best = solver.programs(candidate.graph, repeats), (inf, inf)
    run = chosen = run if run.schedule.split else programs.spread(run)
    for _ in range(MOST_SPREADS):
        timeline = simulate(programs.program(run))
        room = [limit - s.memory.total_bytes for limit, s in zip(limits, timeline.stages, strict=True)]
        fits, measure = min(room) >= 0, (max(0.0, -min(room)), timeline.step_s)
        if measure < best:
            best, chosen = measure, run
        if run.schedule.chunks_per_stage > 1 or (fits and not modes):
            break
        free_bytes = [free + used for free, used in zip(room, programs.sections_bytes(run), strict=True)]
        try:
            following = programs.spread(run, free_bytes, modes)
        except PlanError:
            break
        if following == run:
            break
        run = following
    prediction = solver.predicted(candidate.graph, chosen, repeats)
    return replace(candidate, execution=chosen, fits=best[0] == 0.0, prediction=prediction)


def said_by_block(solver: Solver, candidate: Candidate) -> Candidate:
    """Return a plan of the whole graph with its stages' recomputation stated by block of the model.

    Operators that lie in no block are run as one of the stages is.
    """
    run, graph = candidate.execution, candidate.graph
    if not (modes := run.schedule.recompute_by_stage):
        return candidate
    parts = sections(Operations(graph), {}, by_block=True)
    able = {mode: _blocks_with(graph, mode) for mode in dict.fromkeys(modes)}
    modes_of_blocks = dict[str, Recompute]()
    for virtual, share in enumerate(spread(parts, run.schedule.split)):
        for number, _ in share:
            modes_of_blocks[parts[number].name] = modes[virtual % run.schedule.num_stages]

    def said(rest: Recompute) -> Candidate:
        modes_of_blocks[""] = rest
        recompute = dict[str, BlockRecompute](item for item in modes_of_blocks.items() if item[0] in able[item[1]])
        execution = replace(run.scheduled(recompute_by_stage=()), recompute=Keeping(recompute).recompute)
        prediction = solver.predicted(graph, execution, {})
        return replace(candidate, execution=execution, prediction=prediction, fits=solver.fits(prediction))

    return min(map(said, dict.fromkeys(reversed(modes))), key=rank)


def stored_by_stage(solver: Solver, candidate: Candidate, zeros: Sequence[Zero] = ZEROS) -> Candidate:
    """Return the whole plan whose stages keep gathered weights as long as they have room for, if it is faster.

    One lifetime is given to all weights that stay less long; the timeline then says which stages have room for it. What
    a stage stores does not depend on the others. Weights that several stages read stay as they are. `zeros`: the
    lifetimes that there are.
    """
    run, graph, stages = candidate.execution, candidate.graph, candidate.execution.schedule.num_stages
    if stages == 1 or not candidate.fits:
        return candidate
    stored = lifetimes(graph)
    held = [
        {leaf for _, leaf in stage.held} & stored.keys() for stage in solver.programs(graph, {}).program(run).stages
    ]
    alone = {leaf for leaf, times in Counter(chain.from_iterable(held)).items() if times == 1}
    limits, given = solver.stage_limits(run, candidate.mesh), dict[int, dict[str, Zero]]()
    for zero in different(zeros, candidate.mesh):
        longer: dict[str, Zero] = {leaf: zero for leaf in alone if ZEROS.index(stored[leaf]) > ZEROS.index(zero)}
        if not longer or len(given) == stages:
            break
        program = solver.programs(with_lifetimes(graph, longer), {}).program(run)
        for number, stage in enumerate(simulate(program).stages):
            if number not in given and stage.memory.total_bytes <= limits[number]:
                given[number] = dict.fromkeys(longer.keys() & held[number], zero)
    if not any(given.values()):
        return candidate
    changed = with_lifetimes(graph, dict[str, Zero](chain.from_iterable(each.items() for each in given.values())))
    prediction, stored_as = solver.predicted(changed, run, {}), tuple(lifetimes(changed).items())
    better = replace(candidate, graph=changed, prediction=prediction, fits=solver.fits(prediction), lifetimes=stored_as)
    return min(candidate, better, key=rank)


def sent_in_pieces(solver: Solver, candidate: Candidate) -> Candidate:
    """Return the whole plan whose stages send pieces of what all ranks along an axis have, if it is faster.

    Each rank sends its own piece, and the ranks that receive them gather the whole. Source: Narayanan et al.,
    "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 4.1.
    """
    run = candidate.execution
    if run.schedule.num_stages == 1 or run.schedule.stage_sizes:
        return candidate
    graph = in_pieces(candidate.graph, cut(as_run(candidate.graph, run), run))
    if graph is candidate.graph:
        return candidate
    prediction = solver.predicted(graph, run, {})
    return min(
        candidate, replace(candidate, graph=graph, prediction=prediction, fits=solver.fits(prediction)), key=rank
    )


def in_pieces(graph: Graph, stages: Stages) -> Graph:
    """Return the graph whose values are partitioned where they are made, and combined in each later stage."""
    ways = {name: way for names in stages.sent for name in names if (way := list(_cuts(graph, name)))}
    wholes, nodes = dict[tuple[str, int], str](), list[Node]()

    def moved(op: str, name: str, made: str, way: Sequence[tuple[str, int]], source: Source) -> str:
        for axis, dim in way:
            moved_name = f"{made}_{axis}"
            nodes.append(Node(moved_name, op, (name,), make_attrs(axis=axis, dim=dim, blocks=1), (), source))
            name = moved_name
        return name

    pieces = dict[str, str]()
    for node in graph.nodes:
        stage = stages.where.get(node.name, 0)
        for name in node.inputs:
            if name in pieces and stage > stages.where[name] and (name, stage) not in wholes:
                made = f"{name}.whole_{stage}"
                wholes[name, stage] = moved(COMBINE, pieces[name], made, ways[name][::-1], node.source)
        nodes.append(replace(node, inputs=tuple(wholes.get((name, stage), name) for name in node.inputs)))
        if node.name in ways:
            pieces[node.name] = moved(PARTITION, node.name, f"{node.name}.piece", ways[node.name], node.source)
    return replace(graph, nodes=tuple(nodes)).validated_beside(graph) if ways else graph


def _cuts(graph: Graph, name: str) -> Iterator[tuple[str, int]]:
    """Yield the axes along which all ranks have a value, each with a dimension that nothing else cuts."""
    kind, mesh = graph.types[name], graph.mesh
    cut_already = {layout.dim for layout in kind.layouts if layout.is_shard}
    free = [dim for dim in range(len(kind.shape)) if dim not in cut_already]
    for axis, layout, size in zip(mesh.names, kind.layouts, mesh.device_sizes, strict=True):
        dim = next((dim for dim in free if kind.shape[dim] % size == 0), None)
        if layout == R and size > 1 and dim is not None:
            free.remove(dim)
            yield axis, dim


def _blocks_with(graph: Graph, mode: Recompute) -> frozenset[str]:
    """Return the blocks that have something of a kind to recompute; "" for what lies in no block."""
    listed = Operations(graph, Execution(recompute=mode)).listed
    return frozenset(o.block for o in listed if o.region is not None)
