"""In how many microbatches a step is run: the numbers that are tried on one space, in one way.

Fewer take less time but for one thing: less memory is left, and layouts may have to be slower ones. So the fewest that
fit are looked for; the fewest of all are tried also where a step down was slower; and while memory makes the layouts
slower, more of them. What cannot win is left out: a step takes about its floor at least, and floors grow with the
number of microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from shardwright.search.solving import Candidate, rank

_OVER = 0.9
"""The part of its floor that a step may take where no step of the space is known."""


class Counts:
    """Tries numbers of microbatches.

    Attributes:
        number: of the count that is the best by now, or to begin with.
        is_known: whether that one fits, or none does.
        over: the least part of its floor that a step of this space took, 1 where none took less: floors count what is
            shared for each that shares it. None: no step is known.
    """

    def __init__(
        self,
        counts: Sequence[int],
        tried: Callable[[int], Candidate],
        floor_s: Callable[[int], float],
        limit_bytes: float,
    ) -> None:
        self.counts, self._tried, self._floor_s, self.limit_bytes = counts, tried, floor_s, limit_bytes
        self.number, self.is_known = 0, False
        self.over: float | None = None
        self._found: dict[int, Candidate] = {}

    def fitting(self, rival_s: float, fastest_s: Callable[[], float]) -> Iterator[Candidate]:
        """From `number` to the fewest that fit, while they may take less than `rival_s`.

        `fastest_s`: what the fastest plan of all takes by now.
        """
        self.number = min(self.number, len(self.counts) - 1)
        while self.number and not self._can_win(self.number, rival_s):
            self.number //= 2
        yield from self._up(rival_s)
        yield from self._down()
        if 0 not in self._found and self._floor_s(self.counts[0]) < fastest_s():
            yield self._at(0)  # in which nothing is gathered or summed twice
            self._take(0)
        self.is_known = self._found[self.number].fits or self.number + 1 == len(self.counts)

    def further(self, rival_s: float) -> Iterator[Candidate]:
        """More of them, while that is faster."""
        found = self._found[self.number]
        for more in range(self.number + 1, len(self.counts)):
            rival_s = min(rival_s, found.prediction.step_s)
            if not (found.fits and found.is_tight and self._can_win(more, rival_s)):
                return
            if more not in self._found:
                yield self._at(more)
            if rank(self._found[more]) >= rank(found):
                return
            found = self._found[more]

    def _up(self, rival_s: float) -> Iterator[Candidate]:
        yield (found := self._at(self.number))
        while not found.fits and self.number + 1 < len(self.counts):
            if not self._can_win(more := self._next(found), rival_s):
                return
            self.number = more
            yield (found := self._at(more))

    def _down(self) -> Iterator[Candidate]:
        while self._found[self.number].fits and self.number and self.number - 1 not in self._found:
            yield self._at(less := self.number - 1)
            if not self._take(less):
                return

    def _take(self, number: int) -> bool:
        """Whether that is better, and then the best."""
        is_better = rank(self._found[number]) < rank(self._found[self.number])
        self.number = number if is_better else self.number
        return is_better

    def _at(self, number: int) -> Candidate:
        found = self._found[number] = self._tried(self.counts[number])
        floor_s = self._floor_s(self.counts[number])
        if 0 < floor_s < inf:
            self.over = min(self.over or 1.0, found.prediction.step_s / floor_s)
        return found

    def _can_win(self, number: int, rival_s: float) -> bool:
        """Whether it may take less time. A floor without end says that there is none for the longest lifetime."""
        if rival_s == inf:
            return True
        floor_s = self._floor_s(self.counts[number])
        return floor_s == inf or floor_s * (_OVER if self.over is None else self.over) < rival_s

    def _next(self, found: Candidate) -> int:
        """The number of the first count with which activations may fit that do not fit now."""
        memory = found.prediction.memory
        shrinks = memory.activations_bytes + memory.temporary_bytes
        room = self.limit_bytes - memory.total_bytes + shrinks
        factor = shrinks / room if room > 0 else inf
        least = 0.8 * factor * self.counts[self.number]
        further = range(self.number + 1, len(self.counts))
        return next((n for n in further if self.counts[n] >= least), len(self.counts) - 1)
