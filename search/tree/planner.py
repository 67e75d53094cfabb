"""The search: every mesh, the best layouts on each, memory as a hard limit, baselines on the same terms.

On one mesh, run in one way, the search is exact for two sums of compute and communication: without overlap, and with as
much overlap as can be. The rest is not exact. Microbatches, recomputation and lifetimes are tuned one after the other
(`search.tree.tuning`). Then values are kept or recomputed one by one (`search.tree.fitting`). The timeline, in which
compute and communication overlap, judges all that was found, plans of all meshes and baselines alike. Its time has a
bound (`search.exact.least`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain, groupby
from math import inf
from operator import itemgetter
from typing import Unpack

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.stages import not_run
from shardwright.pcg.step.execution import Execution, ReduceDtype
from shardwright.pcg.step.lifetimes import ZEROS, Zero
from shardwright.pcg.step.precisions import PrecisionMode
from shardwright.pcg.step.time import check_time
from shardwright.search.choices.domain import CertifiedSplits
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.collector import collector_paused
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Candidate, Solver, different, rank
from shardwright.search.plan import Alternative, Plan, Rewrite, SearchReport, fingerprint, most_frequent
from shardwright.search.request.anytime import Stop
from shardwright.search.request.options import SearchOptions, SearchWords
from shardwright.search.request.pins import Pins
from shardwright.search.request.spaces import Space
from shardwright.search.rewrites.rewriting import Rewriter
from shardwright.search.tree.blame import blamed
from shardwright.search.tree.descent import Descent
from shardwright.search.tree.fitting import LITTLE, Fitted, Fitter, by_block, may_keep_more
from shardwright.search.tree.idle import asked_for, on_a_part, with_idle
from shardwright.search.tree.remedies import remedied, remedies
from shardwright.search.tree.spreading import said_by_block, sent_in_pieces, spread_out, stored_by_stage
from shardwright.search.tree.staging import Stager
from shardwright.search.tree.tuning import Progress, Tuner, named
from shardwright.substitutions.equations import Equation

_Way = tuple[str, Mesh, Execution, tuple[Rewrite, ...]]
_MOST_WHOLE = 4
"""The most plans that are laid out and judged on the whole graph, because an estimate says that they are faster. Each
takes as long as ten tries.
"""
_MOST_ORDERS = 2
"""The number of other orders in which a plan with stages is judged with lifetimes by stage."""
_NEAR = 1.03
"""The factor on the best plan's step up to which another order is judged so: it saved 2.4 % at most."""
_MOST_NESTED = 2
"""The number of meshes cut from the likeliest ones on which three axes are tried."""
_BEHIND = 1.25
"""The factor on the best step from which the best plan of a mesh gains less by a third axis."""
_FAR = 1.03
"""The factor on an equal share of all work from which stages are tried unasked, by the best plan's step. Below it they
hardly ever gain, as they idle and exchange messages themselves.
"""


class Planner:
    """A search for plans of serial graphs on one cluster. Only certified choices and certified `rules` enter.

    `places` counts, by rule, the places that backtracking found, for `reports.coverage`. `precision`: the one that the
    graphs were captured under; `per_microbatch`: modules whose statistics are those of each microbatch; `reduce_dtype`:
    the dtype in which gradients are sent.
    """

    def __init__(
        self,
        cluster: Cluster,
        certified: CertifiedSplits,
        progress: Progress | None = None,
        rules: Mapping[str, Equation] | None = None,
        precision: PrecisionMode | None = None,
        per_microbatch: Sequence[str] = (),
        reduce_dtype: ReduceDtype | None = None,
    ) -> None:
        self.cluster, self.certified, self.rules = cluster, certified, rules or {}
        self.execution = Execution(precision, per_microbatch=tuple(per_microbatch), reduce_dtype=reduce_dtype)
        self.progress = progress or (lambda message: None)
        self.solver = Solver(cluster, certified)
        self.limit_bytes = self.solver.limit_bytes
        self.places: Counter[str] = Counter()

    def solve(
        self,
        graph: Graph,
        mesh: Mesh,
        roles: Sequence[str],
        name: str,
        cutoff_s: float = inf,
        *,
        execution: Execution | None = None,
        zeros: Sequence[Zero] = ("zero-3",),
    ) -> Candidate:
        """Return the best plan on one mesh whose device axes keep to their roles, within memory if any found fits.

        `zeros`: the lifetimes that gathered parameters may have; the first that fits counts. A plan that provably takes
        `cutoff_s` or longer is not pursued further; the result may then not fit, or not be the best.
        """
        devices = [axis for axis in mesh.names if axis != TIME]
        if len(roles) != len(devices):
            raise PlanError(f"{len(roles)} axis roles for mesh {mesh}; give one role per axis of devices")
        if mesh.num_devices != self.cluster.num_devices:
            raise PlanError(
                f"mesh {mesh} has {mesh.num_devices} devices, cluster {self.cluster.name} has "
                f"{self.cluster.num_devices}"
            )
        run, priced = execution or self.execution, different(zeros, mesh)[-1]
        return self.solver.solve(Folded(graph), mesh, roles, name, run, zeros, priced, cutoff_s)

    @collector_paused()
    def plan(
        self,
        graph: Graph,
        model: str = "model",
        *,
        spaces: Sequence[Space] | None = None,
        by_hand: bool = False,
        compared: bool = True,
        **words: Unpack[SearchWords],
    ) -> Plan:
        """Return the best plan over all meshes, microbatches and recomputation, or over what the arguments leave.

        Where the batch does not divide among all devices, that may be a plan for fewer (`Plan.idle`).

        Args:
            graph: a serial graph.
            model: its name.
            spaces: to search in place of all meshes.
            by_hand: whether these `spaces` are planned as plans by hand are: with the best of their degrees,
                microbatches and kinds of recomputation, but no value recomputed by itself and no rewrites.
            compared: whether plans that people choose by hand are tuned too, to compare with.
            words: the options of the search (`SearchOptions`).

        Raises:
            PlanError: the arguments do not fit the cluster or the model, or contradict each other.
            GraphError: the graph gives no loss.
        """
        options = SearchOptions.of(**words)
        start, stop = time.perf_counter(), Stop(options.time_limit_s)
        graph.check_loss()
        asked, mesh = replace(options, time_limit_s=None), options.mesh

        def planned(cluster: Cluster) -> Plan:
            return self._on(cluster)._plan(graph, model, asked, spaces, compared, stop, by_hand=by_hand)

        given = mesh is not None or spaces is not None or asked.stages not in (None, 1, "auto")
        if isinstance(asked.stages, tuple) and sum(asked.stages) < self.cluster.num_devices:
            part, idle = asked_for(self.cluster, mesh, asked.stages)
            return replace(planned(part), idle=idle)
        if mesh is not None and mesh.num_devices < self.cluster.num_devices and asked.stages in (None, 1):
            part, idle = asked_for(self.cluster, mesh)
            return replace(planned(part), idle=idle)
        try:
            on_all = planned(self.cluster)
        except NoLayoutsError:
            parts = () if given else on_a_part(self.cluster, graph, self.execution, self.certified, planned)
            if (part_alone := next(iter(parts), None)) is None:
                raise
            return part_alone
        if given:
            return on_all
        *_, best = stop.within(with_idle(on_all, graph, self.execution, self.certified, planned), needed=True)
        seconds = round(time.perf_counter() - start, 3)
        return replace(best, report=replace(best.report, seconds=seconds, stopped=stop.reason))

    def _on(self, cluster: Cluster) -> Planner:
        """Return a planner that searches in the same way, on this cluster."""
        if cluster == self.cluster:
            return self
        own = copy(self)
        own.cluster, own.solver = cluster, Solver(cluster, self.certified)
        own.limit_bytes = own.solver.limit_bytes
        return own

    def _solver(self, kept: Pins, stop: Stop) -> Solver:
        """Return a solver for the memory that is asked for, which gives up where the search has to end."""
        solver = self.solver if kept.memory_bytes is None else self.solver.within(kept.memory_bytes)
        return solver.until(stop.check)

    def _pins(self, graph: Graph, asked: SearchOptions, spaces: Sequence[Space] | None) -> Pins:
        """Return the checked request, without pipeline stages where the graph does not run in them."""
        kept = Pins.of(graph, self.cluster, asked, spaces)
        if not kept.staged or (problem := not_run(graph, self.execution.base)) is None:
            return kept
        if not kept.spaces:
            raise PlanError(problem)
        return replace(kept, staged={})

    def _plan(
        self, graph: Graph, model: str, asked: SearchOptions, spaces: Sequence[Space] | None, compared: bool,
        stop: Stop, *, by_hand: bool = False,
    ) -> Plan:  # fmt: skip
        """Return the best plan on all devices."""
        start = time.perf_counter()
        kept = self._pins(graph, asked, spaces)
        solver = self._solver(kept, stop)
        tuner = Tuner(solver, graph, self.execution, kept, self.progress)
        compared &= self.cluster.num_devices > 1 and not (tuner.folded.is_large and tuner.nothing_fits)
        alternatives = list(stop.within(tuner.baselines())) if compared else []
        num_by_hand, needed = len(tuner.tried), kept.guided or not alternatives
        try:
            searched = tuner.by_hand() if by_hand else tuner.searched(alternatives)
            found = list(stop.within(searched, needed=needed)) if kept.spaces else []
        except NoLayoutsError as error:
            raise blamed(error, graph, asked, tuner) from error
        tried = [tuner.tried[num_by_hand:] if kept.guided else list(tuner.tried)]
        if compared:
            alternatives += stop.within(tuner.sequence_baselines())
            shared = () if kept.guided else groupby(tuner.tried[len(tried[0]) :], key=lambda c: c.name)
            tried += [list(own) for _, own in shared]
        pool = found if kept.guided else [*found, *alternatives]
        zeros = kept.spaces[0].zeros if spaces is not None else ZEROS
        fitter = Fitter(solver, tuner.folded, values=kept.recompute is None and not by_hand, zeros=zeros)
        fits, on_the_way = ([], []) if by_hand else _kept(fitter, tuner, tried, stop, any(c.fits for c in pool))
        tried.append(on_the_way)
        staged, beside, megatrons = self._staged(tuner, pool, fits, stop, needed=not found, compared=compared)
        if staged:
            pool = [*staged, *(megatrons if spaces is None and not (kept.mesh or kept.limits) else ()), *pool]
            found, tried, alternatives = [*found, *staged], [*tried, beside], [*alternatives, *megatrons]
            fits += _fits(fitter, [beside], stop)
        elif not found and needed:
            raise blamed(tuner.refused, graph, asked, tuner)
        if finer := list(stop.within(tuner.nested(_likeliest(fits, pool, solver.limit_bytes)))):
            pool, found, tried = [*finer, *pool], [*found, *finer], [*tried, finer]
            fits += _fits(fitter, [finer], stop)
        rewriter = Rewriter(solver, graph, tuner.folded, {} if by_hand else self.rules)
        rewritten = self._rewritten(rewriter, list(chain.from_iterable(tried)), fits, stop)
        fits += _fits(fitter, [rewritten], stop)
        best_last = sorted(fits, key=lambda f: rank(f.candidate), reverse=True)
        fitted, pool = {_way(f.candidate): f for f in best_last}, [*pool, *rewritten]
        ranked = sorted([*(f.candidate for f in fitted.values()), *pool], key=rank)
        best, whole = self._finished(rewriter, fitter, fitted, ranked, stop)
        chosen, best = self._by_stage(rewriter, best, whole, ranked, zeros, stop)
        if best.mesh.num_microbatches > 1:
            check_time(best.graph, best.execution)
        if kept.guided and not stop.reached:
            whole |= self._rivals(rewriter, best, alternatives)
        costed = list({_way(c): whole.get(_way(c), c) for c in [*alternatives, *found]}.values())
        report = SearchReport(
            round(time.perf_counter() - start, 3),
            len({space.mesh.sizes for space in tuner.spaces_like(best.execution)}),
            self._bound_s(tuner, best, found if kept.guided else costed),
            solver.limit_of(best.prediction.device_bytes),
            best.rewrites,
            tuner.obstacle,
            () if best.fits or stop.reached else remedies(graph, best, tuner),
            stop.reason,
        )
        return Plan(
            best.graph, self.cluster, model, fingerprint(graph), best.prediction,
            _others(chosen, costed, {} if stop.reached or tuner.folded.is_large else remedied(costed, tuner)),
            report, best.execution, asked,
        )  # fmt: skip

    def _staged(
        self, tuner: Tuner, pool: Sequence[Candidate], fits: Sequence[Fitted], stop: Stop, *, needed: bool,
        compared: bool,
    ) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:  # fmt: skip
        """Return the best plan of each number of stages that may win, all that was tried of these, and one by hand.

        Where no stages are asked for, they are tried if no known plan fits, if devices are unlike, or if the best plan
        takes so much longer than its work that stages may save some of the rest. The last reason is none on CPUs: a
        stage that waits leaves memory bandwidth to others, which the timeline does not know of.
        """
        limit_bytes = tuner.solver.limit_bytes
        fastest_s = _fastest_s(fits, pool, limit_bytes)
        may_be_far = self.cluster.device.kind != "cpu" and not tuner.folded.is_large
        is_far = may_be_far and fastest_s > _FAR * tuner.ideal_s(tuner.modes[0])
        unasked = tuner.pins.asked.stages is None and not self.cluster.parts
        if unasked and ((fastest_s < inf and not is_far) or (fastest_s == inf and tuner.nothing_fits)):
            return [], [], []
        stager = Stager(tuner, fastest_s)
        plans = stop.within(stager.plans(), needed=needed)
        found = {(c.execution.schedule.num_stages, c.execution.schedule.stage_sizes): c for c in plans}
        by_hand = list(stop.within(stager.by_hand()))[-1:] if found and compared else []
        return list(found.values()), stager.tried, list(map(tuner.told, by_hand))

    def _rewritten(
        self, rewriter: Rewriter, tried: Sequence[Candidate], fits: Sequence[Fitted], stop: Stop
    ) -> list[Candidate]:
        """Return faster plans with rewrites, those of the fewest axes first.

        Layouts that are run in several orders count only in the order of their fastest plan that fits.
        """
        fastest_last = sorted((f.candidate for f in fits), key=lambda c: c.prediction.step_s, reverse=True)
        keeping = {id(c.solved): c for c in fastest_last}
        able = [c for c in tried if _order(c) == _order(keeping.get(id(c.solved), c))]
        estimates = {id(c): keeping[id(c.solved)].prediction.step_s for c in able if id(c.solved) in keeping}
        found = sorted(stop.within(rewriter.best(able, estimates)), key=lambda c: len(c.mesh))
        self.places.update(rewriter.places)
        return found

    def _finished(
        self, rewriter: Rewriter, fitter: Fitter, fitted: Mapping[_Way, Fitted], ranked: Sequence[Candidate], stop: Stop
    ) -> tuple[Candidate, dict[_Way, Candidate]]:
        """Return the best plan of the whole graph, and all plans judged for it whose blocks keep the same."""
        apart = list(stop.within(self._apart(rewriter, fitter, fitted, {}, ranked[0])))
        whole = {_way(c): c for c in stop.within(self._whole(rewriter, ranked, apart), needed=not apart)}
        best = min([*apart, *whole.values()], key=rank)
        if not best.fits and any(c.fits for c in ranked):  # the estimate was too low
            folded = Folded(rewriter.whole(best), is_large=fitter.folded.is_large)
            again = Fitter(fitter.solver, folded, values=fitter.values, zeros=fitter.zeros).best([best])
            best = min([best, *(f.candidate for f in stop.within(again))], key=rank)
        if best not in apart:
            best = min([best, *stop.within(self._apart(rewriter, fitter, fitted, whole, best))], key=rank)
        return best, whole

    def _whole(
        self, rewriter: Rewriter, ranked: Sequence[Candidate], known: Sequence[Candidate]
    ) -> Iterator[Candidate]:
        """Yield the best candidates for the whole graph, which candidates for folded graphs estimate closely.

        Once a plan fits, at most `_MOST_WHOLE` plans are solved in all. They have to be estimated faster than the best
        of these and of the `known` ones.
        """
        found: dict[_Way, Candidate] = {}
        for candidate in ranked:
            best = min([*known, *found.values()], key=rank, default=None)
            if best and (_about(best) <= rank(candidate) or (best.fits and len(found) >= _MOST_WHOLE)):
                break
            if _way(candidate) in found:  # the same way, keeping less
                continue
            new = rewriter.again_whole(candidate) if candidate.folded else candidate
            self.progress(f"{named(new)}, all blocks: {new.prediction.step_s * 1e3:.1f} ms")
            found[_way(new)] = new
            yield new

    def _apart(
        self,
        rewriter: Rewriter,
        fitter: Fitter,
        fitted: Mapping[_Way, Fitted],
        whole: Mapping[_Way, Candidate],
        best: Candidate,
    ) -> Iterator[Candidate]:
        """Yield plans some of whose blocks keep more; the most promising first.

        A plan that loses while all blocks keep the same may win where the memory that it leaves is enough for more
        blocks. Plans whose estimate is no better than the best by now are left out. The best plan itself is tried while
        none is faster, if it is no estimate.
        """
        if not best.fits:
            return
        best_s, about = best.prediction.step_s, {way: f.mixed_s(fitter.solver.limit_bytes) for way, f in fitted.items()}
        for way in sorted(about, key=lambda way: about[way])[:_MOST_WHOLE]:
            is_plan = way == _way(best) and best_s == best.prediction.step_s and not best.folded
            if about[way] >= best_s * (1 - LITTLE) and not is_plan:
                continue
            own = fitted[way].candidate
            plain = whole[way] if way in whole else rewriter.again_whole(own, judged=False) if own.folded else own
            for mixed in by_block(fitter, fitted[way], plain, best_s):
                self.progress(f"{named(mixed)}, blocks apart: {mixed.prediction.step_s * 1e3:.1f} ms")
                best_s = min(best_s, mixed.prediction.step_s)
                yield mixed

    def _by_stage(
        self, rewriter: Rewriter, best: Candidate, whole: Mapping[_Way, Candidate], ranked: Sequence[Candidate],
        zeros: Sequence[Zero], stop: Stop,
    ) -> tuple[_Way, Candidate]:  # fmt: skip
        """Return how the best plan was run, and the plan once each stage has its own blocks and lifetimes.

        Plans in other orders that come near are looked at too: stages leave each other different room in each order.
        """

        def by_stage(found: Candidate) -> Candidate:
            solver = rewriter.solver
            own = stored_by_stage(solver, said_by_block(solver, spread_out(solver, found)), zeros)
            return sent_in_pieces(solver, own)

        orders, near = {_order(best)}, list[Candidate]()
        for other in ranked if best.fits and not rewriter.folded.is_large else ():
            is_near = other.fits and other.prediction.step_s <= _NEAR * best.prediction.step_s
            if is_near and other.execution.schedule.num_stages > 1 and _order(other) not in orders:
                orders.add(_order(other))
                near.append(other)
        wholes = (whole.get(_way(c)) or (rewriter.again_whole(c) if c.folded else c) for c in near[:_MOST_ORDERS])
        ways = [(_way(best), by_stage(best)), *((_way(c), by_stage(c)) for c in stop.within(wholes))]
        return min(ways, key=lambda own: rank(own[1]))

    def _rivals(self, rewriter: Rewriter, best: Candidate, others: Sequence[Candidate]) -> dict[_Way, Candidate]:
        """Return plans beside the requested one, for the whole graph, where an estimate says that they are faster."""
        faster = sorted((c for c in others if c.folded and rank(c) < _about(best)), key=rank)
        return {_way(c): rewriter.again_whole(c) for c in faster[:_MOST_WHOLE]}

    def _bound_s(self, tuner: Tuner, best: Candidate, costed: Sequence[Candidate]) -> float:
        """Return `SearchReport.bound_s` for the way in which the plan is run.

        For values that are recomputed one by one, the bound is of a plan that keeps everything: recomputation adds to
        that. A plan of the whole graph may lay equal blocks out differently, and take less: then that step counts.
        """
        mode = best.execution.recompute
        many = best.mesh.num_microbatches
        execution = best.execution if isinstance(mode, str) else replace(best.execution, recompute="none")
        steps_s = [
            c.prediction.step_s
            for c in (best, *costed)
            if c is best or ((c.mesh.num_microbatches, c.execution) == (many, execution) and not c.folded)
        ]
        return min([tuner.bound_s(many, execution), *steps_s])


def _order(candidate: Candidate) -> tuple[str, int]:
    """Return the schedule of microbatches, and the chunks per stage."""
    return candidate.execution.schedule.name, candidate.execution.schedule.chunks_per_stage


def _others(chosen: _Way, costed: Sequence[Candidate], remedy: Mapping[int, str]) -> tuple[Alternative, ...]:
    return tuple(_alternative(c, remedy.get(id(c), "")) for c in costed if _way(c) != chosen)


def _alternative(c: Candidate, remedy: str) -> Alternative:
    return Alternative(c.name, c.mesh, c.prediction, c.fits, c.execution, most_frequent(c.graph), c.folded, remedy)


def _fits(fitter: Fitter, groups: Sequence[Sequence[Candidate]], stop: Stop) -> Iterator[Fitted]:
    """Yield plans with what they should keep, group after group, as only so many of each group are worth a look.

    Of a large model, only plans that would be faster than all that fit.
    """
    fitting = (c.prediction.step_s for c in chain.from_iterable(groups) if c.fits and fitter.folded.is_large)
    best_s = min(fitting, default=inf)
    for group in groups:
        for fitted in stop.within(fitter.best(filter(may_keep_more, group), best_s)):
            best_s = min(best_s, fitted.candidate.prediction.step_s)
            yield fitted


def _kept(
    fitter: Fitter, tuner: Tuner, tried: Sequence[Sequence[Candidate]], stop: Stop, fits: bool
) -> tuple[list[Fitted], list[Candidate]]:
    """Return plans with what they should keep, and what was tried for them beside known plans, if one of these fits."""
    if tuner.folded.is_large or not fits:
        return list(_fits(fitter, tried, stop)), []
    descent, pins = Descent(tuner, fitter), tuner.pins
    others = () if pins.guided else (space for space, *_ in tuner.known)  # plans by hand too
    found = stop.within(descent.plans(tuple(dict.fromkeys((*pins.spaces, *others)))))
    return list(found), descent.tried


def _fastest_s(fits: Sequence[Fitted], pool: Sequence[Candidate], limit_bytes: int) -> float:
    """Return the step of the best plan that is known before the whole graph is solved; inf if none fits."""
    known_s = [c.prediction.step_s for c in pool if c.fits]
    return min(known_s + [f.mixed_s(limit_bytes) for f in fits if f.candidate.fits], default=inf)


def _likeliest(fits: Sequence[Fitted], pool: Sequence[Candidate], limit_bytes: int) -> list[Candidate]:
    """Return the best plans of the likeliest meshes, by what is known before the whole graph is solved."""
    by_blocks = [((not f.candidate.fits, f.mixed_s(limit_bytes)), f.candidate) for f in fits]
    known, found = sorted([*by_blocks, *((rank(c), c) for c in pool)], key=itemgetter(0)), dict[object, Candidate]()
    for (unfit, measure), candidate in known:
        if (unfit, measure) <= (known[0][0][0], _BEHIND * known[0][0][1]):
            found.setdefault(candidate.mesh.devices.sizes, candidate)
    return list(found.values())[:_MOST_NESTED]


def _way(candidate: Candidate) -> _Way:
    return candidate.name, candidate.mesh, candidate.execution.scheduled(split=()), candidate.rewrites


def _about(candidate: Candidate) -> tuple[bool, float]:
    """Return its rank, a little better."""
    unfit, measure = rank(candidate)
    return unfit, measure * (1 - LITTLE)
