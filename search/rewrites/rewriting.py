"""Rewrites and layouts, decided together: plans of several meshes are judged with the rewrites that pay there.

On each mesh rewrites are found for the layouts of a plan, then layouts for the rewritten graph, and so on until neither
makes the plan faster (block coordinate descent). Blocks that are folded are rewritten alike. A mesh is left out where
its plan is slower by more than rewrites can gain. Two figures say what they can gain: what the plan loses now at
operators that they could free, and what they have gained on other meshes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.again import made_again_of_part
from shardwright.pcg.step.asked import still_there
from shardwright.pcg.step.operations import Operations
from shardwright.search.choices.problem import Problem, RunFacts, Solution
from shardwright.search.exact.folding import Folded, Tie, fold
from shardwright.search.exact.solving import Candidate, Solver, limited_to, restriction
from shardwright.search.plan import Rewrite
from shardwright.search.request.restrict import keeps_rings
from shardwright.search.rewrites.leaves import LeafSearch, Leaves, Rewritten
from shardwright.search.rewrites.promise import Promise, flat
from shardwright.search.rewrites.replay import degrees, replay
from shardwright.search.rewrites.splits import transplanted
from shardwright.substitutions.equations import Equation

_ROUNDS = 3
_LIKELY, _AGAIN = 0.01, 1.25
"""The share of a step that rewrites may gain: at least the first, or the second times the gain on other meshes."""


class Rewriter:
    """A rewriter of plans of one model by certified rules."""

    def __init__(self, solver: Solver, graph: Graph, folded: Folded, rules: Mapping[str, Equation]) -> None:
        self.solver, self.graph, self.folded, self.rules = solver, graph, folded, rules
        self._promises: dict[Mesh, Promise] = {}

    @cached_property
    def leaves(self) -> Leaves:
        return Leaves(self.folded, list(self.rules.values()))

    @property
    def places(self) -> Counter[str]:
        """The places that `Leaves.places` counts."""
        return self.leaves.places if self.rules else Counter()

    def best(self, candidates: Iterable[Candidate], estimates: Mapping[int, float]) -> Iterator[Candidate]:
        """Yield faster plans of the same meshes with rewrites, those of the fastest meshes first.

        `estimates`: by the `id` of a candidate, its step if it kept what fits, where that is known.
        """
        if not self.rules:
            return
        best, likely, tried = inf, _LIKELY, set[object]()
        known = [(estimates.get(id(c), c.prediction.step_s if c.fits else inf), c) for c in candidates]
        judged = [(step_s - self._lost_s(*c.solved[:2]), step_s, c) for step_s, c in known if step_s < inf]
        for least_s, step_s, candidate in sorted(judged, key=lambda entry: entry[:2]):
            if least_s * (1 - likely) > best:
                return
            way = candidate.mesh.sizes, candidate.mesh.num_microbatches, candidate.roles, candidate.execution
            if way in tried:
                continue
            tried.add(way)
            faster, gained = self.rewritten(candidate, step_s - best), 0.0
            if faster is not None:
                gained = 1 - faster.prediction.step_s / candidate.prediction.step_s
                yield faster
            likely = max(likely, _AGAIN * gained)
            best = min(best, step_s * (1 - gained))

    def rewritten(self, candidate: Candidate, needed_s: float = 0.0) -> Candidate | None:
        """Return a better plan on the same mesh, run in the same way, with leaves rewritten; None where none is found.

        `needed_s`: the seconds that have to be gained, about.
        """
        best, search = candidate, self._search(candidate)
        for _ in range(_ROUNDS):
            problem, solution, prices = best.solved
            if not candidate.fits:  # the fitter decides later what is kept
                prices = prices._replace(byte=0.0)
            improved = search.improve(problem, solution, prices)
            leaf_rewrites = [leaf for leaf in improved if keeps_rings(leaf.part.graph, leaf.graph, candidate.roles)]
            rewrites = tuple(self.in_all_blocks(leaf_rewrites))
            if not rewrites or rewrites == best.rewrites or sum(leaf.gain for leaf in leaf_rewrites) < needed_s:
                break
            new = self._solved(candidate, leaf_rewrites, rewrites)
            if new is None or not _is_better(new, best):
                break
            best = new
        return best if best is not candidate else None

    def gain(self, problem: Problem, solution: Solution) -> float:
        """Return the share of a sum that rewrites may save, as far as that is known before any is tried."""
        if not self.rules or not solution.objective:
            return 0.0
        return min(1.0, _LIKELY + self._lost_s(problem, solution) / solution.objective)

    def _lost_s(self, problem: Problem, solution: Solution) -> float:
        """Return the seconds lost at operators that rewrites could free: by moves to and from them, and uneven work."""
        choices, (stuck, inside) = solution.choices, self.leaves.stuck(degrees(problem.mesh))
        read = {name for operator in stuck for name in problem.graph.by_name[operator].inputs}
        near = {v for (kind, name), v in problem.index.items() if name in stuck or (kind == "hub" and name in read)}
        moved = (
            float(table.value[choices[i], choices[j]])
            for (i, j), table in problem.edges.items()
            if (i in near or j in near) and (i, j) not in problem.overlapped
        )
        times = ((problem.time_s[v].value, choices[v]) for (_, name), v in problem.index.items() if name in inside)
        return sum(moved) + sum(float(time_s[choice] - time_s.min()) for time_s, choice in times)

    def _search(self, candidate: Candidate) -> LeafSearch:
        c = candidate
        return LeafSearch(
            *self.solver.builder(c.mesh, c.execution),
            self.leaves,
            self._promise(c),
            lambda part: restriction(part, c.roles, c.mesh),
            lambda part: RunFacts(made_again_of_part(part, c.execution), c.priced, c.execution),
            lambda part: limited_to(c.limits, part, c.mesh),
        )

    def _promise(self, candidate: Candidate) -> Promise:
        mesh = flat(candidate.mesh)
        if mesh not in self._promises:
            self._promises[mesh] = Promise(self.solver.builder(mesh, candidate.execution)[0])
        return self._promises[mesh]

    def _solved(
        self, candidate: Candidate, improved: Sequence[Rewritten], rewrites: tuple[Rewrite, ...]
    ) -> Candidate | None:
        """Return the plan of the rewritten graph; None where it lacks what is to be made again, such as attention."""
        c, folded, prices = candidate, applied(self.folded, improved), candidate.solved[2]
        execution = still_there(folded.graph, Operations(folded.graph).listed, c.execution)
        try:
            new = self.solver.solve(
                folded,
                c.mesh,
                c.roles,
                c.name,
                execution,
                (c.lifetimes,),
                c.priced,
                weight=prices.overlap_weight,
                limits=c.limits,
                near=prices.byte,
            )
        except PlanError:
            return None
        return replace(new, rewrites=rewrites)

    def in_all_blocks(self, improved: Iterable[Rewritten]) -> Iterator[Rewrite]:
        """Yield the rewrites of the whole graph, from those of the folded one."""
        for leaf in improved:
            where = self.folded.home.get(next(iter(leaf.part.operators)), "")
            for names in self.folded.copies.get(where, ({},)):
                called = {**self.folded.last, **names}
                start, end = (" ".join(called.get(x, x) for x in side) for side in (leaf.part.starts, leaf.part.ends))
                yield Rewrite(start, end, leaf.steps)

    def whole(self, candidate: Candidate) -> Graph:
        """Return the serial graph of all blocks that a candidate is a plan of."""
        return replay(self.graph, candidate.rewrites, self.rules, candidate.mesh) if candidate.rewrites else self.graph

    def again_whole(self, candidate: Candidate, *, judged: bool = True) -> Candidate:
        """Return `Solver.again_whole` of a candidate, for the graph with its rewrites."""
        whole = self.whole(candidate)
        folded = fold(whole) if candidate.rewrites else self.folded
        return replace(self.solver.again_whole(whole, folded, candidate, judged=judged), rewrites=candidate.rewrites)


def _is_better(new: Candidate, old: Candidate) -> bool:
    """Return whether a plan is better; of two that do not fit, the faster is: what they keep is decided later."""
    if new.fits == old.fits:
        return new.prediction.step_s < old.prediction.step_s
    return new.fits


def applied(folded: Folded, improved: Sequence[Rewritten]) -> Folded:
    """Return a folded graph with leaves rewritten; each of them lies in one block or in none."""
    graph, instead, added = transplanted(folded.graph, [(leaf.part, leaf.graph) for leaf in improved])
    home = {name: where for name, where in folded.home.items() if name in graph.by_name}
    for leaf, operators in zip(improved, added, strict=True):
        if where := folded.home.get(next(iter(leaf.part.operators))):
            home |= dict.fromkeys(operators, where)
    ties = tuple(Tie(instead.get(a, a), instead.get(b, b), times) for a, b, times in folded.ties)
    return replace(folded, graph=graph.validate(), ties=ties, home=home)
