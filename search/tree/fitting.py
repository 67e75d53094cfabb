"""Plans that keep what memory allows: the walk along prices of a byte for values and weights of known layouts.

Layouts are chosen as if all blocks were run in one way. Here each value is made again or kept by itself, each group of
weights has a lifetime of its own, and of two neighbouring solutions, one of which fits, some blocks take the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.asked import still_there
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.parameters import blocks_of, module_block
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.keeping import Keeping, KeepingProblem, Kept, expanded
from shardwright.search.exact.solving import NEARLY, Candidate, Solver, different

_HULL_STEPS = 8
_MIXTURES = 3
_MUCH = 0.2
"""Communication that takes this share of a step may be worth memory, also where compute hides it now."""
_MOST_WALKS = 8
"""So many plans, those that would be the fastest with everything kept; each takes some ten predictions."""
_WITHOUT = {"none": 1.0, "selective": 0.9, "full": 0.75}
"""The part of a step that is left where nothing is made again: forward is a third of the work."""
LITTLE = 1e-3
"""Of a step: no try is worth less, nor may a plan of folded blocks be further from that of the whole graph."""
_WORTH = 2 * LITTLE
"""Of a step: less is not worth the time that a plan of the whole graph takes to judge, of which some fit already."""
_HIGHEST_PRICE = 1e3
"""Of all bytes that are kept, against the whole step: at that price nothing is worth keeping."""


@dataclass(frozen=True)
class Fitted:
    """A plan, what it keeps of the whole model, and the next solution along the prices, which does not fit.

    `larger_s`, `larger_bytes`: the step and the memory of that, as `candidate.prediction` has them of the plan.
    """

    candidate: Candidate
    own: Keeping
    larger: Keeping | None = None
    larger_s: float = 0.0
    larger_bytes: int = 0

    def mixed_s(self, limit_bytes: int) -> float:
        """About what it takes where as many blocks as fit keep more, each of which adds and saves the same."""
        own_s, own_bytes = self.candidate.prediction.step_s, _bytes(self.candidate)
        if self.larger is None or not own_bytes < limit_bytes < self.larger_bytes:
            return own_s
        return own_s + (self.larger_s - own_s) * (limit_bytes - own_bytes) / (self.larger_bytes - own_bytes)


class Fitter:
    """Decides what plans of one model keep.

    Args:
        solver: for the cluster.
        folded: the model that the candidates are of, or whose blocks they have folded.
        values: whether values may be made again one by one.
        zeros: for how long gathered weights may stay.
    """

    def __init__(self, solver: Solver, folded: Folded, *, values: bool, zeros: Sequence[Zero] = ZEROS) -> None:
        self.solver, self.folded, self.values, self.zeros = solver, folded, values, zeros
        self.blocks = {repeated.block: repeated.blocks for repeated in folded.repeated}

    def best(self, candidates: Iterable[Candidate], best_s: float = inf) -> Iterator[Fitted]:
        """Those that may be the fastest, each with what it should keep; the most promising first.

        With everything kept a plan takes least time, so those that take more than the best so far are left out;
        `best_s`: the step of the best of others. What is far from fitting comes last, and only while nothing fits.
        """
        able = {(id(c.solved), c.execution): c for c in candidates if self._is_able(c)}.values()
        ranked = sorted(able, key=lambda c: (self.is_far(c), kept_s(c)))
        for candidate in ranked[: 1 if self.folded.is_large else _MOST_WALKS]:
            if kept_s(candidate) >= best_s or (best_s < inf and self.is_far(candidate)):
                return
            if (found := _Walk(self, candidate).run(best_s)) is not None:
                best_s = min(best_s, found.candidate.prediction.step_s)
                yield found

    def fitted(self, candidate: Candidate, best_s: float = inf) -> Fitted | None:
        """The plan with what it should keep; None where it does not fit, or does not come near `best_s`."""
        if not may_keep_more(candidate):
            return Fitted(candidate, Keeping())
        return _Walk(self, candidate).run(best_s) if self._is_able(candidate) else None

    def _is_able(self, candidate: Candidate) -> bool:
        """Whether what it stores alone leaves room."""
        own = candidate.prediction
        return not self.solver.excess_bytes(own.memory.stored_bytes, own.device_bytes)

    def is_far(self, candidate: Candidate) -> bool:
        """Whether what makes all again, and gathers it again, is far from fitting.

        One by one, values seldom take much less; they do where few blocks have many branches, each made again alone.
        """
        limit_bytes = self.solver.limit_of(candidate.prediction.device_bytes)
        keeps_least = candidate.execution.recompute == "full" and candidate.lifetimes == "zero-3"
        return keeps_least and _bytes(candidate) > NEARLY * limit_bytes

    def expanded(self, keeping: Keeping) -> Keeping:
        """What is said of the folded model, said of all of it."""
        return expanded(keeping, self.blocks, self.folded.alike)

    def judged(self, candidate: Candidate, keeping: Keeping) -> Candidate:
        """The candidate with this kept of its graph, by the timeline; where that is folded, told of the whole model."""
        leaves = {leaf.name for leaf in candidate.graph.leaves("parameter")}
        graph = with_lifetimes(candidate.graph, {k: v for k, v in keeping.lifetimes.items() if k in leaves})
        run, repeats = self._run(candidate, keeping), self.folded.repeats if candidate.folded else {}
        told = self.expanded(keeping) if candidate.folded else keeping
        try:
            prediction = self.solver.predicted(graph, run, repeats)
        except PlanError:  # it was rewritten, and has not all that is to be made again
            run = still_there(graph, Operations(graph).listed, run)
            prediction = self.solver.predicted(graph, run, repeats)
        return replace(
            candidate,
            graph=graph,
            execution=self._run(candidate, told) if candidate.folded else run,
            prediction=prediction,
            fits=self.solver.fits(prediction),
            lifetimes=tuple(told.lifetimes.items()),
        )

    def by_value(self, candidate: Candidate) -> bool:
        """Whether its values may be made again one by one: where stages differ, each has its own kind."""
        return self.values and not candidate.execution.schedule.recompute_by_stage

    def _run(self, candidate: Candidate, keeping: Keeping) -> Execution:
        run = candidate.execution
        return replace(run, recompute=keeping.recompute) if self.by_value(candidate) else run


def may_keep_more(candidate: Candidate) -> bool:
    """Whether memory decided about it."""
    return candidate.is_tight or not candidate.fits or candidate.execution.recompute != "none"


def kept_s(candidate: Candidate) -> float:
    """About what it would take, or less, with everything kept: compute waits for no weights that are gathered again."""
    mode, own = candidate.execution.recompute, candidate.prediction
    kept = own.step_s * (_WITHOUT[mode] if isinstance(mode, str) else 1.0)
    return kept - own.exposed_s if candidate.lifetimes in ("zero-2", "zero-3") else kept


class _Walk:
    """Along the lower hull of (bytes, seconds) of one candidate, to the edge that crosses the limit.

    `most`: with everything kept; None where that is far too much.
    """

    def __init__(self, fitter: Fitter, candidate: Candidate) -> None:
        self.fitter, self.candidate = fitter, candidate
        self.values = fitter.by_value(candidate)
        execution = replace(candidate.execution, recompute="none") if self.values else candidate.execution
        self.steps = Steps(candidate.graph, fitter.solver.cluster, execution)
        self.num_blocks = sum(len(fitter.blocks.get(block, (block,))) for block in blocks_of(candidate.graph))
        self.problems = [self._problem(share) for share in _exposed(candidate)]
        kept = self.problems[0].solve(0.0)
        self.most = self._fitted(kept) if self._may_fit(kept) else None

    def _problem(self, exposed: float) -> KeepingProblem:
        times = self.fitter.folded.repeats if self.candidate.folded else {}
        zeros = different(self.fitter.zeros, self.candidate.mesh)
        return KeepingProblem(self.steps, times, exposed, zeros, values=self.values)

    def _may_fit(self, kept: Kept) -> bool:
        limit_bytes = self.fitter.solver.limit_of(self.candidate.prediction.device_bytes)
        return kept.num_bytes <= NEARLY * limit_bytes

    def _fitted(self, kept: Kept) -> Fitted:
        return Fitted(self.fitter.judged(self.candidate, kept.keeping), self.fitter.expanded(kept.keeping))

    def run(self, best_s: float) -> Fitted | None:
        """The best that fits; None where none was found. What does not come near `best_s` is not looked at further."""
        if self.most is not None and _step_s(self.most) >= best_s:
            return None
        if self.most is not None and self.most.candidate.fits:
            return self.most
        found, limit_bytes = list[Fitted](), self.fitter.solver.limit_bytes
        for problem in self.problems:
            if (fitted := self._along(problem, best_s)) is not None:
                found.append(fitted)
                if fitted.mixed_s(limit_bytes) >= best_s:
                    break
        return min(found, key=lambda f: (not f.candidate.fits, f.mixed_s(limit_bytes)), default=None)

    def _along(self, problem: KeepingProblem, best_s: float) -> Fitted | None:
        """By the timeline only what may fit is judged, and what keeps nothing only where that is in question.

        None also where what keeps too much is no better than `best_s` already: what keeps less is taken to be slower.
        """
        over, larger, found = problem.solve(0.0), self.most, None
        step_s = self.candidate.prediction.step_s
        best = problem.solve(_HIGHEST_PRICE * step_s / max(over.num_bytes, 1.0))
        if not self.candidate.fits and not (found := self._fitted(best)).candidate.fits:
            return None
        for _ in range(1 if self.fitter.folded.is_large else _HULL_STEPS):
            if over.num_bytes <= best.num_bytes or best.seconds <= over.seconds:
                break
            price = (best.seconds - over.seconds) / (over.num_bytes - best.num_bytes)
            between = problem.solve(price)
            gained_s = best.seconds - between.seconds - price * (between.num_bytes - best.num_bytes)
            # a mixture is of whole blocks, and with stages the last ones, which keep more in it, are those of one stage
            grain_s = (best.seconds - over.seconds) / max(self.num_blocks, 1) / 2
            is_close = gained_s + grain_s < LITTLE * step_s and self.candidate.execution.schedule.num_stages == 1
            if is_close or between.keeping in (over.keeping, best.keeping):
                break
            if not self._may_fit(between):
                over, larger = between, None
                continue
            tried = self._fitted(between)
            if tried.candidate.fits:
                best, found = between, min(found or tried, tried, key=_step_s)
            elif _step_s(tried) >= best_s and (found is None or _step_s(found) >= best_s):
                return None
            else:
                over, larger = between, tried
            if found and larger and _step_s(found) - _step_s(larger) < LITTLE * step_s:
                break
        found, larger = found or self._fitted(best), larger or self._fitted(over)
        if not found.candidate.fits:
            return None
        return replace(found, larger=larger.own, larger_s=_step_s(larger), larger_bytes=_bytes(larger.candidate))


def _exposed(candidate: Candidate) -> Sequence[float]:
    """The share of communication that counts: what nothing hides now; and all, as what is made again hides much."""
    p = candidate.prediction
    own = min(1.0, p.exposed_s / p.communication_s) if p.communication_s else 0.0
    return (own,) if p.communication_s < _MUCH * p.step_s else (own, 1.0)


def by_block(fitter: Fitter, found: Fitted, whole: Candidate, best_s: float = inf) -> Iterator[Candidate]:
    """The whole plan with as many of its last blocks as fit keeping more: backward needs those first.

    Each block takes about the same, so two tries or three find how many that are, and what further ones would gain.
    `best_s`: the step of another plan; what is slower with more blocks than fit is not tried with fewer.
    """
    if found.larger is None:
        return
    names, home, limit = blocks_of(whole.graph), _home(whole.graph), fitter.solver.limit_bytes
    fits, gained_s, (fewest, least), (most, largest) = 0, 0.0, (0, _bytes(whole)), (len(names) + 1, found.larger_bytes)
    for _ in range(_MIXTURES):
        share = (limit - least) / (largest - least) if largest > least else 0.0
        number = min(int(fewest + share * (most - fewest)), most - 1)
        if number <= fits or (fits and (number - fits) / fits * gained_s < _WORTH * whole.prediction.step_s):
            return
        mixed = found.own.mixed(found.larger, frozenset(names[-number:]), home)
        tried = fitter.judged(whole, mixed)
        if tried.fits:
            fits, fewest, least = number, number, _bytes(tried)
            gained_s = whole.prediction.step_s - tried.prediction.step_s
            yield tried
        elif tried.prediction.step_s >= best_s:
            return
        else:
            most, largest = number, _bytes(tried)


def _step_s(fitted: Fitted) -> float:
    return fitted.candidate.prediction.step_s


def _bytes(candidate: Candidate) -> int:
    return candidate.prediction.memory.total_bytes


def _home(graph: Graph) -> Mapping[str, str]:
    """The block that each parameter lies in, or ""."""
    return {leaf.name: module_block(str(leaf.attr("target"))) for leaf in graph.leaves("parameter")}
