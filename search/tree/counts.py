"""The numbers of microbatches that are tried on one space, in one way.

Fewer microbatches take less time, except that they leave less memory, so that layouts may have to be slower ones. So
the fewest that fit are looked for. The fewest of all are tried as well where one step down was slower; and while memory
makes the layouts slower, more are tried. Each next number is proposed by its floor, about which a step takes at least;
floors grow with the number of microbatches. The caller goes on with the likeliest of several ways, and with nothing
that cannot win (`Tuner.ways`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from shardwright.search.exact.solving import NEARLY, Candidate, rank

Proposals = Generator[float, bool, None]
"""Generators of seconds that the next count takes at least, about; it is tried if True is sent."""


class Counts:
    """The numbers of microbatches that are tried.

    Attributes:
        number: of the count that is the best by now; at first of one with which another mesh fitted, or 0.
        found: the plans that were tried, by the number of their count.
    """

    def __init__(
        self,
        counts: Sequence[int],
        tried: Callable[[int], Candidate],
        floor_s: Callable[[int], float],
        eased_s: Callable[[Candidate], float],
        crowding: Callable[[int], float],
        limit_bytes: float,
        number: int = 0,
        *,
        first: bool = False,
        unrivalled: bool = True,
    ) -> None:
        """`eased_s`: about what a plan would take with ample memory; more microbatches save no more than that.

        `crowding`: as `Solver.crowding`, of a count. `first`: the first count that fits is enough. `unrivalled`: no
        other plan fits, so that counts are tried even if they are likely not to fit.
        """
        self._first, self._crowding, self._unrivalled = first, crowding, unrivalled
        self.counts, self._tried, self._floor_s, self.limit_bytes = counts, tried, floor_s, limit_bytes
        self._eased_s = eased_s
        self.number = min(number, len(counts) - 1)
        self.found: dict[int, Candidate] = {}

    @property
    def newest(self) -> Candidate:
        """The plan that was tried last."""
        return next(reversed(self.found.values()))

    def proposals(self) -> Proposals:
        """Yield the floor of each count; for more than fit, first the step that they would take with ample memory.

        After the fewest, it goes on with `number`, or with half as many until one is tried.
        """
        if not (self._unrivalled or self._may_fit):
            return
        if not (yield from self._at(0)):  # the fewest, in which nothing is gathered or summed twice
            return
        if self._first and self.found[0].fits:
            return
        if not self.number and not self.found[0].fits:
            more = self._next(0)
            if more is None or not (yield from self._at(more)):  # then what fits cannot win
                return
            self.number = more
        while not (yield from self._at(self.number)):
            self.number //= 2
        if self.number:
            yield from self._up()
        if self._first:
            return
        if self.number:
            yield from self._down()
            self._take(0)
        yield from self._further()

    @property
    def _may_fit(self) -> bool:
        """Return whether the least that layouts keep may fit in the most microbatches, which each keep less."""
        return self._crowding(self.counts[0]) * self.counts[0] <= NEARLY * self.counts[-1]

    def _up(self) -> Proposals:
        """Go up to the fewest that fit."""
        while not self.found[self.number].fits and self.number + 1 < len(self.counts):
            more = self._next(self.number)
            if more is None or not (yield from self._at(more)):
                return
            self.number = more

    def _down(self) -> Proposals:
        while self.found[self.number].fits and self.number and self.number - 1 not in self.found:
            less = self.number - 1
            if not ((yield from self._at(less)) and self._take(less)):
                return

    def _further(self) -> Proposals:
        """Go on to more of them, while that is faster and memory costs enough."""
        found = self.found[self.number]
        for more in range(self.number + 1, len(self.counts)):
            if not (found.fits and found.is_tight and (yield self._eased_s(found))):
                return
            if not (yield from self._at(more)):
                return
            if rank(self.found[more]) >= rank(found):
                return
            found = self.found[more]

    def _take(self, number: int) -> bool:
        """Return whether this count is better than the best, and make it the best then."""
        is_better = rank(self.found[number]) < rank(self.found[self.number])
        self.number = number if is_better else self.number
        return is_better

    def _at(self, number: int) -> Generator[float, bool, bool]:
        """Propose a count unless it has been tried; return whether it has been tried by now."""
        if number not in self.found and (yield self._floor_s(self.counts[number])):
            self.found[number] = self._tried(self.counts[number])
        return number in self.found

    def _next(self, number: int) -> int | None:
        """Return the first count with which activations may fit that do not fit now; None where none can win so.

        Where everything else is too much, that is the last count, as layouts may differ there; it is left for when
        nothing else fits.
        """
        last, memory = len(self.counts) - 1, self.found[number].prediction.memory
        slack = memory.total_bytes / (memory.total_bytes - memory.slack_bytes)  # slack is the same share of every kind
        shrinks = slack * (memory.activations_bytes + memory.temporary_bytes)
        room = self.limit_bytes - memory.total_bytes + shrinks
        if room <= 0:
            return last if self._unrivalled and number < last else None
        least = 0.8 * shrinks / room * self.counts[number]
        return next((n for n in range(number + 1, last) if self.counts[n] >= least), last)
