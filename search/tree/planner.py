"""The search: every mesh, the best layouts on each, memory as a hard limit, baselines on the same terms.

On one mesh, run in one way, the search is exact for two sums of compute and communication: without overlap, and with as
much overlap as can be. The rest is not exact. Ways to run a graph are tried by queues (`search.tree.attempts`), the
likeliest first. The timeline, in which compute and communication overlap, judges all that was found, plans of all
meshes and baselines alike. Its time has a bound (`search.exact.least`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import Unpack

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.encodings import Encodings
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.stages import not_run
from shardwright.pcg.step.execution import Execution, ReduceDtype
from shardwright.pcg.step.lifetimes import ZEROS, Zero
from shardwright.pcg.step.optimizers import Optimizer
from shardwright.pcg.step.precisions import PrecisionMode
from shardwright.pcg.step.time import check_time
from shardwright.search.choices.domain import CertifiedSplits
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.collectives.candidates import for_planner
from shardwright.search.collector import collector_paused
from shardwright.search.effort import FAR
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Candidate, Identity, Solver, different, rank
from shardwright.search.picked import with_its_schedules
from shardwright.search.plan import Alternative, Plan, SearchReport, fingerprint, most_frequent
from shardwright.search.request.anytime import Stop
from shardwright.search.request.options import SearchOptions, SearchWords
from shardwright.search.request.pins import Pins
from shardwright.search.request.restrict import FREE, ZERO
from shardwright.search.request.spaces import Space
from shardwright.search.rewrites.rewriting import Rewriter
from shardwright.search.tree.attempts import Queue
from shardwright.search.tree.blame import blamed
from shardwright.search.tree.byhand import Strategy, by_people, by_people_in_sequence
from shardwright.search.tree.encodings import encoded
from shardwright.search.tree.fitting import Fitted, Fitter
from shardwright.search.tree.idle import asked_for, on_a_part, with_idle
from shardwright.search.tree.meshes import Meshes
from shardwright.search.tree.phases import Phases
from shardwright.search.tree.pieces import in_pieces, rivals_in_pieces
from shardwright.search.tree.remedies import remedied, remedies
from shardwright.search.tree.staging import Stages, StagesByHand
from shardwright.search.tree.ways import Progress, Way, Ways
from shardwright.search.tree.whole import WholeGraph
from shardwright.substitutions.equations import Equation


@dataclass
class _Attempted:
    """The results of the queues: the best plan `searched` of each kind, those by hand, and all that may be best."""

    queues: list[Queue] = field(default_factory=list)
    searched: list[Candidate] = field(default_factory=list)
    by_hand: list[Candidate] = field(default_factory=list)
    rivals: list[Candidate] = field(default_factory=list)

    @property
    def fits(self) -> list[Fitted]:
        """The plans of which it was decided what they keep."""
        return [fitted for queue in self.queues for fitted in queue.fits]

    def tried(self, ways: Ways) -> list[Candidate]:
        """Return all layouts that were solved, in every order of stages; under a request, those that keep to it."""
        attempts = chain.from_iterable(queue.solved for queue in self.queues)
        known = [] if ways.pins.guided else ways.known.values()
        return [*known, *(plan for attempt in attempts for plan in attempt.plans)]


class Planner:
    """A search for plans of serial graphs on one cluster. Only certified choices and certified `rules` enter.

    `places` counts, by rule, the places that backtracking found, for `reports.coverage`. `precision`: the one that the
    graphs were captured under; `per_microbatch`: modules whose statistics are those of each microbatch; `reduce_dtype`:
    the dtype in which gradients are sent; `optimizer`: whose states are kept; `encodings`: for which layouts
    are chosen, if a request allows them.
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
        optimizer: Optimizer = "adam",
        encodings: Encodings = (),
    ) -> None:
        self.cluster, self.certified, self.rules = for_planner(cluster), certified, rules or {}
        self.execution = Execution.of(
            precision,
            per_microbatch=tuple(per_microbatch),
            reduce_dtype=reduce_dtype,
            optimizer=optimizer,
            encodings=encodings,
        )
        self.progress = progress or (lambda message: None)
        self.solver = Solver(self.cluster, certified)
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
            return self._plan(self._solver(cluster), graph, model, asked, spaces, compared, stop, by_hand=by_hand)

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

    def _solver(self, cluster: Cluster) -> Solver:
        """Return a solver for a cluster; that for the planner's own knows what it has solved."""
        return self.solver if cluster == self.cluster else Solver(cluster, self.certified)

    def _pins(self, cluster: Cluster, graph: Graph, asked: SearchOptions, spaces: Sequence[Space] | None) -> Pins:
        """Return the checked request, without pipeline stages where the graph does not run in them."""
        kept = Pins.of(graph, cluster, asked, spaces)
        if not kept.staged or (problem := not_run(graph, self.execution.base)) is None:
            return kept
        if not kept.spaces:
            raise PlanError(problem)
        return replace(kept, staged={})

    def _plan(
        self, solver: Solver, graph: Graph, model: str, asked: SearchOptions, spaces: Sequence[Space] | None,
        compared: bool, stop: Stop, *, by_hand: bool = False,
    ) -> Plan:  # fmt: skip
        """Return the best plan on all devices of the solver's cluster."""
        phases, kept = Phases(self.progress), self._pins(solver.cluster, graph, asked, spaces)
        solver = (solver if kept.memory_bytes is None else solver.within(kept.memory_bytes)).until(stop.check)
        run = replace(self.execution, offload=asked.offload or "none")
        ways = Ways(solver, graph, run, kept, self.progress)
        zeros = kept.spaces[0].zeros if spaces is not None and kept.spaces else ZEROS
        fitter = Fitter(solver, ways.folded, values=kept.recompute is None and not by_hand, zeros=zeros)
        rewriter = Rewriter(solver, graph, ways.folded, {} if by_hand else self.rules)
        try:
            found = self._attempted(ways, fitter, rewriter, phases, stop, compared=compared, by_hand=by_hand)
        except NoLayoutsError as error:
            raise blamed(error, graph, asked, ways) from error
        rewritten = self._rewritten(rewriter, found.tried(ways), found.fits, stop, phases)
        fits = [*found.fits, *phases("kept of rewritten plans", stop.within(fitter.best(rewritten)))]
        best_last = sorted(fits, key=lambda f: rank(f.candidate), reverse=True)
        fitted = {f.candidate.identity: f for f in best_last}
        ranked = sorted([*(f.candidate for f in fitted.values()), *found.rivals, *rewritten], key=rank)
        finisher = WholeGraph(rewriter, fitter, stop, self.progress)
        with phases.timed("whole graph"):
            best, whole = finisher.best(fitted, ranked)
        with phases.timed("by stage"):
            chosen, best = finisher.by_stage(best, whole, ranked, zeros)
        with phases.timed("encodings"):
            best = encoded(solver, best, asked.encodings)
        with phases.timed("pieces"):
            cut = in_pieces(solver, best, asked.pieces if asked.pieces or not stop.reached else 1)
            rivals = (c for c in whole.values() if c.execution.encodings == cut.execution.encodings)
            others = stop.within(rivals_in_pieces(solver, cut, rivals, asked.pieces))
            chosen, best = min([(chosen, cut), *others], key=lambda own: rank(own[1]))
        if best.mesh.num_microbatches > 1:
            check_time(best.graph, best.execution)
        if kept.guided and not stop.reached:
            whole |= finisher.rivals(best, found.by_hand)
        costed = list({c.identity: whole.get(c.identity, c) for c in [*found.by_hand, *found.searched]}.values())
        with phases.timed("bound"):
            last, rivals = stop.last(), found.searched if kept.guided else costed
            solver.until(last.check)
            bounds_s = last.within(self._bound_s(ways, best, own) for own in (rivals,))
            bound_s = next(bounds_s, ways.ideal_s(ways.modes[0]))
        report = SearchReport(
            phases.seconds,
            len({space.mesh.sizes for space in ways.spaces_like(best.execution)}),
            bound_s,
            solver.limit_of(best.prediction.device_bytes),
            best.rewrites,
            ways.obstacle,
            () if best.fits or stop.reached else remedies(graph, best, ways),
            stop.reason,
            sum(queue.left for queue in found.queues),
        )
        return with_its_schedules(Plan(
            best.graph, solver.cluster, model, fingerprint(graph), best.prediction,
            _others(chosen, costed, {} if stop.reached else remedied(costed, ways)),
            report, best.execution, asked,
        ))  # fmt: skip

    def _attempted(
        self, ways: Ways, fitter: Fitter, rewriter: Rewriter, phases: Phases, stop: Stop,
        *, compared: bool, by_hand: bool,
    ) -> _Attempted:  # fmt: skip
        """Return what the queues found. Raises `NoLayoutsError` where nothing has layouts that can be run."""
        kept, found = ways.pins, _Attempted()
        compared &= ways.solver.cluster.num_devices > 1 and not (ways.effort.is_least and ways.nothing_fits)
        people = phases("plans by hand", stop.within(by_people(ways) if compared else ()))
        if not kept.guided:  # else what was not asked for is no rival
            found.by_hand += people
        needed, goes_on = not found.by_hand, not (kept.guided or by_hand)
        meshes: Queue = Strategy(ways, kept.spaces) if by_hand else Meshes(ways, fitter, kept.spaces, rewriter)
        if isinstance(meshes, Meshes) and goes_on:
            meshes.go_on_from(_likeliest(ways))
        found.queues.append(meshes)
        if needed and stop.limit_s is not None:  # a mesh of many axes may take longer than there is, but for these
            free = [space for space in kept.spaces if set(space.roles) == {FREE}]
            simple = Strategy(ways, [space.with_roles((ZERO,) * len(space.mesh)) for space in free])
            _ran(phases("weights and batch shared evenly", stop.within(simple.run(), needed=True)))
            found.searched += sorted(simple.bests(), key=rank)[:1]
            needed = not found.searched
        _ran(phases("meshes", stop.within(meshes.run(), needed=needed)))
        if kept.spaces and not meshes.solved and not any(c.fits for c in (*found.by_hand, *found.searched)):
            raise ways.refused
        found.by_hand += people
        if compared:
            by_sequence = by_people_in_sequence(ways, ways.fastest_s)
            found.by_hand += phases("plans by hand that share the sequence", stop.within(by_sequence))
        if isinstance(meshes, Meshes) and goes_on:
            meshes.go_on_from(_likeliest(ways))
            _ran(phases("meshes of plans by hand", stop.within(meshes.run())))
        found.searched += sorted(meshes.bests(ways.searched), key=rank)[:1] if by_hand else meshes.bests(ways.searched)
        found.rivals += found.searched if kept.guided else [*found.searched, *found.by_hand]
        fastest_s = _fastest_s(meshes.fits, found.rivals, ways.solver.limit_bytes)
        if self._may_pay(ways, fastest_s):
            self._try_stages(ways, fitter, fastest_s, found, phases, stop, compared=compared)
        if not found.searched and needed:
            raise ways.refused
        return found

    def _try_stages(
        self, ways: Ways, fitter: Fitter, fastest_s: float, found: _Attempted, phases: Phases, stop: Stop,
        *, compared: bool,
    ) -> None:  # fmt: skip
        """Add plans with stages, and the one by hand that they are compared with."""
        stages = Stages(ways, fitter, fastest_s)
        found.queues.append(stages)
        _ran(phases("stages", stop.within(stages.run(), needed=not found.searched)))
        bests = stages.bests_by(lambda way: way.space.pipeline)
        found.searched += bests
        found.rivals += [*bests, *(plan for attempt in stages.solved for plan in attempt.plans)]
        if bests and compared:
            by_hand = StagesByHand(ways, stages)
            _ran(phases("stages by hand", stop.within(by_hand.run())))
            best = sorted(by_hand.bests(), key=rank)[:1]
            found.by_hand += best
            kept = ways.pins  # where only the number of stages is asked for, this is what is asked for too
            found.rivals += best if not (kept.guided and (kept.mesh or kept.limits or kept.spaces)) else ()

    def _may_pay(self, ways: Ways, fastest_s: float) -> bool:
        """Return whether stages are tried: `fastest_s` is the step of the best plan without them.

        Where no stages are asked for, they are tried if no known plan fits, if devices are unlike, or if the best plan
        takes so much longer than its work that stages may save some of the rest. The last reason is none on CPUs: a
        stage that waits leaves memory bandwidth to others, which the timeline does not know of.
        """
        if not ways.pins.staged:
            return False
        if ways.pins.asked.stages is not None or ways.solver.cluster.parts:
            return True
        if fastest_s == inf:
            return not ways.nothing_fits
        may_be_far = ways.solver.cluster.device.kind != "cpu" and ways.effort.unasked
        return may_be_far and fastest_s > FAR * ways.ideal_s(ways.modes[0])

    def _rewritten(
        self, rewriter: Rewriter, tried: Sequence[Candidate], fits: Sequence[Fitted], stop: Stop, phases: Phases
    ) -> list[Candidate]:
        """Return faster plans with rewrites, those of the fewest axes first.

        Layouts that are run in several orders count only in the order of their fastest plan that fits.
        """
        fastest_last = sorted((f.candidate for f in fits), key=lambda c: c.prediction.step_s, reverse=True)
        keeping = {id(c.solved): c for c in fastest_last}
        able = [c for c in tried if c.order == keeping.get(id(c.solved), c).order]
        estimates = {id(c): keeping[id(c.solved)].prediction.step_s for c in able if id(c.solved) in keeping}
        rewrites = phases("rewrites", stop.within(rewriter.best(able, estimates)))
        found = sorted(rewrites, key=lambda c: len(c.mesh))
        self.places.update(rewriter.places)
        return found

    def _bound_s(self, ways: Ways, best: Candidate, costed: Sequence[Candidate]) -> float:
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
        return min([ways.bound_s(many, execution), *steps_s])


def _others(chosen: Identity, costed: Sequence[Candidate], remedy: Mapping[int, str]) -> tuple[Alternative, ...]:
    return tuple(_alternative(c, remedy.get(id(c), "")) for c in costed if c.identity != chosen)


def _alternative(c: Candidate, remedy: str) -> Alternative:
    return Alternative(c.name, c.mesh, c.prediction, c.fits, c.execution, most_frequent(c.graph), c.folded, remedy)


def _ran(attempts: Iterable[object]) -> None:
    """Run a queue to its end, or to the end of the search."""
    for _ in attempts:
        pass


def _likeliest(ways: Ways) -> list[Way]:
    """Return the best way of each space that was solved, if it fits: the search goes on from plans by hand."""
    found = dict[Space, Way]()
    for way in sorted((way for way, c in ways.known.items() if c.fits), key=lambda way: rank(ways.known[way])):
        found.setdefault(way.space, way)
    return list(found.values())


def _fastest_s(fits: Sequence[Fitted], pool: Sequence[Candidate], limit_bytes: int) -> float:
    """Return the step of the best plan that is known before the whole graph is solved; inf if none fits."""
    known_s = [c.prediction.step_s for c in pool if c.fits]
    return min(known_s + [f.mixed_s(limit_bytes) for f in fits if f.candidate.fits], default=inf)
