"""Collectives run message by message on a few devices, to hold closed forms against.

Devices have part of a tensor each; a message carries pieces with the set of devices whose summands they hold. A round
ends when all its messages have arrived, so time is Σ over rounds of the slowest message's hop plus bytes / bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction

Message = tuple[int, int, tuple[int, ...]]
"""Source, target, and the indices of the pieces that go."""
Held = list[dict[int, frozenset[int]]]
"""By device: piece -> whose summands it holds."""


@dataclass
class Network:
    """n devices, a tensor of n pieces; `level_of(a, b)` is the index of the level that two devices meet at."""

    n: int
    level_of: Callable[[int, int], int]
    held: Held
    rounds: list[int] = field(default_factory=list[int])
    sent: dict[tuple[int, int], Fraction] = field(default_factory=dict[tuple[int, int], Fraction])

    def round(self, messages: Iterable[Message], reduce: bool) -> None:
        """One round: pieces are added to what the target holds (`reduce`) or take its place."""
        arriving = [(source, target, {p: self.held[source][p] for p in pieces}) for source, target, pieces in messages]
        self.rounds.append(max(self.level_of(source, target) for source, target, _ in arriving))
        for source, target, pieces in arriving:
            key = source, self.level_of(source, target)
            self.sent[key] = self.sent.get(key, Fraction(0)) + Fraction(len(pieces), self.n)
            for piece, summands in pieces.items():
                before = self.held[target].get(piece, frozenset())
                assert not (reduce and before & summands), "a summand is added twice"
                self.held[target][piece] = before | summands if reduce else summands

    def most_sent(self, level: int) -> Fraction:
        """The share of the tensor that the busiest device sends over a level."""
        return max((share for (_, at), share in self.sent.items() if at == level), default=Fraction(0))

    def rounds_at(self, level: int) -> int:
        return self.rounds.count(level)


def summands(n: int, level_of: Callable[[int, int], int] = lambda a, b: 0) -> Network:
    """Before an all-reduce: every device holds its own summand of every piece."""
    return Network(n, level_of, [{p: frozenset([d]) for p in range(n)} for d in range(n)])


def shards(n: int, level_of: Callable[[int, int], int] = lambda a, b: 0) -> Network:
    """Before an all-gather: device d holds piece d, done."""
    return Network(n, level_of, [{d: frozenset(range(n))} for d in range(n)])


def is_reduced(network: Network) -> bool:
    """Every device holds every piece of the sum."""
    return all(held == {p: frozenset(range(network.n)) for p in range(network.n)} for held in network.held)


def ring_reduce_scatter(network: Network, members: list[int], parts: list[tuple[int, ...]]) -> None:
    """Afterwards the i-th member holds the sum of part i."""
    k = len(members)
    for step in range(k - 1):
        network.round([(members[i], members[(i + 1) % k], parts[(i - step - 1) % k]) for i in range(k)], reduce=True)


def ring_all_gather(network: Network, members: list[int], parts: list[tuple[int, ...]]) -> None:
    """Before, the i-th member holds part i."""
    k = len(members)
    for step in range(k - 1):
        network.round([(members[i], members[(i + 1) % k], parts[(i - step) % k]) for i in range(k)], reduce=False)
