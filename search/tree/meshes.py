"""Plans without stages: every mesh, the numbers of microbatches and recomputations there, and roles of its axes.

More microbatches and more recomputation take less memory and more time. So each mesh begins with the fewest
microbatches that may leave room when all is kept, and when all is made again. What is kept is then decided value by
value, and the neighbours of the best plans are tried: other microbatches, layouts for the other kind of recomputation,
and the best plan's way on other meshes, and on its own with roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf

from shardwright.search.effort import (
    BEHIND,
    CROWDED,
    FLOORS,
    HIDDEN,
    LITTLE,
    MADE_AGAIN,
    MANY_DEVICES,
    MOST_NESTED,
    OTHER_LAYOUTS,
    PROMISING,
    SAVES,
    SLACK,
)
from shardwright.search.exact.solving import Candidate, rank
from shardwright.search.request.restrict import DATA, FREE, TENSOR, ZERO
from shardwright.search.request.spaces import Space
from shardwright.search.rewrites.rewriting import Rewriter
from shardwright.search.tree.attempts import Attempt, Neighbours, Queue
from shardwright.search.tree.fitting import Fitter, kept_s, may_keep_more
from shardwright.search.tree.ways import Way, Ways

_ROLES: dict[int, tuple[tuple[str, ...], ...]] = {
    1: ((ZERO,),), 2: ((ZERO, ZERO), (DATA, ZERO), (ZERO, DATA), (ZERO, TENSOR)),
}  # fmt: skip
"""The roles that the best mesh is tried with, by the number of axes."""


class Meshes(Queue):
    """A queue of ways without stages, on the given spaces."""

    reach = PROMISING

    def __init__(
        self, ways: Ways, fitter: Fitter | None, spaces: Sequence[Space], rewriter: Rewriter | None = None
    ) -> None:
        """`rewriter`: says what rewrites may gain; None: there are none."""
        super().__init__(ways, fitter)
        self.rewriter = rewriter
        self._to_begin.append(partial(self._begin_on, spaces))

    def _begin_on(self, spaces: Sequence[Space]) -> None:
        ways = self.ways
        hopeless = ways.effort.is_least and ways.nothing_fits
        able = [] if hopeless else [space for space in spaces if not ways.cannot_hold(space)]
        self.begin(able, spaces, list(dict.fromkeys((self.modes[0], self.modes[-1]))))

    def go_on_from(self, known: Iterable[Way]) -> None:
        """Propose ways that are solved already, such as those of plans by hand."""
        self._to_begin += [partial(self._propose_known, way) for way in known]

    def _propose_known(self, way: Way) -> None:
        self.propose(way, self.floor_s(way))

    @property
    def dimensions(self) -> Mapping[str, Neighbours]:
        return {
            "microbatches": self._microbatches, "recomputation": self._recomputation, "mesh": self._meshes,
            "roles": self._roles, "axes": self._axes,
        }  # fmt: skip

    def _least_s(self, attempt: Attempt) -> float:
        """Count what a plan that is rewritten or cut to three axes may take too, on a mesh where no plan was solved."""
        space = attempt.way.space
        least_s = attempt.about_s * min(FLOORS, self.ways.ratio_to_floor(space))
        is_new = space not in self._fits and (FREE in space.roles or not attempt.dimension)
        if not is_new or not self.fastest_s * (1 - LITTLE) <= least_s < inf:
            return least_s
        left = HIDDEN if FREE not in space.roles else 1 / BEHIND if self._finer(space) else 1.0
        if self.rewriter is not None:
            least = self.ways.least_layouts(attempt.way._replace(mode=self.modes[0]))
            left = min(left, 1 - self.rewriter.gain(*least))
        return least_s * left

    def floor_s(self, way: Way) -> float:
        """Return the floor with everything kept that may be, and a little for what there is no room for."""
        without_recompute = way._replace(mode=self.modes[0])
        crowding = self.ways.crowding(without_recompute) if len(self.ways.modes) > 1 else 0.0
        return self.ways.floor_s(without_recompute) * (1 + MADE_AGAIN * (1 - 1 / max(1.0, crowding)))

    def about_s(self, attempt: Attempt, floor_s: float) -> float:
        """Fewer microbatches save at most the difference of the floors; on another mesh, floors are no bounds."""
        if attempt.dimension in ("mesh", "roles"):
            is_near = floor_s < PROMISING * self.fastest_s < inf
            return min(floor_s, self.fastest_s * (1 - 2 * LITTLE)) if is_near else floor_s
        origin = None if attempt.origin is None else self.attempts[attempt.origin]
        if origin is None or origin.floor_s is None or attempt.way.many >= origin.way.many:
            return floor_s
        step_s = self.likely_s(origin)
        return floor_s if step_s == inf else step_s - max(0.0, origin.floor_s - floor_s)

    def plans(self, way: Way) -> list[Candidate]:
        """Return the plan of a way, also for layouts between the prices where examples do not divide evenly."""
        best = self.ways.solved(way)
        uneven = self.ways.pins.size % way.space.mesh.num_devices and self.fitter is not None
        if uneven and kept_s(best) <= OTHER_LAYOUTS * self.fastest_s:
            best = min(best, self.ways.between(way), key=rank)
        return [best]

    def is_followed(self, attempt: Attempt, dimension: str) -> bool:
        """Follow slow attempts whose floor is far below the best step: they may be slow for want of memory."""
        if dimension in ("microbatches", "recomputation") and SLACK * (attempt.floor_s or inf) < self.fastest_s:
            return True
        if dimension == "axes":
            return self.likely_s(attempt) <= BEHIND * self.fastest_s < inf
        return super().is_followed(attempt, dimension)

    def _microbatches(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        """Yield more microbatches, where memory is short, and fewer."""
        way, counts = attempt.way, self.ways.counts_on(attempt.way.space)
        number, floor_s, step_s = counts.index(way.many), attempt.floor_s or 0.0, self.likely_s(attempt)
        if step_s == inf:
            if self.fastest_s == inf and (many := self.fewest_fitting(attempt)) is not None:
                yield way._replace(many=many), floor_s
            return
        if not self.is_followed(attempt, "microbatches"):
            return
        if number + 1 < len(counts) and may_keep_more(attempt.best):
            yield way._replace(many=counts[number + 1]), floor_s
        if number:
            yield way._replace(many=counts[number - 1]), SAVES * floor_s

    def _recomputation(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        """Yield layouts for another kind of recomputation."""
        if self.is_followed(attempt, "recomputation") and may_keep_more(attempt.best):
            others = [attempt.way._replace(mode=mode) for mode in self.modes if mode != attempt.way.mode]
            yield from ((way, attempt.floor_s or 0.0) for way in others if self.ways.crowding(way) <= CROWDED)

    def _meshes(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        """Yield the way of the best plan on every other mesh."""
        if self._is_best(attempt):
            yield from self._like(attempt, self.ways.spaces)

    def _roles(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        """Yield the best mesh with roles: layouts of the least sum are not always those of the least step."""
        space = attempt.way.space
        if self._is_best(attempt) and set(space.roles) == {FREE}:
            yield from self._like(attempt, map(space.with_roles, _ROLES.get(len(space.mesh), ())))

    def _axes(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        """Yield the mesh of three axes that is cut from that of a likely plan, on many devices."""
        if sum(other.dimension == "axes" for other in self.attempts.values()) >= MOST_NESTED:
            return
        if self.is_followed(attempt, "axes") and (finer := self._finer(attempt.way.space)) is not None:
            yield from self._like(attempt, [finer])

    def _finer(self, space: Space) -> Space | None:
        """Return the mesh of three axes that is cut from one of two, where devices are many enough for that."""
        return self.ways.pins.nested.get(space.mesh.sizes) if space.mesh.num_devices >= MANY_DEVICES else None

    def _is_best(self, attempt: Attempt) -> bool:
        return self.likely_s(attempt) <= self.fastest_s < inf

    def _like(self, attempt: Attempt, spaces: Iterable[Space]) -> Iterator[tuple[Way, float]]:
        """Yield the way of an attempt on other spaces."""
        for space in spaces:
            if attempt.way.many in self.ways.counts_on(space):
                yield attempt.way._replace(space=space), SAVES * (attempt.floor_s or 0.0)
