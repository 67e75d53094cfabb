"""The way from known plans to their neighbours, by the steps that these take once memory is used up.

While meshes are compared, a step recomputes nothing, attention or every block, as that is quickly judged. In the end
values are recomputed one by one, as far as memory asks for it (`search.tree.fitting`). Then other numbers of
microbatches may be the best, or layouts for another kind of recomputation, or another mesh. So the descent starts from
the best way of every promising mesh. It goes on to the next number of microbatches or another kind of recomputation
while the plan gets faster (coordinate descent). Plans by hand are among the starts, unless another plan cannot take the
place of what is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.exact.solving import Candidate, rank
from shardwright.search.request.asked import RecomputeMode
from shardwright.search.request.restrict import DATA, FREE, TENSOR, ZERO
from shardwright.search.request.spaces import Space, divided
from shardwright.search.tree.fitting import LITTLE, Fitted, Fitter, kept_s
from shardwright.search.tree.tuning import Tuner

_PROMISING = 1.1
"""The factor on the best step by now from which a plan starts no descent."""
_NEAR = 1.05
"""The factor on the best step by then from which a plan is not followed further."""
_MOST = 8
"""The most meshes beside that of the best plan that are tried with the best plan's way to run."""
_CROWDED = 3.0
"""The most times the room for values that kept ones may take, for layouts of their recomputation to be tried."""
_CLOSE = 1.02
"""The factor on the best step up to which a plan is tried with another kind of recomputation too."""


_ROLES: dict[int, tuple[tuple[str, ...], ...]] = {
    1: ((ZERO,),), 2: ((ZERO, ZERO), (DATA, ZERO), (ZERO, DATA), (ZERO, TENSOR)),
}  # fmt: skip
"""The roles that the best mesh is tried with, by the number of axes."""


class _Way(NamedTuple):
    """A space, the recomputation there, and the number of microbatches."""

    space: Space
    mode: RecomputeMode
    many: int


class Descent:
    """A descent from the plans that a tuner has found.

    Attributes:
        tried: the candidates that were solved on the way.
        best: the way of the best plan by now, with what it keeps decided.
        fastest_s: the step of that plan.
    """

    def __init__(self, tuner: Tuner, fitter: Fitter) -> None:
        self.tuner, self.fitter, self.fastest_s = tuner, fitter, inf
        self.best: _Way | None = None
        self.tried: list[Candidate] = []
        self._known: dict[_Way, Fitted | None] = {}
        self._modes = list(tuner.modes)
        del self._modes[1:-1]  # modes in between are found value by value

    def plans(self, spaces: Sequence[Space]) -> Iterator[Fitted]:
        """Yield the best plan of each way that comes near the best by then."""
        known = {_Way(*way): c for way, c in self.tuner.known.items() if way[0] in spaces and c.fits}
        begun = list[_Way]()
        for space in spaces:
            if own := [way for way in known if way.space == space]:
                begun.append(min(own, key=lambda way: rank(known[way])))
        for way in sorted(begun, key=lambda way: kept_s(known[way])):
            yield from self._judged(way)
        begun.sort(key=self._step_s)
        yield from self._down(begun[0])
        near = [way.space for way in begun[1:] if self._step_s(way) <= _PROMISING * self.fastest_s]
        free = [space for space in self.tuner.spaces if space not in (begun[0].space, *near)]
        for space in [*near, *free][:_MOST]:
            yield from self._beside_the_best(space)
        if self.best is not None:
            for space in _narrower(self.best.space):
                yield from self._beside_the_best(space)

    def _beside_the_best(self, space: Space) -> Iterator[Fitted]:
        """Yield plans on another mesh, run as the best plan by now is, and on from there if that is promising."""
        if self.best is None:
            return
        like = self.best._replace(space=space)
        if like.many in self._counts(space) and self._floor_s(like) < _PROMISING * self.fastest_s:  # no bound
            yield from self._judged(like)
        way = min((way for way in self._known if way.space == space), key=self._step_s, default=None)
        if way is not None and self._step_s(way) <= _NEAR * self.fastest_s:
            yield from self._down(way)

    def _counts(self, space: Space) -> list[int]:
        return divided(space, self.tuner.counts, self.tuner.pins.size)

    def _down(self, way: _Way) -> Iterator[Fitted]:
        """Yield the plans met on going from a way to better ones beside it."""
        while True:
            before = way
            for beside, least_s in self._beside(way):
                if beside not in self._known and least_s < self.fastest_s * (1 - LITTLE):
                    yield from self._judged(beside)
                    way = min(way, beside, key=self._step_s)
                    if way is beside and way.mode == before.mode:
                        break
            if self._step_s(way) >= self._step_s(before) * (1 - LITTLE):
                return

    def _beside(self, way: _Way) -> Iterator[tuple[_Way, float]]:
        """Yield the ways beside a way, each with about the least time that it takes.

        They are more microbatches, which take less time only because less is recomputed; fewer, which save at most the
        difference of the floors; and another kind of recomputation, with the layouts that are the best for it.
        """
        counts, step_s = self._counts(way.space), self._step_s(way)
        number, floor_s = counts.index(way.many), self._floor_s(way)
        for other in (number + 1, number - 1):
            if 0 <= other < len(counts):
                beside = way._replace(many=counts[other])
                own_s = self._floor_s(beside)
                yield beside, max(own_s, step_s - max(0.0, floor_s - own_s) if other < number else 0.0)
        if step_s <= _CLOSE * self.fastest_s:
            others = [way._replace(mode=mode) for mode in self._modes if mode != way.mode]
            yield from ((other, floor_s) for other in others if self.tuner.crowding(*other) <= _CROWDED)

    def _floor_s(self, way: _Way) -> float:
        """Return the floor of a way with everything kept that may be."""
        return self.tuner.floor_s(way.space, self._modes[0], way.many)

    def _judged(self, way: _Way) -> Iterator[Fitted]:
        """Yield the plan of a way with what it should keep, if it comes near the best by now."""
        if way in self._known:
            return
        self._known[way] = None
        is_new = way not in self.tuner.known
        try:
            found = self.tuner.tried_with(*way)
        except NoLayoutsError:
            return
        if is_new:
            self.tried.append(found)
        if kept_s(found) >= (most_s := _PROMISING * self.fastest_s) or self.fitter.is_far(found):
            return
        self._known[way] = fitted = self.fitter.fitted(found, most_s)
        if fitted is not None and (step_s := self._step_s(way)) < most_s:
            if step_s < self.fastest_s:
                self.fastest_s, self.best = step_s, way
            yield fitted

    def _step_s(self, way: _Way) -> float:
        fitted = self._known.get(way)
        if fitted is None or not fitted.candidate.fits:
            return inf
        return fitted.mixed_s(self.fitter.solver.limit_bytes)


def _narrower(space: Space) -> Iterator[Space]:
    """Yield the same mesh with roles of its axes: layouts of the least sum are not always those of the least step."""
    for roles in _ROLES.get(len(space.mesh), ()) if set(space.roles) == {FREE} else ():
        yield space._replace(name=f"{space.name}, {' x '.join(roles)}", roles=roles)
