"""Dispatch: rows of tokens are sent to the devices of the experts that they name, computed there, and sent back.

The choice "e>t" splits tokens t and experts e along one axis. Its meaning follows from certified parts: the tokens
combined, the operator split along e, and the partial sums reduced to each device's tokens. As a device adds nothing to
rows that name none of its experts, only the others go there, each once, however many of its experts it names. (For an
`expert_linear`, a row is a token with one of its experts.)

Their number is known only when a step runs. The static number, which is priced, is the mean over choices of k of E
equally likely experts: a device with m of them is named by 1 - C(E - m, k) / C(E, k) of the rows.

Several axes dispatch one after the other, the outermost first, and send back in reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, ClassVar, Literal, Self

from shardwright.pcg.choice import Choice, Exchange, Running, Split, Transfers
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.factors import Signature
from shardwright.pcg.layout import C, Layout, Layouts
from shardwright.pcg.row import Row
from shardwright.pcg.rows.experts import IMBALANCE
from shardwright.pcg.types import ITEM_BYTES, is_float

INDEX_BYTES, COUNT_BYTES = 4, 8
"""The bytes, as sent, of a number that a row names, and of a number of rows."""
ALIGNMENT = 8
"""The alignment in bytes of each operand's part of a sent row."""


@dataclass(frozen=True, slots=True)
class Dispatch(Exchange):
    """Rows on their way to the experts that they name, and back. Forward begins by sending how many go where.

    width            the number of experts, or other named entries, behind each device of the axis
    rows             the mean number of rows that a device sends to each device of the axis, itself included
    there, back      the bytes of a row, and of its result that comes back; its gradient, which goes the same ways, has
                     `back` and `gradient_back`
    """

    collective: ClassVar[Literal["all_to_all"]] = "all_to_all"
    what: ClassVar[str] = "operator with dispatch"
    words: ClassVar[str] = "tokens sent to their experts and back, all-to-all"
    ends: ClassVar[tuple[str, str]] = ("tokens", "experts")
    imbalance: ClassVar[float] = IMBALANCE

    width: int
    rows: int
    there: int
    back: int
    gradient_back: int

    def sent(self, *, backward: bool = False) -> Transfers[int]:
        if backward:
            return Transfers((self._all(self.back),), (), (self._all(self.gradient_back),) * bool(self.gradient_back))
        return Transfers((self.counts_bytes, self._all(self.there)), (), (self._all(self.back),))

    @property
    def counts_bytes(self) -> int:
        return self.size**2 * COUNT_BYTES

    def _all(self, row_bytes: int) -> int:
        return self.size**2 * self.rows * row_bytes

    def held_bytes(self, *, backward: bool = False) -> int:
        return 2 * self.size * self.rows * max(self.back, self.gradient_back if backward else self.there)

    def call(self, axis: str, group: str) -> str:
        first = f"{group} * {self.size * self.width}" if group else "0"
        return f"rt.To({axis}, {first}, {self.width}, {self.rows})"


class Sent(Choice):
    """A choice that sends rows, which one factor counts, to the device with the part of another that they name."""

    __slots__ = ("named", "rows")
    named: str
    rows: str
    exchange: ClassVar[type[Exchange] | None] = Dispatch
    moves: ClassVar[tuple[str, ...]] = ("gather_copy", "reduce_scatter")

    def __new__(cls, named: str, rows: str) -> Self:
        self = super().__new__(cls, f"{named}>{rows}", (named, rows))
        object.__setattr__(self, "named", named)
        object.__setattr__(self, "rows", rows)
        return self

    def _fields(self) -> tuple[Any, ...]:
        return self.named, self.rows

    @classmethod
    def read(cls, text: str) -> Sent | None:
        named, arrow, rows = text.partition(">")
        return cls(named, rows) if arrow else None

    @classmethod
    def offered(cls, row: Row, signature: Signature) -> Iterator[Sent]:
        return (cls(named, rows) for named in named_factors(signature, row) for rows in row_factors(signature, row))

    def layouts(self, signature: Signature, row: Row) -> tuple[Layouts, Layout]:
        good = list(map(str, self.offered(row, signature)))
        if self not in good:
            raise LayoutError(f"{row.name} cannot be split by {self!r}; it can by {good or 'no dispatch'}")
        (held, _), (split, result) = (Split(factor).layouts(signature, row) for factor in self.factors)
        return tuple(mine if theirs == C else theirs for mine, theirs in zip(split, held, strict=True)), result

    @property
    def inner(self) -> Split:
        return Split(self.named)

    @property
    def outward(self) -> Split:
        return Split(self.rows)

    def renamed(self, names: Mapping[str, str]) -> Sent:
        return Sent(names.get(self.named, self.named), names.get(self.rows, self.rows))

    def senders(self, size: int) -> int:
        return size

    @classmethod
    def exchanges(cls, running: Running) -> Iterator[Dispatch]:
        row_bytes = _row_bytes(running)
        return (Dispatch(*hop, *row_bytes) for hop in _hops(running))


def named_factors(signature: Signature, row: Row) -> list[str]:
    """Return the factors that rows of sendable operands name: dimensions of an operand that is not sent."""
    dims = {signature.operands[operand][dim] for operand, dim in row.indexes.values()} if row.sends else set()
    return [f.name for i, f in enumerate(signature.factors) if (i,) in dims and f.role == "sum"]


def row_factors(signature: Signature, row: Row) -> list[str]:
    """Return the factors that count rows of all sendable operands and of the result, each a dimension of its own."""
    sent = [signature.operands[i] for i in row.sends]
    mine = [i for i, f in enumerate(signature.factors) if f.role == "map" and (i,) in signature.result]
    return [signature.factors[i].name for i in mine if sent and all((i,) in dims for dims in sent)]


def aligned(num_bytes: int) -> int:
    """Return the bytes that an operand's part of a row takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _row_bytes(running: Running) -> tuple[int, int, int]:
    """Return the bytes of a row, of what comes back of it, and of what comes back of its gradient."""
    row, dtypes, shapes = running.row, running.dtypes, running.shapes
    rank = len(shapes.result) - 1

    def part(shape: tuple[int, ...], item_bytes: int) -> int:
        return aligned(prod(shape[rank:]) * item_bytes)

    def sent(only: Sequence[bool]) -> int:
        items = (INDEX_BYTES if i in row.indexes else ITEM_BYTES[dtypes[i]] for i in row.sends)
        parts = zip(row.sends, items, strict=True)
        return sum(part(shapes.local_operands[i], item) for i, item in parts if only[i])

    floats = [grad and is_float(dtype) for grad, dtype in zip(running.grads, dtypes, strict=False)]
    back = part(shapes.local_result, ITEM_BYTES[dtypes[-1]])
    return sent([True] * len(floats)), back, sent(floats)


def _hops(running: Running) -> Iterator[tuple[int, int, int, int]]:
    """Yield axis, size, width and rows of each hop. Rows that came by one axis name something behind the device."""
    row, signature, split, sizes, shapes, *_ = running
    ((position, (held, dim)),) = row.indexes.items()
    name, rank = signature.factors[signature.operands[held][dim][0]].name, len(shapes.result) - 1
    num_slots = prod(shapes.local_operands[position][rank:])
    arrived, known, width = prod(shapes.local_result[:rank]), 1.0, shapes.operands[held][dim]
    for axis, (choice, size) in enumerate(zip(split, sizes, strict=True)):
        if name not in choice.factors:
            continue
        width //= size
        if isinstance(choice, Sent):
            share = named_share(width, shapes.operands[held][dim], num_slots)
            rows = ceil(round(arrived * share / known, 6))
            yield axis, size, width, rows
            arrived, known = size * rows, share


def named_share(width: int, count: int, num_slots: int) -> float:
    """Return the share of rows that name any of `width` among `count` entries, choosing `num_slots` different ones."""
    none = prod(max(0, count - width - i) / (count - i) for i in range(min(num_slots, count)))
    return 1.0 - none
