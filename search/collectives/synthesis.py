"""Schedules for any network, better and better: exact where it is small, greedy, routed or packed where it is large.

What is compared is the simulated time for a size. Every schedule comes with the bound, so whoever waits knows how much
there still is to gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from time import monotonic

from shardwright.cost.collectives.simulation import simulate
from shardwright.pcg.collectives.bounds import Bound, least_latency_s, least_seconds_per_byte
from shardwright.pcg.collectives.collective import DUALS, Collective, collective
from shardwright.pcg.collectives.schedule import Schedule, all_reduce_of
from shardwright.pcg.collectives.topology import Topology
from shardwright.search.collectives.channels import rails
from shardwright.search.collectives.frontier import Walk, require_several
from shardwright.search.collectives.greedy import greedy
from shardwright.search.collectives.routes import routed
from shardwright.search.collectives.sketch import Sketch
from shardwright.search.collectives.splitting import may_split, over_relays, split
from shardwright.search.collectives.symmetry import fitting, symmetries
from shardwright.search.collectives.timing import backwards, on
from shardwright.search.collectives.trees import is_joined, two_way

PIECES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of chunks of a unit: more of them fill links better, and take longer to find."""
TREES = (1, 4, 16, 64, 256, 1024, 4096)
MOST_TRANSFERS = 600_000
SMALL_RANKS = 8
"""The most ranks of which exact schedules are asked for as well."""
QUESTION_S, EXACT = 2.0, 0.2
"""The most seconds of one question about them, and the share of the budget for all."""
ENOUGH = 0.002
"""The gap at which no better schedule is looked for."""

Make = Callable[[], Schedule]


@dataclass(frozen=True, slots=True)
class Synthesized:
    """A schedule, its simulated seconds, and those that none can beat: of the bound, or of latencies alone."""

    schedule: Schedule
    seconds: float
    bound: Bound
    bound_s: float

    @property
    def gap(self) -> float:
        """Return by how much it is slower than the bound, as a share of the bound."""
        return self.seconds / self.bound_s - 1 if self.bound_s else 0.0


def synthesize(
    topology: Topology,
    kind: str,
    num_bytes: float,
    *,
    root: int = 0,
    weights: Sequence[Fraction | int] | None = None,
    budget_s: float = 60.0,
    sketch: Sketch | None = None,
    exact: bool = True,
) -> Iterator[Synthesized]:
    """Yield schedules of a kind of collective for a size, each faster than the one before.

    `exact`: whether Z3 is asked for small networks as well; how long it takes is not known before. No new attempt
    begins after `budget_s`; the bound is that of the whole network, whatever a sketch leaves out.

    Raises:
        ScheduleError: a kind, root or weights that `collective` refuses, a sketch that does not fit, or a network of
            one rank.
    """
    require_several(topology)
    sketch, end = sketch or Sketch(), monotonic() + budget_s
    used = sketch.applied(topology)
    task = _Task(used, kind, num_bytes, root, weights, sketch, budget_s, exact)
    what = task.collective(1)
    bound, best = least_seconds_per_byte(topology, what), math.inf
    bound_s = max(float(bound.seconds_per_byte) * num_bytes, least_latency_s(topology, what))
    for make in task.attempts():
        if monotonic() > end and best < math.inf:
            return
        for schedule in make():
            schedule = schedule if used.links == topology.links else on(topology, schedule, used.path)
            seconds = simulate(schedule, topology, num_bytes).seconds
            if seconds < best:
                best = seconds
                yield Synthesized(schedule, seconds, bound, bound_s)
        if best <= bound_s * (1 + ENOUGH):
            return


@dataclass(frozen=True)
class _Task:
    topology: Topology
    kind: str
    num_bytes: float
    root: int
    weights: Sequence[Fraction | int] | None
    sketch: Sketch
    budget_s: float
    exact: bool

    def attempts(self) -> Iterator[Callable[[], Iterator[Schedule]]]:
        """Yield what can be tried, from the least effort on."""
        if self.kind in ("reduce_scatter", "reduce"):
            dual = replace(self, topology=self.topology.reversed(), kind=DUALS[self.kind])
            yield from (partial(_backwards, attempt, dual.topology, self.topology) for attempt in dual.attempts())
            return
        if self.exact and self.topology.num_ranks <= SMALL_RANKS and self.weights is None:
            yield self._exact
        numbers = sorted(self.sketch.pieces or PIECES)
        for pieces in numbers:
            if pieces == numbers[0] or self._num_transfers(pieces) <= MOST_TRANSFERS:
                yield partial(self._with_pieces, pieces)
        if self.kind in ("all_gather", "all_reduce") and self.weights is None and may_split(self.topology):
            for pieces in numbers:
                if pieces == numbers[0] or self._num_transfers(pieces) <= MOST_TRANSFERS:
                    yield partial(self._past_relays, pieces)
        if self.kind == "all_reduce" and is_joined(self.topology):
            for trees in TREES:
                if 2 * trees * self.topology.num_ranks <= MOST_TRANSFERS:
                    yield partial(self._with_trees, trees)

    def collective(self, pieces: int) -> Collective:
        return collective(self.kind, self.topology.num_ranks, pieces, root=self.root, weights=self.weights)

    def _num_transfers(self, pieces: int) -> int:
        phases = 2 if self.kind == "all_reduce" else 1
        return phases * pieces * sum(len(chunk.targets) for chunk in self._gather(1).chunks)

    def _gather(self, pieces: int) -> Collective:
        """Return the collective, of an all-reduce its all-gather."""
        if self.kind != "all_reduce":
            return self.collective(pieces)
        return collective("all_gather", self.topology.num_ranks, pieces)

    def _exact(self) -> Iterator[Schedule]:
        seconds = EXACT * self.budget_s
        walk = Walk(
            self.topology,
            self.kind,
            self.root,
            timeout_s=min(QUESTION_S, seconds),
            budget_s=seconds,
            offsets=self.sketch.symmetry,
        )
        return (point.schedule for point in walk.points())

    def _with_pieces(self, pieces: int) -> Iterator[Schedule]:
        what = self._gather(pieces)
        group = symmetries(self.topology, self.sketch.symmetry)
        if all(len(chunk.sources) == 1 and len(chunk.targets) <= 1 for chunk in what.chunks):
            yield routed(self.topology, what, self.num_bytes, group)
            return
        back = self.topology.reversed()
        for used in dict.fromkeys((None, rails(self.topology, fitting(what, group)))):
            gather = greedy(self.topology, what, self.num_bytes, group, channels=used)
            if self.kind == "all_reduce":
                other = gather if self.topology.is_two_way else greedy(back, what, self.num_bytes, group)
                yield all_reduce_of(backwards(other, back, self.topology), gather)
            else:
                yield gather

    def _past_relays(self, pieces: int) -> Iterator[Schedule]:
        if (parts := split(self.topology)) is None:
            return
        network, paths = parts
        direct = greedy(network, self._gather(pieces), self.num_bytes, symmetries(network))
        gather = over_relays(self.topology, paths, direct)
        if self.kind != "all_reduce":
            yield gather
        elif self.topology.is_two_way:
            yield all_reduce_of(backwards(gather, self.topology.reversed(), self.topology), gather)

    def _with_trees(self, trees: int) -> Iterator[Schedule]:
        yield two_way(self.topology, trees, self.num_bytes)


def _backwards(attempt: Callable[[], Iterator[Schedule]], back: Topology, topology: Topology) -> Iterator[Schedule]:
    return (backwards(schedule, back, topology) for schedule in attempt())
