"""The frontier of latency and bandwidth: for each number of steps the least rounds per chunk, until a bound is met.

A bound ends the walk, and spares most questions: a point that meets the bound of its number of steps is the best of any
number of chunks, without a search for better ones.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from time import monotonic

from shardwright.pcg.collectives.bounds import Bound, least_seconds_per_byte, least_steps
from shardwright.pcg.collectives.collective import DUALS, Collective, collective
from shardwright.pcg.collectives.schedule import Schedule, all_reduce_of
from shardwright.pcg.collectives.topology import Topology
from shardwright.pcg.errors import ScheduleError
from shardwright.search.collectives.exact import Answer, solve
from shardwright.search.collectives.paced import paced_bound
from shardwright.search.collectives.symmetry import Permutation, symmetries
from shardwright.search.collectives.timing import backwards

Weights = Sequence[Fraction | int] | None


@dataclass(frozen=True, slots=True)
class Point:
    """A schedule on the frontier.

    Attributes:
        pieces: the chunks of each unit of the collective, as of each rank's input in an all-gather.
        seconds_per_byte: its rounds, in seconds per byte of the whole.
        bound: what no schedule of any number of steps can beat.
        is_best: no schedule of as few steps has fewer rounds per chunk, with any number of chunks.
        is_best_of_pieces: none of at most `most_pieces` chunks has.
    """

    schedule: Schedule
    pieces: int
    seconds_per_byte: Fraction
    bound: Bound
    is_best: bool
    is_best_of_pieces: bool

    @property
    def steps(self) -> int:
        return self.schedule.num_steps

    @property
    def rounds(self) -> int:
        return sum(self.schedule.rounds)

    @property
    def meets_bound(self) -> bool:
        return self.seconds_per_byte == self.bound.seconds_per_byte

    @property
    def gap(self) -> float:
        """Return by how much it is slower than the bound, as a share of the bound."""
        return float(self.seconds_per_byte / self.bound.seconds_per_byte) - 1


@dataclass(frozen=True)
class Walk:
    """The range of a search: a kind of collective on a topology, and how far to look.

    Attributes:
        kind: a kind of collective, as `collective` knows them, with its `root` and `weights`.
        most_pieces: the largest number of chunks of a unit.
        most_steps: the most steps; by default three more than the least.
        timeout_s: seconds to build and ask Z3 one question; a question that is not answered in them is left open.
        budget_s: seconds for all questions; what is asked at their end is left open.
        offsets: symmetries to use, as `symmetries` takes them; by default those that are found.
    """

    topology: Topology
    kind: str
    root: int = 0
    weights: Weights = None
    most_pieces: int = 8
    most_steps: int | None = None
    timeout_s: float = 60.0
    budget_s: float = math.inf
    offsets: Sequence[tuple[int, int]] | None = None

    def points(self) -> Iterator[Point]:
        """Yield the points of the frontier, each with more steps and less time per byte than the one before.

        Raises:
            ScheduleError: a network of one rank.
        """
        require_several(self.topology)
        end = monotonic() + self.budget_s
        if self.kind == "all_reduce":
            yield from self._sums_and_copies(end)
        elif self.kind in ("reduce_scatter", "reduce"):
            dual = replace(self, topology=self.topology.reversed(), kind=DUALS[self.kind])
            for point in dual.points():
                yield replace(point, schedule=backwards(point.schedule, dual.topology, self.topology))
        else:
            yield from self._copies(end)

    def _copies(self, end: float) -> Iterator[Point]:
        whole = self._collective(1)
        bound, least = least_seconds_per_byte(self.topology, whole), least_steps(self.topology, whole)
        group, best = symmetries(self.topology, self.offsets), None
        for steps in range(max(1, least), 1 + (least + 3 if self.most_steps is None else self.most_steps)):
            if monotonic() > end:
                return
            paced = paced_bound(self.topology, whole, steps, end)
            if paced is None or (best is not None and paced.seconds_per_byte >= best):
                continue
            floor = max(paced, bound, key=lambda one: one.seconds_per_byte).seconds_per_byte
            is_proven = True
            for pieces, rounds in self._candidates(steps, floor, best):
                if monotonic() > end:
                    return
                answer = self._solve(pieces, steps, rounds, group, end)
                if answer.schedule is not None:
                    best = self._time(pieces, rounds)
                    yield Point(answer.schedule, pieces, best, bound, best == floor, is_proven)
                    break
                is_proven = is_proven and answer.is_proven
            if best == bound.seconds_per_byte:
                return

    def _candidates(self, steps: int, floor: Fraction, best: Fraction | None) -> Iterator[tuple[int, int]]:
        """Yield pieces and rounds that take at least `floor` and less than `best`, the least time first."""
        heap = list[tuple[Fraction, int, int]]()
        for pieces in range(1, self.most_pieces + 1):
            rounds = max(steps, math.ceil(floor / self._time(pieces, 1)))
            heapq.heappush(heap, (self._time(pieces, rounds), pieces, rounds))
        while heap and (best is None or heap[0][0] < best):
            _, pieces, rounds = heapq.heappop(heap)
            heapq.heappush(heap, (self._time(pieces, rounds + 1), pieces, rounds + 1))
            yield pieces, rounds

    def _sums_and_copies(self, end: float) -> Iterator[Point]:
        """Yield all-reduces: a reduce-scatter, and the all-gather of a point."""
        bound = least_seconds_per_byte(self.topology, collective("all_reduce", self.topology.num_ranks))
        back = self.topology.reversed()
        for point in replace(self, kind="all_gather")._copies(end):
            scatter = self._least_rounds(back, point, end)
            if scatter is not None:
                both = all_reduce_of(backwards(scatter, back, self.topology), point.schedule)
                time = sum(both.rounds) * both.collective.unit / self.topology.unit_rate
                met = time == bound.seconds_per_byte
                yield Point(both, point.pieces, time, bound, met, met)

    def _least_rounds(self, back: Topology, point: Point, end: float) -> Schedule | None:
        """Return an all-gather over the links turned around, with the chunks and steps of a point."""
        if self.topology.is_two_way:
            return point.schedule
        walk = replace(self, topology=back, kind="all_gather")
        rounds = range(point.rounds, 2 * point.rounds + 1)
        group = symmetries(back, self.offsets)
        answers = (walk._solve(point.pieces, point.steps, many, group, end) for many in rounds if monotonic() < end)
        return next((answer.schedule for answer in answers if answer.schedule), None)

    def _solve(self, pieces: int, steps: int, rounds: int, group: Sequence[Permutation], end: float) -> Answer:
        whole = self._collective(pieces)
        return solve(self.topology, whole, steps, rounds, timeout_s=self.timeout_s, group=group, end=end)

    def _time(self, pieces: int, rounds: int) -> Fraction:
        return rounds * self._collective(1).unit / pieces / self.topology.unit_rate

    def _collective(self, pieces: int) -> Collective:
        return collective(self.kind, self.topology.num_ranks, pieces, root=self.root, weights=self.weights)


def require_several(topology: Topology) -> None:
    """Refuse a network of one rank.

    Raises:
        ScheduleError: nothing is moved there.
    """
    if topology.num_ranks < 2:
        raise ScheduleError(f"{topology.name}: expected at least 2 ranks, got 1, where nothing is moved; add ranks")
