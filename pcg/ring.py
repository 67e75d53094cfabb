"""Ring attention: keys and values travel from device to device; every device keeps its queries.

The choice "q@k" splits queries q and keys k along one axis of n devices. In each of n rounds a device attends to the
keys that it has, while it sends these keys and their values to the next device. It merges what the rounds give by their
log-sum-exp. So no device ever has all keys.

Its meaning follows from certified parts: keys and values gathered, and the operator split along q. That parts of keys
merge, forward and in both gradients, is a lemma (`verifier/rows/ringproof.py`).

A mask has a value for each pair of a query and a key. It stays: a device has the rows of its queries, of all keys.

A mask, or causal attention, may hide all of a device's keys from another device (`bands`). Then these two have no work
together, and keys are sent no further than to the last device that sees some of them.

"q@k/b" gives each device its slice of each of b equal blocks. A causal query sees the keys before it. With as many
blocks as a device has queries, a device has every n-th position, so all devices have equal work in every round.

Backward sends the keys around once more, and behind them their gradients, to which each device adds its summand. Each
device's own keys come first and, for a part of its queries, last: so the last gradients travel beside compute, too.

Sources: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023); Brandon
et al., "Striped Attention: Faster Ring Attention for Causal Transformers" (2023).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, Literal, Self

from shardwright.pcg.bounds import ALL, Band
from shardwright.pcg.choice import Choice, Choices, Exchange, Running, Split, Transfers, axes_along, num_senders
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.factors import Signature
from shardwright.pcg.layout import Layout, Layouts, R, S, positions
from shardwright.pcg.row import Row
from shardwright.pcg.types import ITEM_BYTES

WIDE_BYTES = 4
"""The bytes of a number in a sum, at least."""
Sees = tuple[int, int]
"""How many devices before its own, and how many after, a device's queries see keys of, at most."""


def reach(size: int, sees: Sees) -> tuple[int, ...]:
    """Return, for each of `size` devices, how many devices on the last one is that sees its keys, around the ring."""
    before, after = sees
    return tuple(max(n for n in range(size) if -after <= (i + n) % size - i <= before) for i in range(size))


@dataclass(frozen=True, slots=True)
class Rounds(Exchange):
    """Operands that travel around the devices of an axis, and their gradients, which follow them.

    block       the bytes of a device's part of what travels
    gradient    the bytes of its gradient; 0 if it has none
    result      the bytes of a device's part of the result
    wide        how many times as large a sum is, which is kept in fp32 or wider
    sees        of which devices a device sees keys; None: of all
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
    sees: Sees | None = None

    def sent(self, *, backward: bool = False) -> Transfers[int]:
        """Return what is sent beside each round.

        Forward has a round for each device's keys, as far as some are sent. Backward has one more, the second part of a
        device's own: round i sends the keys of round i + 1 and the gradients of round i - 1, where that is another
        device's. Devices at the ends of a band send less; a round counts as if all sent what the busiest does.
        """
        last, keys = self.hops, (self.size * self.block,)
        if not last:
            return Transfers((), ((),))
        if not backward:
            return Transfers((), (*((keys,) * last), ()))
        gradients = (self.size * self.gradient,) if self.gradient else ()
        return Transfers((), tuple(keys * (i < last) + gradients * (i > 1) for i in range(last + 2)))

    @property
    def is_even(self) -> bool:
        return self.sees is None

    @property
    def hops(self) -> int:
        """Return the number of devices that a device's keys travel on, at most."""
        return self.size - 1 if self.sees is None else max(reach(self.size, self.sees))

    def held_bytes(self, *, backward: bool = False) -> int:
        """Return the size of two blocks, and of what a round gives, beside sums in fp32 if these are wider.

        In backward a round gives gradients of queries and of a block. The sum of the device's own block stays. That of
        another block arrives while, of more than two devices, the one before is sent on.
        """
        copies = self.wide if self.wide > 1 else 0
        if not backward:
            return 2 * self.block + (1 + copies) * self.result
        return 3 * self.block + (self.wide + 1 + (self.size > 2)) * self.gradient + (1 + copies) * self.result

    def call(self, axis: str, group: str) -> str:
        return f"ring={axis}" if self.sees is None else f"ring={axis}, sees={self.sees}"


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
                seen = seen_around(running.band, running.signature, running.split, running.sizes, axis)
                result, wide = prod(shapes.local_result) * item, max(1, WIDE_BYTES // item)
                yield Rounds(axis, size, block, gradient, result, wide, seen)


def num_seen(band: Band, signature: Signature, split: Choices, sizes: Sequence[int]) -> int:
    """Return of how many devices, itself included, a device uses parts of operands, at most, of all that send some."""
    for axis, choice in enumerate(split):
        if isinstance(choice, Ring) and (sees := seen_around(band, signature, split, sizes, axis)) is not None:
            return min(sizes[axis], 1 + sum(sees))
    return num_senders(split, sizes)


def seen_around(band: Band, signature: Signature, split: Choices, sizes: Sequence[int], axis: int) -> Sees | None:
    """Return which devices along the axis of a ring see keys of which; None: each sees keys of all."""
    ring = split[axis]
    assert isinstance(ring, Ring)
    if band == ALL:
        return None
    queries, keys = (next(f.size for f in signature.factors if f.name == name) for name in (ring.queries, ring.keys))
    return _seen_around(band, queries, keys, split, tuple(sizes), axis)


@lru_cache(maxsize=1024)
def _seen_around(
    band: Band, num_queries: int, num_keys: int, split: Choices, sizes: tuple[int, ...], axis: int
) -> Sees | None:
    ring, size = split[axis], sizes[axis]
    assert isinstance(ring, Ring)
    along = tuple(axes_along(split, ring.queries))
    digits = tuple(S(0, choice.blocks) if i in along else R for i, choice in enumerate(split))

    def queries(device: int) -> range:
        ends = [[device if i == axis else n * (size - 1) for i, size in enumerate(sizes)] for n in (0, 1)]
        first, last = (positions(num_queries, digits, sizes, at) for at in ends)
        return range(num_queries) if first is None or last is None else range(first[0], last[-1] + 1)

    whole, part = range(num_keys), num_keys // size
    parts = [whole[i * part :][:part] if ring.blocks == 1 else whole[i::size] for i in range(size)]
    begins, ends = [keys[0] for keys in parts], [keys[-1] for keys in parts]
    before = after = 0
    for device in range(0 if band.is_empty else size):
        mine = queries(device)
        first, stop = bisect_left(ends, mine[0] + band.first), bisect_right(begins, mine[-1] + band.last)
        if first < stop:
            before, after = max(before, device - first), max(after, stop - 1 - device)
    return None if min(before, after) >= size - 1 else (before, after)


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
