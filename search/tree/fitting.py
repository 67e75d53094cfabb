"""Plans that keep what memory allows: the walk along prices of a byte for values and weights of known layouts.

Layouts are chosen as if all blocks were run in one way. Here each value is kept or recomputed by itself, and each group
of weights has a lifetime of its own. Of two neighbouring solutions, one of which fits, some blocks take the other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from shardwright.cost.timeline.program import may_offload
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.asked import still_there
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.parameters import blocks_of, module_block
from shardwright.search.effort import HIDDEN_COPIES, LITTLE, MIXTURES, MUCH_SENT, WITHOUT, WORTH
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.keeping import Keeping, KeepingProblem, Solved, expanded
from shardwright.search.exact.solving import NEARLY, Candidate, Solver, different

_HIGHEST_PRICE = 1e3
"""The price of all bytes kept, in steps: at that price nothing is worth keeping."""


@dataclass(frozen=True)
class Fitted:
    """A plan, what it keeps of the whole model, and the next solution along the prices, which does not fit.

    `larger_s`, `larger_bytes`: the step and the memory of that solution, as `candidate.prediction` has the plan's.
    """

    candidate: Candidate
    own: Keeping
    larger: Keeping | None = None
    larger_s: float = 0.0
    larger_bytes: int = 0

    def mixed_s(self, limit_bytes: int) -> float:
        """Return an estimate of the step if as many blocks as fit keep more; each block adds and saves the same."""
        own_s, own_bytes = self.candidate.prediction.step_s, _bytes(self.candidate)
        if self.larger is None or not own_bytes < limit_bytes < self.larger_bytes:
            return own_s
        return own_s + (self.larger_s - own_s) * (limit_bytes - own_bytes) / (self.larger_bytes - own_bytes)


class Fitter:
    """A judge of what plans of one model keep.

    Args:
        solver: for the cluster.
        folded: the model that the candidates are of, or whose blocks they have folded.
        values: whether values may be recomputed one by one.
        zeros: the lifetimes that gathered weights may have.
        offload: whether values may wait on the host, if devices have a link to it.
    """

    def __init__(
        self, solver: Solver, folded: Folded, *, values: bool, zeros: Sequence[Zero] = ZEROS, offload: bool = False
    ) -> None:
        self.solver, self.folded, self.values, self.zeros, self.offload = solver, folded, values, zeros, offload
        self.blocks = {repeated.block: repeated.blocks for repeated in folded.repeated}

    def best(self, candidates: Iterable[Candidate], best_s: float = inf) -> Iterator[Fitted]:
        """Yield the plans that may be the fastest, each with what it should keep; the most promising first.

        A plan takes least time with everything kept, so plans that then take more than the best so far are left out.
        `best_s`: the step of the best other plan. Plans that are far from fitting come last, and only while nothing
        fits.
        """
        able = {(id(c.solved), c.execution): c for c in candidates if self._is_able(c)}.values()
        ranked = sorted(able, key=lambda c: (self.is_far(c), kept_s(c)))
        for candidate in ranked[: self.folded.effort.walks]:
            if kept_s(candidate) >= best_s or (best_s < inf and self.is_far(candidate)):
                return
            if (fitted := Walk(self, candidate).run(best_s)) is not None:
                best_s = min(best_s, fitted.candidate.prediction.step_s)
                yield fitted

    def fitted(self, candidate: Candidate, best_s: float = inf) -> Fitted | None:
        """Return the plan with what it should keep; None where it does not fit, or does not come near `best_s`."""
        if not may_keep_more(candidate):
            return Fitted(candidate, Keeping())
        return Walk(self, candidate).run(best_s) if self._is_able(candidate) else None

    def _is_able(self, candidate: Candidate) -> bool:
        """Return whether the parameters, gradients and moments of a plan leave room."""
        prediction = candidate.prediction
        return not self.solver.excess_bytes(prediction.memory.stored_bytes, prediction.device_bytes)

    def is_far(self, candidate: Candidate) -> bool:
        """Return whether a plan that recomputes and gathers everything again is far from fitting.

        With values recomputed one by one, a plan seldom takes much less memory; it does where few blocks have many
        branches, each of them recomputed alone.
        """
        limit_bytes = self.solver.limit_of(candidate.prediction.device_bytes)
        keeps_least = candidate.execution.recompute == "full" and candidate.lifetimes == "zero-3"
        return keeps_least and _bytes(candidate) > NEARLY * limit_bytes

    def expanded(self, keeping: Keeping) -> Keeping:
        """Return the choices for the whole model, from those for the folded one."""
        return expanded(keeping, self.blocks, self.folded.alike)

    def judged(self, candidate: Candidate, keeping: Keeping) -> Candidate:
        """Return the candidate that keeps this of its graph, by the timeline; if folded, stated for the whole model."""
        leaves = {leaf.name for leaf in candidate.graph.leaves("parameter")}
        graph = with_lifetimes(candidate.graph, {k: v for k, v in keeping.lifetimes.items() if k in leaves})
        run, repeats = self._run(candidate, keeping), self.folded.repeats if candidate.folded else {}
        chosen = self.expanded(keeping) if candidate.folded else keeping
        try:
            prediction = self.solver.predicted(graph, run, repeats)
        except PlanError:  # the graph was rewritten, and lacks some of what is to be made again
            run = still_there(graph, Operations(graph).listed, run)
            prediction = self.solver.predicted(graph, run, repeats)
        return replace(
            candidate,
            graph=graph,
            execution=self._run(candidate, chosen) if candidate.folded else run,
            prediction=prediction,
            fits=self.solver.fits(prediction),
            lifetimes=tuple(chosen.lifetimes.items()),
        )

    def by_value(self, candidate: Candidate) -> bool:
        """Return whether values may be recomputed one by one: not where stages differ, as each has its own kind."""
        return self.values and not candidate.execution.schedule.recompute_by_stage

    def _run(self, candidate: Candidate, keeping: Keeping) -> Execution:
        run = candidate.execution
        if not self.by_value(candidate):
            return run
        run = replace(run, recompute=keeping.recompute)
        return replace(run, offload=keeping.offload) if self.may_offload(candidate) else run

    def may_offload(self, candidate: Candidate) -> bool:
        """Return whether values of a plan may wait on the host."""
        return self.offload and may_offload(self.solver.cluster, candidate.execution)


def may_keep_more(candidate: Candidate) -> bool:
    """Return whether memory decided about a plan."""
    return candidate.is_tight or not candidate.fits or candidate.execution.recompute != "none"


def kept_s(candidate: Candidate) -> float:
    """Return an estimate of the step, or less, with everything kept: compute then waits for no gathers."""
    mode, prediction = candidate.execution.recompute, candidate.prediction
    kept_time_s = prediction.step_s * (WITHOUT[mode] if isinstance(mode, str) else 1.0)
    return kept_time_s - prediction.exposed_s if candidate.lifetimes in ("zero-2", "zero-3") else kept_time_s


class Walk:
    """A walk along the lower hull of (bytes, seconds) of one candidate, to the edge that crosses the limit.

    `most`: the plan with everything kept; None where that is far too much.
    """

    def __init__(self, fitter: Fitter, candidate: Candidate) -> None:
        self.fitter, self.candidate = fitter, candidate
        self.values = fitter.by_value(candidate)
        execution = replace(candidate.execution, recompute="none") if self.values else candidate.execution
        execution = replace(execution, offload="none") if self.values and fitter.offload else execution
        self.steps = Steps(candidate.graph, fitter.solver.cluster, execution)
        self.num_blocks = sum(len(fitter.blocks.get(block, (block,))) for block in blocks_of(candidate.graph))
        self.problems = [self._problem(share) for share in _exposed(candidate)]
        solved = self.problems[0].solve(0.0)
        self.most = self.fitted(solved) if self._may_fit(solved) else None

    def _problem(self, exposed: float, host: float | None = None) -> KeepingProblem:
        times = self.fitter.folded.repeats if self.candidate.folded else {}
        zeros = different(self.fitter.zeros, self.candidate.mesh)
        return KeepingProblem(self.steps, times, exposed, zeros, values=self.values, host=host)

    def _may_fit(self, solved: Solved) -> bool:
        limit_bytes = self.fitter.solver.limit_of(self.candidate.prediction.device_bytes)
        return solved.num_bytes <= NEARLY * limit_bytes

    def fitted(self, solved: Solved) -> Fitted:
        return Fitted(self.fitter.judged(self.candidate, solved.keeping), self.fitter.expanded(solved.keeping))

    def run(self, best_s: float) -> Fitted | None:
        """Return the best plan that fits, or None. A plan that does not come near `best_s` is not followed further.

        Values wait on the host where nothing else fits: copies take part of a link that other devices may share.
        """
        if self.most is not None and _step_s(self.most) >= best_s:
            return None
        if self.most is not None and self.most.candidate.fits:
            return self.most
        along_each = self._best(self.problems, best_s)
        return self._best(self._with_host(), best_s) if along_each is None and best_s == inf else along_each

    def _with_host(self) -> Iterator[KeepingProblem]:
        """Yield the problems in which values may wait on the host."""
        if self.values and self.fitter.may_offload(self.candidate):
            yield from (self._problem(share, host) for host in HIDDEN_COPIES for share in _exposed(self.candidate)[:1])

    def _best(self, problems: Iterable[KeepingProblem], best_s: float) -> Fitted | None:
        fitted_plans, limit_bytes = list[Fitted](), self.fitter.solver.limit_bytes
        for problem in problems:
            if (fitted := self._along(problem, best_s)) is not None:
                fitted_plans.append(fitted)
                if fitted.mixed_s(limit_bytes) >= best_s:
                    break
        return min(fitted_plans, key=lambda f: (not f.candidate.fits, f.mixed_s(limit_bytes)), default=None)

    def _along(self, problem: KeepingProblem, best_s: float) -> Fitted | None:
        """Judge by the timeline what may fit, and the plan that keeps nothing only where its fit is in question.

        None also where a plan that keeps too much is no better than `best_s` already: plans that keep less are taken to
        be slower.
        """
        larger_kept, larger, fitted = problem.solve(0.0), self.most, None
        step_s = self.candidate.prediction.step_s
        best = problem.solve(_HIGHEST_PRICE * step_s / max(larger_kept.num_bytes, 1.0))
        if not self.candidate.fits and not (fitted := self.fitted(best)).candidate.fits:
            return None
        for _ in range(self.fitter.folded.effort.prices):
            if larger_kept.num_bytes <= best.num_bytes or best.seconds <= larger_kept.seconds:
                break
            price = (best.seconds - larger_kept.seconds) / (larger_kept.num_bytes - best.num_bytes)
            between = problem.solve(price)
            gained_s = best.seconds - between.seconds - price * (between.num_bytes - best.num_bytes)
            # a mixture is of whole blocks; with stages, the last blocks, which keep more in it, all lie in one stage
            grain_s = (best.seconds - larger_kept.seconds) / max(self.num_blocks, 1) / 2
            is_close = gained_s + grain_s < LITTLE * step_s and self.candidate.execution.schedule.num_stages == 1
            if is_close or between.keeping in (larger_kept.keeping, best.keeping):
                break
            if not self._may_fit(between):
                larger_kept, larger = between, None
                continue
            tried = self.fitted(between)
            if tried.candidate.fits:
                best, fitted = between, min(fitted or tried, tried, key=_step_s)
            elif _step_s(tried) >= best_s and (fitted is None or _step_s(fitted) >= best_s):
                return None
            else:
                larger_kept, larger = between, tried
            if fitted and larger and _step_s(fitted) - _step_s(larger) < LITTLE * step_s:
                break
        fitted, larger = fitted or self.fitted(best), larger or self.fitted(larger_kept)
        if not fitted.candidate.fits:
            return None
        return replace(fitted, larger=larger.own, larger_s=_step_s(larger), larger_bytes=_bytes(larger.candidate))


def _exposed(candidate: Candidate) -> Sequence[float]:
    """Return the shares of communication that count: the exposed one now; and all, as recomputation hides much."""
    p = candidate.prediction
    share = min(1.0, p.exposed_s / p.communication_s) if p.communication_s else 0.0
    return (share,) if p.communication_s < MUCH_SENT * p.step_s else (share, 1.0)


def by_block(fitter: Fitter, fitted: Fitted, whole: Candidate, best_s: float = inf) -> Iterator[Candidate]:
    """Yield the whole plan with as many of its last blocks as fit keeping more: backward needs those first.

    Each block takes about the same, so two or three tries find how many fit, and what further ones would gain.
    `best_s`: the step of another plan; a mixture that is slower with more blocks than fit is not tried with fewer.
    """
    if fitted.larger is None:
        return
    names, home, limit = blocks_of(whole.graph), _home(whole.graph), fitter.solver.limit_bytes
    fits, gained_s, (fewest, least), (most, largest) = 0, 0.0, (0, _bytes(whole)), (len(names) + 1, fitted.larger_bytes)
    for _ in range(MIXTURES):
        share = (limit - least) / (largest - least) if largest > least else 0.0
        number = min(int(fewest + share * (most - fewest)), most - 1)
        if number <= fits or (fits and (number - fits) / fits * gained_s < WORTH * whole.prediction.step_s):
            return
        mixed = fitted.own.mixed(fitted.larger, frozenset(names[-number:]), home)
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
    """Return the block that each parameter lies in, or ""."""
    return {leaf.name: module_block(str(leaf.attr("target"))) for leaf in graph.leaves("parameter")}
