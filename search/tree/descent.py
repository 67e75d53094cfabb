"""From plans that are known to those beside them, by what these take once memory is used up.

While meshes are compared, a step makes nothing, attention or every block again, as that is quickly judged. In the end
values are made again one by one, as far as memory asks for it (`search.tree.fitting`), and then other numbers of
microbatches are the best, layouts for another kind of recomputation, and another mesh. So from the best way of every
promising mesh it goes on to the next number of microbatches or another kind of recomputation, while what comes of it
is faster (coordinate descent). Plans by hand are among the beginnings, but where another one cannot take the place of
what is found.
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
"""From what takes so many times the best plan by now, nothing is begun."""
_NEAR = 1.05
"""From what takes so many times the best plan by then, nothing goes on."""
_MOST = 8
"""So many meshes beside that of the best plan are tried as that is run."""
_CROWDED = 3.0
"""Where all that is to be kept takes so many times the room that there is, layouts for it are not tried."""
_CLOSE = 1.02
"""What takes so many times the best plan is tried with another kind of recomputation too."""


_ROLES: dict[int, tuple[tuple[str, ...], ...]] = {
    1: ((ZERO,),), 2: ((ZERO, ZERO), (DATA, ZERO), (ZERO, DATA), (ZERO, TENSOR)),
}  # fmt: skip
"""By the number of axes, roles that the best mesh is tried with."""


class _Way(NamedTuple):
    """A space, what is made again there, and the number of microbatches."""

    space: Space
    mode: RecomputeMode
    many: int


class Descent:
    """Improves what a tuner has found.

    Attributes:
        tried: what was solved on the way.
        best: the way of the best plan by now, with what it keeps decided.
        fastest_s: the step of that.
    """

    def __init__(self, tuner: Tuner, fitter: Fitter) -> None:
        self.tuner, self.fitter, self.fastest_s = tuner, fitter, inf
        self.best: _Way | None = None
        self.tried: list[Candidate] = []
        self._known: dict[_Way, Fitted | None] = {}
        self._modes = list(tuner.modes)
        del self._modes[1:-1]  # what lies between is found value by value

    def plans(self, spaces: Sequence[Space]) -> Iterator[Fitted]:
        """The best plan of each way that comes near the best by then."""
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
        """On another mesh than that of the best plan by now, run as that is; and from there, if it is promising."""
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
        """From a way to better ones beside it."""
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
        """What is beside a way, with about what it takes at least.

        More microbatches, which take less only because less is made again; fewer, which save no more than what their
        floor is less; and another kind of recomputation, for layouts as they are the best for it.
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
        """With everything kept that may be."""
        return self.tuner.floor_s(way.space, self._modes[0], way.many)

    def _judged(self, way: _Way) -> Iterator[Fitted]:
        """The plan of a way with what it should keep, if it comes near the best by now."""
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
    """The same mesh whose axes keep to roles: layouts of the least sum are not always those of the least step."""
    for roles in _ROLES.get(len(space.mesh), ()) if set(space.roles) == {FREE} else ():
        yield space._replace(name=f"{space.name}, {' x '.join(roles)}", roles=roles)
