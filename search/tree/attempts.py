"""One queue of attempts, the likeliest first.

An attempt is a way to run the graph with what is known of it. At first that is about the least that its step takes,
then its floor, then its layouts, in the end what it keeps. Each refinement gives a better estimate, by which the
attempt is queued anew. An attempt that is known well enough names its neighbours along the dimensions of its queue,
with about the least that each of them takes. The queue ends where nothing that is left can beat the best plan by now.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.effort import CLOSE, LITTLE, NEAR, PROMISING, SHRINKS
from shardwright.search.exact.solving import Candidate, rank
from shardwright.search.request.asked import RecomputeMode
from shardwright.search.request.spaces import Space
from shardwright.search.tree.fitting import Fitted, Fitter, kept_s
from shardwright.search.tree.ways import Way, Ways


@dataclass(frozen=True)
class Attempt:
    """A way to run the graph, and what is known of it.

    Attributes:
        about_s: about the least that its step takes.
        dimension: along which it was reached, "" where it is where a search begins.
        origin: the attempt that named it.
        floor_s: an estimate of the least step with any memory; None while it is not known.
        plans: its layouts, in each order of stages in which they are run.
        fitted: its plans with what they should keep.
        is_judged: whether nothing is left to find out.
    """

    way: Way
    about_s: float
    dimension: str = ""
    origin: Way | None = None
    floor_s: float | None = None
    plans: tuple[Candidate, ...] = ()
    fitted: tuple[Fitted, ...] = ()
    is_judged: bool = False

    @property
    def best(self) -> Candidate:
        """The best of its plans, before it is decided what they keep."""
        return min(self.plans, key=rank)

    def step_s(self, limit_bytes: int) -> float:
        """Return the step of its best plan that fits, about, or inf."""
        known_s = [f.mixed_s(limit_bytes) for f in self.fitted if f.candidate.fits]
        return min(known_s + [c.prediction.step_s for c in self.plans if c.fits], default=inf)


Neighbours = Callable[[Attempt], Iterator[tuple[Way, float]]]
"""A dimension: the ways beside an attempt, each with about the least that it takes."""


class Queue(ABC):
    """Attempts of one kind, the least estimate first.

    Attributes:
        attempts: all that were proposed, by their way.
        fastest_s: the step of the best plan by now, about.
        left: the number of attempts that might have won, where the queue was cut short.
    """

    reach = 1.0
    """The factor on the best step up to which an attempt has it decided what it keeps."""

    def __init__(self, ways: Ways, fitter: Fitter | None = None, fastest_s: float = inf) -> None:
        """`fitter`: decides what plans keep; None: nothing is decided. `fastest_s`: the step of a known plan."""
        self.ways, self.fitter, self.fastest_s = ways, fitter, fastest_s
        self.limit_bytes = ways.solver.limit_bytes
        self.attempts: dict[Way, Attempt] = {}
        self._to_begin: list[Callable[[], None]] = []  # what proposes the ways to begin with, once the queue runs
        self._ahead: list[tuple[float, int, Way]] = []
        self._numbers = count()
        self._walks = 0
        self._fits: dict[Space, int] = {}  # the number of plans that fit
        self.modes = list(ways.modes)
        del self.modes[1:-1]  # kinds in between are found value by value

    @property
    @abstractmethod
    def dimensions(self) -> Mapping[str, Neighbours]:
        """The dimensions along which attempts have neighbours."""

    @property
    def left(self) -> int:
        """The number of attempts that may still win."""
        return sum(not self._loses(self.attempts[way]) for *_, way in self._ahead)

    @property
    def solved(self) -> list[Attempt]:
        """The attempts that have layouts."""
        return [attempt for attempt in self.attempts.values() if attempt.plans]

    @property
    def fits(self) -> list[Fitted]:
        """All plans of which it was decided what they keep."""
        return [fitted for attempt in self.attempts.values() for fitted in attempt.fitted]

    def bests(self, spaces: Collection[Space] = ()) -> list[Candidate]:
        """Return the best plan of each space, or of each of these spaces."""
        return self.bests_by(lambda way: way.space, [a for a in self.solved if not spaces or a.way.space in spaces])

    def bests_by(self, kind: Callable[[Way], object], among: Sequence[Attempt] | None = None) -> list[Candidate]:
        """Return the best plan of each kind of ways."""
        by_kind = dict[object, list[Candidate]]()
        for attempt in self.solved if among is None else among:
            by_kind.setdefault(kind(attempt.way), []).append(attempt.best)
        return [min(plans, key=rank) for plans in by_kind.values()]

    def propose(self, way: Way, about_s: float, dimension: str = "", origin: Way | None = None) -> None:
        """Queue a way that is new."""
        if way not in self.attempts:
            self._push(Attempt(way, about_s, dimension, origin))

    def _push(self, attempt: Attempt) -> None:
        self.attempts[attempt.way] = attempt
        heappush(self._ahead, (attempt.about_s, next(self._numbers), attempt.way))

    def run(self) -> Iterator[Attempt]:
        """Yield attempts once they are solved, and once they are judged."""
        while self._to_begin:
            self._to_begin.pop(0)()
        while self._ahead:
            attempt = self.attempts[heappop(self._ahead)[-1]]
            if self._loses(attempt):
                continue
            try:
                attempt = self._refined(attempt)
            except NoLayoutsError as error:
                self.ways.refused = error
                continue
            if not attempt.is_judged:
                self._push(attempt)
            else:
                self.attempts[attempt.way] = attempt
                self._propose_beside(attempt)
            if attempt.plans:
                yield attempt

    def _loses(self, attempt: Attempt) -> bool:
        """Return whether an attempt cannot win, or is one more than the effort allows."""
        if attempt.plans:
            return False  # it may still have neighbours
        space, effort = attempt.way.space, self.ways.effort
        if self._fits.get(space, 0) >= effort.fits:
            return True
        if len(self._fits) >= effort.meshes and space not in self._fits:
            return True
        if inf > self._least_s(attempt) >= self.fastest_s * (1 - LITTLE):  # else other lifetimes may have layouts
            return True
        return attempt.origin is not None and not self.is_followed(self.attempts[attempt.origin], attempt.dimension)

    def is_followed(self, attempt: Attempt, dimension: str) -> bool:
        """Return whether an attempt still comes so near the best one that neighbours along a dimension are tried."""
        near = NEAR if dimension == "microbatches" else CLOSE
        return self.likely_s(attempt) <= near * self.fastest_s

    def likely_s(self, attempt: Attempt) -> float:
        """Return the step of an attempt once it is judged, and what it may be before that."""
        return attempt.step_s(self.limit_bytes)

    def _least_s(self, attempt: Attempt) -> float:
        """Return about the least that an attempt takes, by how steps of its kind compare with floors."""
        return attempt.about_s * self.ways.ratio_to_floor(attempt.way.space)

    def _refined(self, attempt: Attempt) -> Attempt:
        """Return the attempt with its floor, its layouts or what it keeps: what is not known yet."""
        way = attempt.way
        if attempt.floor_s is None:
            floor_s = self.floor_s(way)
            return replace(attempt, floor_s=floor_s, about_s=max(floor_s, self.about_s(attempt, floor_s)))
        if not attempt.plans:
            plans = tuple(self.plans(way))
            self._fits[way.space] = self._fits.get(way.space, 0) + any(c.fits for c in plans)
            self.ways.report(min(plans, key=rank))
            self._count([c.prediction.step_s for c in plans if c.fits])
            return replace(attempt, plans=plans, about_s=min(map(kept_s, plans)))
        if attempt.about_s <= self.reach * self.fastest_s and self.fitter is not None and self._walks < self.most_walks:
            attempt = self.judged(attempt, self.fitter)
            self._walks += bool(attempt.fitted)
            self._count([f.mixed_s(self.limit_bytes) for f in attempt.fitted if f.candidate.fits])
        return replace(attempt, is_judged=True)

    @property
    def most_walks(self) -> int:
        """The most attempts of which it is decided what they keep."""
        return self.ways.effort.walks

    def _count(self, steps_s: Sequence[float]) -> None:
        self.fastest_s = min([self.fastest_s, *steps_s])

    def floor_s(self, way: Way) -> float:
        """Return about the least step of a way, with everything kept that may be."""
        return self.ways.floor_s(way._replace(mode=self.modes[0]))

    def about_s(self, attempt: Attempt, floor_s: float) -> float:
        """Return about the least that an attempt takes, once its floor is known."""
        return floor_s

    def plans(self, way: Way) -> Sequence[Candidate]:
        """Return the layouts of a way. Raises `NoLayoutsError` where it has none."""
        return [self.ways.solved(way)]

    def judged(self, attempt: Attempt, fitter: Fitter) -> Attempt:
        """Return the attempt with what its plans should keep."""
        fitted = fitter.fitted(attempt.best, PROMISING * self.fastest_s)
        return attempt if fitted is None else replace(attempt, fitted=(fitted,))

    def _propose_beside(self, attempt: Attempt) -> None:
        for name, neighbours in self.dimensions.items():
            for way, about_s in neighbours(attempt):
                self.propose(way, about_s, name, attempt.way)

    def begin(self, able: Sequence[Space], spaces: Sequence[Space], modes: Sequence[RecomputeMode]) -> None:
        """Propose where each space begins: with the fewest microbatches that have room, for each kind until all have.

        `able`: the spaces that can hold what is always there. Where there are none, one of all `spaces` is proposed.
        """
        for space in able:
            for way in self._first(space, modes):
                self.propose(way, self.floor_s(way))
        if not able and spaces:
            space = min(spaces, key=self.ways.excess_bytes)
            self.propose(Way(space, self.modes[-1], self.ways.counts_on(space)[-1]), 0.0)

    def _first(self, space: Space, modes: Sequence[RecomputeMode]) -> Iterator[Way]:
        """Yield, for each kind of recomputation until one has room in the fewest microbatches, the fewest with room."""
        counts = self.ways.counts_on(space)
        for mode in modes:
            many = self.fewest_roomy(space, mode, counts)
            if many is not None or mode == modes[-1]:
                yield Way(space, mode, many or counts[-1])
            if many == counts[0]:
                return

    def fewest_roomy(self, space: Space, mode: RecomputeMode, counts: Sequence[int]) -> int | None:
        """Return the first number of microbatches with which what is kept may fit; None: none of them.

        What a microbatch keeps is taken to be in proportion to its examples.
        """
        needed = self.ways.crowding(Way(space, mode, counts[0])) * counts[0]
        return next((many for many in counts if many >= needed), None)

    def fewest_fitting(self, attempt: Attempt) -> int | None:
        """Return the first larger number of microbatches with which activations may fit that do not fit now.

        Where everything else is too much, that is the last number, as layouts may differ there. None: there is none.
        """
        counts, memory = self.ways.counts_on(attempt.way.space), attempt.best.prediction.memory
        larger = [many for many in counts if many > attempt.way.many]
        slack = memory.total_bytes / (memory.total_bytes - memory.slack_bytes)  # the same share of every kind
        shrinks = slack * (memory.activations_bytes + memory.temporary_bytes)
        room = self.limit_bytes - memory.total_bytes + shrinks
        least = SHRINKS * shrinks / room * attempt.way.many if room > 0 else inf
        return next((many for many in larger if many >= least), larger[-1] if larger else None)
