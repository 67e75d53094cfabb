"""One search: every phase of planning one graph on all devices of one cluster, and the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import NamedTuple

from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.time import check_time
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.effort import FAR
from shardwright.search.exact.solving import Candidate, Identity, Solver, rank
from shardwright.search.picked import with_its_schedules
from shardwright.search.plan import Alternative, Plan, SearchReport, fingerprint, most_frequent
from shardwright.search.request.anytime import Stop
from shardwright.search.request.pins import Pins
from shardwright.search.request.restrict import FREE, ZERO
from shardwright.search.request.spaces import Space
from shardwright.search.rewrites.rewriting import Rewriter
from shardwright.search.tree.attempts import Queue
from shardwright.search.tree.blame import blamed
from shardwright.search.tree.byhand import Strategy, by_people, by_people_in_sequence
from shardwright.search.tree.encodings import encoded
from shardwright.search.tree.fitting import Fitted, Fitter
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


class _Finished(NamedTuple):
    """The best plan of the whole graph, how it was run, and all that were judged on the whole graph."""

    finisher: WholeGraph
    chosen: Identity
    best: Candidate
    whole: dict[Identity, Candidate]


class Search:
    """One search for plans of a graph on all devices of a solver's cluster, phase by phase.

    Attributes:
        stop: ends it.
        compared: whether plans that people choose by hand are tuned too.
        by_hand: whether the spaces are planned as plans by hand are.
        rewriter: counts by rule the places that backtracking found.
    """

    def __init__(
        self, solver: Solver, graph: Graph, execution: Execution, pins: Pins, rules: Mapping[str, Equation],
        progress: Progress, stop: Stop, *, zeros: Sequence[Zero], compared: bool, by_hand: bool,
    ) -> None:  # fmt: skip
        """`zeros`: the lifetimes that gathered weights may have."""
        self.phases, self.progress, self.stop = Phases(progress), progress, stop
        self.graph, self.pins, self.zeros, self.by_hand = graph, pins, zeros, by_hand
        self.solver = (solver if pins.memory_bytes is None else solver.within(pins.memory_bytes)).until(stop.check)
        self.ways = ways = Ways(self.solver, graph, execution, pins, progress)
        values = pins.recompute is None and not by_hand
        offload = pins.asked.offload is None
        self.fitter = Fitter(self.solver, ways.folded, values=values, zeros=zeros, offload=offload)
        self.rewriter = Rewriter(self.solver, graph, ways.folded, {} if by_hand else rules)
        can_compare = ways.solver.cluster.num_devices > 1 and not (ways.effort.is_least and ways.nothing_fits)
        self.compared = compared and can_compare

    def plan(self, model: str) -> Plan:
        """Return the best plan. `model`: its name."""
        try:
            attempted = self._attempted()
        except NoLayoutsError as error:
            raise blamed(error, self.graph, self.pins.asked, self.ways) from error
        finished = self._finished(attempted)
        chosen, best = self._sent(finished)
        if best.mesh.num_microbatches > 1:
            check_time(best.graph, best.execution)
        by_hand, whole, stopped = attempted.by_hand, finished.whole, self.stop.reached
        if self.pins.guided and not stopped:
            whole |= finished.finisher.rivals(best, by_hand)
        costed = list({c.identity: whole.get(c.identity, c) for c in [*by_hand, *attempted.searched]}.values())
        report = self._report(best, attempted, costed)
        others = _others(chosen, costed, {} if stopped else remedied(costed, self.ways))
        return with_its_schedules(Plan(
            best.graph, self.solver.cluster, model, fingerprint(self.graph), best.prediction, others, report,
            best.execution, self.pins.asked,
        ))  # fmt: skip

    # ---- queues ----

    def _attempted(self) -> _Attempted:
        """Return the results of the queues. Raises `NoLayoutsError` where nothing has layouts that can be run."""
        ways, pins, phases, stop, attempted = self.ways, self.pins, self.phases, self.stop, _Attempted()
        people = phases("plans by hand", stop.within(by_people(ways) if self.compared else ()))
        if not pins.guided:  # else what was not asked for is no rival
            attempted.by_hand += people
        needed = self._try_meshes(attempted)
        attempted.by_hand += people
        if self.compared:
            by_sequence = by_people_in_sequence(ways, ways.fastest_s)
            attempted.by_hand += phases("plans by hand that share the sequence", stop.within(by_sequence))
        meshes = attempted.queues[0]
        if isinstance(meshes, Meshes) and not pins.guided:
            meshes.go_on_from(_likeliest(ways))
            _ran(phases("meshes of plans by hand", stop.within(meshes.run())))
        bests = meshes.bests(ways.searched)
        attempted.searched += sorted(bests, key=rank)[:1] if self.by_hand else bests
        attempted.rivals += attempted.searched if pins.guided else [*attempted.searched, *attempted.by_hand]
        fastest_s = _fastest_s(meshes.fits, attempted.rivals, self.solver.limit_bytes)
        if self._may_pay(fastest_s):
            self._try_stages(fastest_s, attempted)
        if not attempted.searched and needed:
            raise ways.refused
        return attempted

    def _try_meshes(self, attempted: _Attempted) -> bool:
        """Run the queue without stages, and return whether no plan was known before it."""
        ways, pins, needed = self.ways, self.pins, not attempted.by_hand
        if self.by_hand:
            meshes: Queue = Strategy(ways, pins.spaces)
        else:
            meshes = Meshes(ways, self.fitter, pins.spaces, self.rewriter)
            meshes.go_on_from(() if pins.guided else _likeliest(ways))
        attempted.queues.append(meshes)
        if needed and self.stop.limit_s is not None:  # a mesh of many axes may take longer than there is, but for these
            free = [space for space in pins.spaces if set(space.roles) == {FREE}]
            simple = Strategy(ways, [space.with_roles((ZERO,) * len(space.mesh)) for space in free])
            _ran(self.phases("weights and batch shared evenly", self.stop.within(simple.run(), needed=True)))
            attempted.searched += sorted(simple.bests(), key=rank)[:1]
            needed = not attempted.searched
        _ran(self.phases("meshes", self.stop.within(meshes.run(), needed=needed)))
        if pins.spaces and not meshes.solved and not any(c.fits for c in (*attempted.by_hand, *attempted.searched)):
            raise ways.refused
        return needed

    def _try_stages(self, fastest_s: float, attempted: _Attempted) -> None:
        """Add plans with stages, and the one by hand that they are compared with."""
        stages, pins = Stages(self.ways, self.fitter, fastest_s), self.pins
        attempted.queues.append(stages)
        _ran(self.phases("stages", self.stop.within(stages.run(), needed=not attempted.searched)))
        bests = stages.bests_by(lambda way: way.space.pipeline)
        attempted.searched += bests
        attempted.rivals += [*bests, *(plan for attempt in stages.solved for plan in attempt.plans)]
        if bests and self.compared:
            by_hand = StagesByHand(self.ways, stages)
            _ran(self.phases("stages by hand", self.stop.within(by_hand.run())))
            best = sorted(by_hand.bests(), key=rank)[:1]
            attempted.by_hand += best  # where only the number of stages is asked for, this is what is asked for too
            attempted.rivals += best if not (pins.guided and (pins.mesh or pins.limits or pins.spaces)) else ()

    def _may_pay(self, fastest_s: float) -> bool:
        """Return whether stages are tried: `fastest_s` is the step of the best plan without them.

        Where no stages are asked for, they are tried if no known plan fits, if devices are unlike, or if the best plan
        takes so much longer than its work that stages may save some of the rest. The last reason is none on CPUs: a
        stage that waits leaves memory bandwidth to others, which the timeline does not know of.
        """
        ways = self.ways
        if not ways.pins.staged:
            return False
        if ways.pins.asked.stages is not None or ways.solver.cluster.parts:
            return True
        if fastest_s == inf:
            return not ways.nothing_fits
        may_be_far = ways.solver.cluster.device.kind != "cpu" and ways.effort.unasked
        return may_be_far and fastest_s > FAR * ways.ideal_s(ways.modes[0])

    # ---- from the best of the queues to a plan ----

    def _rewritten(self, attempted: _Attempted) -> list[Candidate]:
        """Return faster plans with rewrites, those of the fewest axes first.

        Layouts that are run in several orders count only in the order of their fastest plan that fits.
        """
        tried, fits = attempted.tried(self.ways), attempted.fits
        fastest_last = sorted((f.candidate for f in fits), key=lambda c: c.prediction.step_s, reverse=True)
        keeping = {id(c.solved): c for c in fastest_last}
        able = [c for c in tried if c.order == keeping.get(id(c.solved), c).order]
        estimates = {id(c): keeping[id(c.solved)].prediction.step_s for c in able if id(c.solved) in keeping}
        rewrites = self.phases("rewrites", self.stop.within(self.rewriter.best(able, estimates)))
        return sorted(rewrites, key=lambda c: len(c.mesh))

    def _finished(self, attempted: _Attempted) -> _Finished:
        """Return the best plan of the whole graph."""
        phases, rewritten = self.phases, self._rewritten(attempted)
        refitted = phases("kept of rewritten plans", self.stop.within(self.fitter.best(rewritten)))
        best_last = sorted([*attempted.fits, *refitted], key=lambda f: rank(f.candidate), reverse=True)
        fitted = {f.candidate.identity: f for f in best_last}
        ranked = sorted([*(f.candidate for f in fitted.values()), *attempted.rivals, *rewritten], key=rank)
        finisher = WholeGraph(self.rewriter, self.fitter, self.stop, self.progress)
        with phases.timed("whole graph"):
            best, whole = finisher.best(fitted, ranked)
        with phases.timed("by stage"):
            chosen, best = finisher.by_stage(best, whole, ranked, self.zeros)
        return _Finished(finisher, chosen, best, whole)

    def _sent(self, finished: _Finished) -> tuple[Identity, Candidate]:
        """Return how the plan was run, and the plan with what it sends encoded and in pieces."""
        options, phases, solver = self.pins.asked, self.phases, self.solver
        with phases.timed("encodings"):
            best = encoded(solver, finished.best, options.encodings)
        with phases.timed("pieces"):
            cut = in_pieces(solver, best, options.pieces if options.pieces or not self.stop.reached else 1)
            rivals = (c for c in finished.whole.values() if c.execution.encodings == cut.execution.encodings)
            others = self.stop.within(rivals_in_pieces(solver, cut, rivals, options.pieces))
            return min([(finished.chosen, cut), *others], key=lambda run: rank(run[1]))

    # ---- the report ----

    def _report(self, best: Candidate, attempted: _Attempted, costed: Sequence[Candidate]) -> SearchReport:
        """Return what the plan says of its search."""
        ways, stop = self.ways, self.stop
        with self.phases.timed("bound"):
            last, rivals = stop.last(), attempted.searched if self.pins.guided else costed
            self.solver.until(last.check)
            bounds_s = last.within(self._bound_s(best, rival) for rival in (rivals,))
            bound_s = next(bounds_s, ways.ideal_s(ways.modes[0]))
        return SearchReport(
            self.phases.seconds,
            len({space.mesh.sizes for space in ways.spaces_like(best.execution)}),
            bound_s,
            self.solver.limit_of(best.prediction.device_bytes),
            best.rewrites,
            ways.obstacle,
            () if best.fits or stop.reached else remedies(self.graph, best, ways),
            stop.reason,
            sum(queue.left for queue in attempted.queues),
        )

    def _bound_s(self, best: Candidate, costed: Sequence[Candidate]) -> float:
        """Return `SearchReport.bound_s` for the way in which the plan is run.

        For values that are recomputed one by one, the bound is of a plan that keeps everything: recomputation adds to
        that. A plan of the whole graph may lay equal blocks out differently, and take less: then that step counts.
        """
        mode = best.execution.recompute
        many = best.mesh.num_microbatches
        recompute = mode if isinstance(mode, str) else "none"
        execution = replace(best.execution, recompute=recompute, offload=self.ways.execution.offload)
        steps_s = [
            c.prediction.step_s
            for c in (best, *costed)
            if c is best or ((c.mesh.num_microbatches, c.execution) == (many, execution) and not c.folded)
        ]
        return min([self.ways.bound_s(many, execution), *steps_s])


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
    by_space = dict[Space, Way]()
    for way in sorted((way for way, c in ways.known.items() if c.fits), key=lambda way: rank(ways.known[way])):
        by_space.setdefault(way.space, way)
    return list(by_space.values())


def _fastest_s(fits: Sequence[Fitted], pool: Sequence[Candidate], limit_bytes: int) -> float:
    """Return the step of the best plan that is known before the whole graph is solved; inf if none fits."""
    known_s = [c.prediction.step_s for c in pool if c.fits]
    return min(known_s + [f.mixed_s(limit_bytes) for f in fits if f.candidate.fits], default=inf)
