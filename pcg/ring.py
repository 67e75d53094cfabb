"""Ring attention: keys and values travel from device to device; every device keeps its queries.

The choice "q@k" splits queries q and keys k along one axis of n devices. In each of n rounds a device attends to the
keys that it has, while it sends these keys and their values to the next device. It merges what the rounds give by their
log-sum-exp. So no device ever has all keys.

Its meaning follows from certified parts: keys and values gathered, and the operator split along q. That parts of keys
merge, forward and in both gradients, is a lemma (`verifier/rows/ringproof.py`).

A mask has a value for each pair of a query and a key. It stays: a device has the rows of its queries, of all keys.

A mask, or causal attention, may hide most of a device's keys from another device (`bands`). Then keys go round no ring:
each device sends the slice that another one sees straight there (`slices`), and gradients come straight back.

"q@k/b" gives each device its slice of each of b equal blocks. A causal query sees the keys before it. With as many
blocks as a device has queries, a device has every n-th position, so all devices have equal work in every round.

Backward sends the keys around once more, and behind them their gradients, to which each device adds its summand. Each
device's own keys come first and, for a part of its queries, last: so the last gradients travel beside compute, too.

Sources: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023); Brandon
et al., "Striped Attention: Faster Ring Attention for Causal Transformers" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from shardwright.pcg.bounds import ALL, Band
from shardwright.pcg.choice import Choice, Choices, Exchange, Running, Split, Transfers, axes_along, num_senders
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.factors import Signature
from shardwright.pcg.layout import Layout, Layouts, R, S
from shardwright.pcg.row import Row
from shardwright.pcg.slices import Slices, slices_along
from shardwright.pcg.types import ITEM_BYTES

T = TypeVar("T")

WIDE_BYTES = 4
"""The bytes of a number in a sum, at least."""


@dataclass(frozen=True, slots=True)
class Rounds(Exchange):
    """Operands that travel around the devices of an axis, and their gradients, which follow them.

    block       the bytes of a device's part of what travels
    gradient    the bytes of its gradient; 0 if it has none
    result      the bytes of a device's part of the result
    wide        how many times as large a sum is, which is kept in fp32 or wider
    slices      what goes straight to the devices that see it, for each place along the axes `beside`, with their
                sizes, that split queries too; none: whole blocks go around
    """

    collective: ClassVar[Literal["permute"]] = "permute"
    what: ClassVar[str] = "ring attention"
    words: ClassVar[str] = "keys and values sent around the ring of devices, beside compute"
    ends: ClassVar[tuple[str, str]] = ("keys", "queries")
    imbalance: ClassVar[float] = 1.0

    block: int
    gradient: int
    result: int
    wide: int
    slices: tuple[Slices, ...] = ()
    beside: tuple[tuple[int, int], ...] = ()

    def sent(self, *, backward: bool = False) -> Transfers[int]:
        """Return what is sent beside each round; if devices send slices, each counts as if all sent the largest.

        Forward has a round for each device's keys. Backward has one more, the second part of a device's own: round i
        sends the keys of round i + 1 and the gradients of round i - 1, where that is another device's.
        """
        sizes = [self.size * num_bytes for num_bytes in self._largest().values()]
        return self._during(sizes, sizes, backward)

    def messages(self, place: Sequence[int] | None, *, backward: bool = False) -> Transfers[tuple[int, int]]:
        if not self.slices or place is None:
            return Exchange.messages(self, place, backward=backward)
        slices, own = self.slices[self._number(place)], place[self.axis]
        keys = [(self._bytes(slices, own, n), self._bytes(slices, own - n, n)) for n in self._largest()]
        return self._during(keys, [(come, go) for go, come in keys], backward)

    def _largest(self) -> dict[int, int]:
        """Return how many devices on something goes in each round, and the most bytes that a device sends."""
        if not self.slices:
            return dict.fromkeys(range(1, self.size), self.block)
        largest = dict[int, int]()
        for slices in self.slices:
            for n, width in slices.rounds().items():
                largest[n] = max(largest.get(n, 0), self._of(slices, width))
        return dict(sorted(largest.items()))

    def _number(self, place: Sequence[int]) -> int:
        """Return the number of the slices of a device's place along the axes beside that of the ring."""
        number = 0
        for axis, size in self.beside:
            number = number * size + place[axis]
        return number

    def _bytes(self, slices: Slices, owner: int, away: int) -> int:
        """Return the size of the keys that a device sends to the one so many devices on."""
        seen = slices.of(owner % self.size, (owner + away) % self.size)
        return self._of(slices, seen.stop - seen.start)

    def _of(self, slices: Slices, num_keys: int) -> int:
        return self.block // slices.num_keys * num_keys

    def _during(self, keys: Sequence[T], gradients: Sequence[T], backward: bool) -> Transfers[T]:
        """Return transfers of keys, and of gradients if there are any, as those beside rounds."""
        last, keys, gradients = len(keys), tuple(keys), tuple(gradients if self.gradient else ())
        if not last:
            return Transfers((), ((),))
        if not backward:
            return Transfers((), (*((one,) for one in keys), ()))
        rounds = range(last + 2)
        return Transfers((), tuple(keys[i : i + 1] + gradients[max(0, i - 2) : max(0, i - 1)] for i in rounds))

    @property
    def is_straight(self) -> bool:
        """True if something goes further than to a neighbour in one message."""
        return bool(self.slices) and not {1, self.size - 1}.issuperset(self._largest())

    def held_bytes(self, *, backward: bool = False) -> int:
        """Return the size of two blocks, and of what a round gives, beside sums in fp32 if these are wider.

        In backward a round gives gradients of queries and of a block. The sum of the device's own block stays. That of
        another block arrives while, of more than two devices, the one before is sent on. Of slices, a third one is
        packed to be sent, and gradients of one are added up, those of one go and those of another come home.
        """
        copies = self.wide if self.wide > 1 else 0
        results = (1 + copies) * self.result
        if self.slices:
            slices = [0, *self._largest().values(), 0]
            held = max(here + 2 * coming for here, coming in pairwise(slices))
            if not backward:
                return held + results
            back = (2 + self.wide) * max(slices) * bool(self.gradient)
            return self.block + held + self.wide * self.gradient + back + results
        if not backward:
            return 2 * self.block + results
        return 3 * self.block + (self.wide + 1 + (self.size > 2)) * self.gradient + results

    def call(self, axis: str, group: str) -> str:
        return f"ring={axis}, sees={tuple(self.slices[0].sees)}" if self.slices else f"ring={axis}"


class Ring(Choice):
    """A choice by which a device has its part of one factor, and parts of the operands with another travel past it."""

    __slots__ = ("keys", "queries")
    queries: str
    keys: str
    exchange: ClassVar[type[Exchange] | None] = Rounds
    moves: ClassVar[tuple[str, ...]] = ("gather_copy",)

    def __new__(cls, queries: str, keys: str, blocks: int = 1) -> Self:
        text = f"{queries}@{keys}/{blocks}" if blocks > 1 else f"{queries}@{keys}"
        self = super().__new__(cls, text, (queries, keys), blocks)
        object.__setattr__(self, "queries", queries)
        object.__setattr__(self, "keys", keys)
        return self

    def _fields(self) -> tuple[Any, ...]:
        return self.queries, self.keys, self.blocks

    @classmethod
    def read(cls, text: str) -> Ring | None:
        factors, _, blocks = text.partition("/")
        queries, at, keys = factors.partition("@")
        return cls(queries, keys, int(blocks) if blocks.isdecimal() else 1) if at else None

    @classmethod
    def offered(cls, row: Row, signature: Signature) -> Iterator[Ring]:
        for queries in _queries(row, signature):
            yield from (cls(queries, keys) for keys in _keys(row, signature))

    def layouts(self, signature: Signature, row: Row) -> tuple[Layouts, Layout]:
        good = list(map(str, self.offered(row, signature)))
        if self.unblocked not in good:
            raise LayoutError(f"{row.name} cannot be split by {self!r}; it can by {good or 'no ring'}")
        operands, result = self.inner.layouts(signature, row)
        (keys,) = (number for number, factor in enumerate(signature.factors) if factor.name == self.keys)
        travel, _ = signature.refined(keys, self.blocks).split_layouts(keys)
        return tuple(travel[i] if i in row.travels else layout for i, layout in enumerate(operands)), result

    @property
    def single(self) -> tuple[str, ...]:
        return (self.keys,)

    @property
    def inner(self) -> Split:
        return Split(self.queries, self.blocks)

    @property
    def outward(self) -> Split:
        return self.inner

    @property
    def unblocked(self) -> Ring:
        return Ring(self.queries, self.keys)

    def in_blocks(self, times: int) -> Ring:
        return Ring(self.queries, self.keys, times * self.blocks)

    def renamed(self, names: Mapping[str, str]) -> Ring:
        return Ring(names.get(self.queries, self.queries), names.get(self.keys, self.keys), self.blocks)

    def senders(self, size: int) -> int:
        return size

    @classmethod
    def exchanges(cls, running: Running) -> Iterator[Rounds]:
        shapes, item = running.shapes, ITEM_BYTES[running.dtypes[-1]]
        block = sum(prod(shapes.local_operands[i]) * ITEM_BYTES[running.dtypes[i]] for i in running.row.travels)
        gradient = block if any(running.grads[i] for i in running.row.travels) else 0
        for axis, (choice, size) in enumerate(zip(running.split, running.sizes, strict=True)):
            if isinstance(choice, cls):
                result, wide = prod(shapes.local_result) * item, max(1, WIDE_BYTES // item)
                slices = slices_of(running.band, running.signature, running.split, running.sizes, axis)
                beside = tuple((a, running.sizes[a]) for a in axes_along(running.split, choice.queries) if a != axis)
                yield Rounds(axis, size, block, gradient, result, wide, slices, beside if slices else ())


class Used(NamedTuple):
    """The work of the busiest device of a ring: the number of parts of devices, and of pairs of a query and a key.

    `pairs` is 0 if these are all pairs of its queries and of those parts.
    """

    parts: int
    pairs: int = 0


ITS_OWN = Used(1)


def used_by(band: Band, signature: Signature, split: Choices, sizes: Sequence[int]) -> Used:
    """Return what a device uses, at most, of what others send it."""
    for axis, choice in enumerate(split):
        if isinstance(choice, Ring) and (every := slices_of(band, signature, split, sizes, axis)):
            return Used(max(1, *(x.num_parts() for x in every)), max(1, *(x.num_pairs() for x in every)))
    return Used(num_senders(split, sizes))


def slices_of(band: Band, signature: Signature, split: Choices, sizes: Sequence[int], axis: int) -> tuple[Slices, ...]:
    """Return what devices along the axis of a ring see of each other's keys, for each place along other axes.

    Nothing: they see so much that blocks go around.
    """
    ring = split[axis]
    assert isinstance(ring, Ring)
    if band == ALL or sizes[axis] == 1:
        return ()
    queries, keys = (next(f.size for f in signature.factors if f.name == name) for name in (ring.queries, ring.keys))
    along = tuple(axes_along(split, ring.queries))
    layouts = tuple(S(0, choice.blocks) if i in along else R for i, choice in enumerate(split))
    return slices_along(axis, band, (queries, keys), layouts, tuple(sizes))


def _keys(row: Row, signature: Signature) -> Iterator[str]:
    """Yield the factors along which operands travel: a dimension, or blocks of one, that all of them have.

    Neither what has the queries nor the result has it; a mask may, of which each device has all columns.
    """
    travel = [signature.operands[i] for i in row.travels if i < len(signature.operands)]
    stays = (signature.operands[0 if row.offset_at is None else row.offset_at[0]], signature.result)
    for number, factor in enumerate(signature.factors):
        mine = travel and all(any(dim[-1:] == (number,) for dim in dims) for dims in travel)
        if mine and not any(number in dim for dims in stays for dim in dims):
            yield factor.name


def _queries(row: Row, signature: Signature) -> Iterator[str]:
    """Yield the factor whose positions the row counts."""
    if row.offset_at is not None:
        operand, dim = row.offset_at
        yield signature.factors[signature.operands[operand][dim][-1]].name
