"""The blocks of each stage of a plan, its recomputation, and how long it keeps gathered weights.

Layouts are known. The timeline says what a stage needs and what is left of its memory, and that is given away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import inf

from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero, lifetimes, with_lifetimes
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.recompute import BlockRecompute, Recompute
from shardwright.pcg.step.sections import sections, spread
from shardwright.search.exact.keeping import Keeping
from shardwright.search.exact.solving import Candidate, Solver, different, rank

_MOST_SPREADS = 4
"""The most spreads of a plan's blocks: each is judged, and says what the next one may use."""


def spread_out(
    solver: Solver,
    found: Candidate,
    repeats: Mapping[str, int] | None = None,
    modes: Sequence[Recompute] = (),
) -> Candidate:
    """Return a plan with its blocks spread over its stages such that it fits, if it can, and is as fast as can be.

    The next spread leaves free what a stage needs beside its blocks by the timeline. `modes`: the recomputations of
    which each stage may have its own.
    """
    run, repeats = found.execution, repeats or {}
    if run.schedule.num_stages == 1 or not (found.fits or not solver.fits(found.prediction)):
        return found
    limits = solver.stage_limits(run, found.mesh)
    programs, best = solver.programs(found.graph, repeats), (inf, inf)
    run = chosen = run if run.schedule.split else programs.spread(run)
    for _ in range(_MOST_SPREADS):
        timeline = simulate(programs.program(run))
        room = [limit - s.memory.total_bytes for limit, s in zip(limits, timeline.stages, strict=True)]
        fits, measure = min(room) >= 0, (max(0.0, -min(room)), timeline.step_s)
        if measure < best:
            best, chosen = measure, run
        if run.schedule.chunks_per_stage > 1 or (fits and not modes):
            break
        free_bytes = [free + own for free, own in zip(room, programs.sections_bytes(run), strict=True)]
        try:
            following = programs.spread(run, free_bytes, modes)
        except PlanError:
            break
        if following == run:
            break
        run = following
    prediction = solver.predicted(found.graph, chosen, repeats)
    return replace(found, execution=chosen, fits=best[0] == 0.0, prediction=prediction)


def said_by_block(solver: Solver, found: Candidate) -> Candidate:
    """Return a plan of the whole graph with its stages' recomputation stated by block of the model.

    Operators that lie in no block are run as one of the stages is.
    """
    run, graph = found.execution, found.graph
    if not (modes := run.schedule.recompute_by_stage):
        return found
    parts = sections(Operations(graph), {}, by_block=True)
    able = {mode: _blocks_with(graph, mode) for mode in dict.fromkeys(modes)}
    own = dict[str, Recompute]()
    for virtual, share in enumerate(spread(parts, run.schedule.split)):
        for number, _ in share:
            own[parts[number].name] = modes[virtual % run.schedule.num_stages]

    def said(rest: Recompute) -> Candidate:
        own[""] = rest
        again = dict[str, BlockRecompute](item for item in own.items() if item[0] in able[item[1]])
        execution = replace(run.scheduled(recompute_by_stage=()), recompute=Keeping(again).recompute)
        prediction = solver.predicted(graph, execution, {})
        return replace(found, execution=execution, prediction=prediction, fits=solver.fits(prediction))

    return min(map(said, dict.fromkeys(reversed(modes))), key=rank)


def stored_by_stage(solver: Solver, found: Candidate, zeros: Sequence[Zero] = ZEROS) -> Candidate:
    """Return the whole plan whose stages keep gathered weights as long as they have room for, if it is faster.

    One lifetime is given to all weights that stay less long; the timeline then says which stages have room for it. What
    a stage stores does not depend on the others. Weights that several stages read stay as they are. `zeros`: the
    lifetimes that there are.
    """
    run, graph, stages = found.execution, found.graph, found.execution.schedule.num_stages
    if stages == 1 or not found.fits:
        return found
    own = lifetimes(graph)
    held = [{leaf for _, leaf in stage.held} & own.keys() for stage in solver.programs(graph, {}).program(run).stages]
    alone = {leaf for leaf, times in Counter(chain.from_iterable(held)).items() if times == 1}
    limits, given = solver.stage_limits(run, found.mesh), dict[int, dict[str, Zero]]()
    for zero in different(zeros, found.mesh):
        longer: dict[str, Zero] = {leaf: zero for leaf in alone if ZEROS.index(own[leaf]) > ZEROS.index(zero)}
        if not longer or len(given) == stages:
            break
        program = solver.programs(with_lifetimes(graph, longer), {}).program(run)
        for number, stage in enumerate(simulate(program).stages):
            if number not in given and stage.memory.total_bytes <= limits[number]:
                given[number] = dict.fromkeys(longer.keys() & held[number], zero)
    if not any(given.values()):
        return found
    changed = with_lifetimes(graph, dict[str, Zero](chain.from_iterable(each.items() for each in given.values())))
    prediction, told = solver.predicted(changed, run, {}), tuple(lifetimes(changed).items())
    better = replace(found, graph=changed, prediction=prediction, fits=solver.fits(prediction), lifetimes=told)
    return min(found, better, key=rank)


def _blocks_with(graph: Graph, mode: Recompute) -> frozenset[str]:
    """Return the blocks that have something of a kind to recompute; "" for what lies in no block."""
    listed = Operations(graph, Execution(recompute=mode)).listed
    return frozenset(o.block for o in listed if o.region is not None)
