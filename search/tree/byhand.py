"""The plans that people choose by hand: each strategy with the best of its degrees, microbatches and recomputation.

What they keep is not decided value by value. They are what other plans are compared with, and where the search begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from shardwright.search.effort import BEHIND, SAVES, UNTRIED
from shardwright.search.exact.solving import Candidate, rank
from shardwright.search.request.spaces import Space, baselines, sequence_baselines
from shardwright.search.tree.attempts import Attempt, Neighbours, Queue
from shardwright.search.tree.ways import Way, Ways


class Strategy(Queue):
    """A queue of the ways of one strategy: its degrees are the spaces."""

    def __init__(self, ways: Ways, spaces: Sequence[Space], rival_s: float = inf) -> None:
        """`rival_s`: the step of another plan, against which nothing more is tried once one of these is known."""
        super().__init__(ways)
        self.modes, self.rival_s = list(ways.modes), rival_s
        self._least_ratio = inf  # the least ratio of a step to its floor
        able = [space for space in spaces if not ways.cannot_hold(space)]
        self.begin(able, spaces, self.modes[:1] if ways.effort.is_least else self.modes)

    @property
    def best(self) -> Candidate | None:
        """The best plan, if any has layouts."""
        return min(self.bests(), key=rank, default=None)

    def _least_s(self, attempt: Attempt) -> float:
        return attempt.about_s * (UNTRIED if self._least_ratio == inf else (1 + max(1.0, self._least_ratio)) / 2)

    def plans(self, way: Way) -> Sequence[Candidate]:
        plan, floor_s = self.ways.solved(way), self.attempts[way].floor_s
        if plan.fits and floor_s:
            self._least_ratio = min(self._least_ratio, plan.prediction.step_s / floor_s)
        if min(c.prediction.step_s for c in (plan, *self.bests())) > BEHIND * self.rival_s:
            self.fastest_s = 0.0  # nothing of this kind comes near, whether or not it fits
        return [plan]

    def _count(self, steps_s: Sequence[float]) -> None:
        super()._count(steps_s)
        if steps_s:
            self.fastest_s = min(self.fastest_s, self.rival_s)

    def _loses(self, attempt: Attempt) -> bool:
        if self.ways.effort.is_least and self._fits:
            return not attempt.plans
        return super()._loses(attempt)

    def floor_s(self, way: Way) -> float:
        return self.ways.floor_s(way)

    @property
    def dimensions(self) -> Mapping[str, Neighbours]:
        return {"microbatches": self._microbatches}

    def _microbatches(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        """Yield more microbatches, where memory is short, and fewer, where these may fit."""
        way, counts, floor_s = attempt.way, self.ways.counts_on(attempt.way.space), attempt.floor_s or 0.0
        number, best = counts.index(way.many), attempt.best
        if not best.fits and (many := self.fewest_fitting(attempt)) is not None:
            yield way._replace(many=many), floor_s
        if best.fits and best.is_tight and number + 1 < len(counts):
            yield way._replace(many=counts[number + 1]), floor_s
        if number and best.fits:
            yield way._replace(many=counts[number - 1]), SAVES * floor_s

    def is_followed(self, attempt: Attempt, dimension: str) -> bool:
        return not attempt.best.fits or attempt.best.prediction.step_s <= self.fastest_s


def by_people(ways: Ways, *, able: bool = False) -> Iterator[Candidate]:
    """Yield the plans that people choose by hand.

    `able`: leave out those for which parameters, gradients and moments alone are too much. For the least effort they
    always are.
    """
    for spaces in baselines(ways.solver.cluster):
        if (able or ways.effort.is_least) and all(map(ways.cannot_hold, spaces)):
            continue
        yield from tuned(Strategy(ways, spaces))


def by_people_in_sequence(ways: Ways, fastest_s: float) -> Iterator[Candidate]:
    """Yield plans by hand that share the sequence; `fastest_s`: the step of the best plan by now."""
    for spaces in sequence_baselines(ways.solver.cluster, ways.folded.graph):
        yield from tuned(Strategy(ways, spaces, fastest_s))


def tuned(strategy: Strategy) -> Iterator[Candidate]:
    """Yield the best plan of a strategy, if it has any."""
    for _ in strategy.run():
        pass
    if strategy.best is not None:
        yield strategy.best
