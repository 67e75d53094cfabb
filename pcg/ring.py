"""Ring attention: keys and values travel from device to device; every device keeps its queries.

The choice "q@k" splits queries q and keys k along one axis of n devices. In each of n rounds a device attends to the
keys that it has, while it sends these keys and their values to the next device. It merges what the rounds give by their
log-sum-exp. So no device ever has all keys.

Its meaning follows from certified parts: keys and values gathered, and the operator split along q. That parts of keys
merge, forward and in both gradients, is a lemma (`verifier/rows/ringproof.py`).

A mask has a value for each pair of a query and a key. It stays: a device has the rows of its queries, of all keys.

"q@k/b" gives each device its slice of each of b equal blocks. A causal query sees the keys before it. With as many
blocks as a device has queries, a device has every n-th position, so all devices have equal work in every round.

Backward sends the keys around once more, and behind them their gradients, to which each device adds its summand. Each
device's own keys come first and, for a part of its queries, last: so the last gradients travel beside compute, too.

Sources: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023); Brandon
et al., "Striped Attention: Faster Ring Attention for Causal Transformers" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal, Self

from shardwright.pcg.choice import Choice, Exchange, Running, Split, Transfers
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.factors import Signature
from shardwright.pcg.layout import Layout, Layouts
from shardwright.pcg.row import Row
from shardwright.pcg.types import ITEM_BYTES

WIDE_BYTES = 4
"""The bytes of a number in a sum, at least."""


@dataclass(frozen=True, slots=True)
class Rounds(Exchange):
    """Operands that travel around the devices of an axis, and their gradients, which follow them.

    block       the bytes of a device's part of what travels
    gradient    the bytes of its gradient; 0 if it has none
    result      the bytes of a device's part of the result
    wide        how many times as large a sum is, which is kept in fp32 or wider
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

    def sent(self, *, backward: bool = False) -> Transfers[int]:
        """Return what is sent beside each round.

        Forward has a round for each device's keys. Backward has one more, the second part of a device's own: round i
        sends the keys of round i + 1 and the gradients of round i - 1, where that is another device's.
        """
        last, keys = self.size - 1, (self.size * self.block,)
        if not last:
            return Transfers((), ((),))
        if not backward:
            return Transfers((), (*((keys,) * last), ()))
        gradients = (self.size * self.gradient,) if self.gradient else ()
        return Transfers((), tuple(keys * (i < last) + gradients * (i > 1) for i in range(self.size + 1)))

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
        return f"ring={axis}"


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
                yield Rounds(axis, size, block, gradient, prod(shapes.local_result) * item, max(1, WIDE_BYTES // item))


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
