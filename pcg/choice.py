"""A choice: one way to carry out an operator along one axis of the mesh.

    text     value                 each device                                   operands      result
    R        WHOLE                 does all of it                                R             R
    C        COPIED                does all of it, for itself                    C             C
    P0,1     Partial((0, 1))       does all of it with its summands of 0 and 1   P; others C   P
    o        Split("o")            has its part of factor o                      by factor     by factor
    o/3      Split("o", 3)         has its part of each of 3 equal blocks of o   by factor     by factor
    e>t      Sent("e", "t")        has parts of t, and sends rows (`dispatch`)   by factor     by factor
    q@k      Ring("q", "k")        has parts of q; parts of k travel (`ring`)    by factor     by factor
    q@k/8    Ring("q", "k", 8)     has its part of each of 8 blocks of both      by factor     by factor

A kind of choice owns all that others ask of it: its layouts, the factors that it divides, what it sends, and, where its
certificate follows from others, the choice and the moves that it is composed of. `offers.KINDS` is the closed set. A
new kind is a class with a row there, a proof of its claims beyond its composition (`verifier/rows`), and the
function of the runtime that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from shardwright.pcg.bounds import ALL, Band
from shardwright.pcg.errors import LayoutError
from shardwright.pcg.factors import Factor, Signature
from shardwright.pcg.layout import C, Layout, Layouts, P, R, S, positions, shard_order
from shardwright.pcg.row import LocalShapes, Row

T = TypeVar("T")
U = TypeVar("U")


class Transfers(NamedTuple, Generic[T]):
    """The transfers around an operator, in the order of time. `T` describes one transfer, for example by its bytes.

    before   while the operator waits
    during   while it computes: of each of so many equal parts of its work, what is sent meanwhile and has arrived when
             the next part begins; nothing: the operator computes in one piece, and nothing is sent meanwhile
    after    while its readers wait
    """

    before: tuple[T, ...] = ()
    during: tuple[tuple[T, ...], ...] = ()
    after: tuple[T, ...] = ()

    @property
    def listed(self) -> tuple[T, ...]:
        """All of them."""
        return (*self.before, *chain(*self.during), *self.after)

    def each(self, change: Callable[[T], U]) -> Transfers[U]:
        """Return the same with something else said of each transfer."""
        before, after = tuple(map(change, self.before)), tuple(map(change, self.after))
        return Transfers(before, tuple(tuple(map(change, part)) for part in self.during), after)

    def paired(self, other: Transfers[U]) -> Transfers[tuple[T, U]]:
        """Return what both say of each transfer."""
        before, after = (
            tuple(zip(*both, strict=True)) for both in ((self.before, other.before), (self.after, other.after))
        )
        during = (tuple(zip(*both, strict=True)) for both in zip(self.during, other.during, strict=True))
        return Transfers(before, tuple(during), after)

    def around(self, inner: Transfers[T]) -> Transfers[T]:
        """Return these transfers with others between them and the operator. Only one of the two has any beside it."""
        return Transfers(self.before + inner.before, self.during or inner.during, inner.after + self.after)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The transfers between the `size` devices of one axis around an operator.

    Attributes:
        collective: what does each of them. In a `permute` each device sends to the next one along the axis.
        what: its name in reports; `words`: its description; `ends`: the things that are sent, and their targets.
        imbalance: the load of the busiest device, over the mean.
    """

    collective: ClassVar[Literal["all_to_all", "permute"]]
    what: ClassVar[str]
    words: ClassVar[str]
    ends: ClassVar[tuple[str, str]]
    imbalance: ClassVar[float]

    axis: int
    size: int

    def sent(self, *, backward: bool) -> Transfers[int]:
        """Return the transfers by the bytes that the axis's devices have together."""
        raise NotImplementedError

    def messages(self, place: Sequence[int] | None, *, backward: bool) -> Transfers[tuple[int, int]]:
        """Return, of each transfer, the bytes that a device sends, and those that come to it; of a `permute`.

        `place`: the device's coordinates; None: what the busiest one does, as `sent` says.
        """
        return self.sent(backward=backward).each(lambda all_bytes: (all_bytes // self.size, all_bytes // self.size))

    @property
    def is_straight(self) -> bool:
        """True if a `permute` goes beyond the next device or the one before."""
        return False

    @property
    def counts_bytes(self) -> int:
        """The bytes of the transfer that says how much others send, which no schedule carries; 0: there is none."""
        return 0

    def held_bytes(self, *, backward: bool) -> int:
        """Return the size of what a device packs to send and of what it receives, beside operands and result."""
        raise NotImplementedError

    def call(self, axis: str, group: str) -> str:
        """Return the kernel's additional argument, from the names of the axis and of its group's number, if any."""
        raise NotImplementedError


class Running(NamedTuple):
    """An operator that runs on a mesh: its `split`, the sizes of axes, and the shapes of a device's parts.

    `dtypes` are the dtypes of the operands and, last, of the result; `grads` says which operands get a gradient. `band`
    says which keys queries see, if it is attention.
    """

    row: Row
    signature: Signature
    split: Choices
    sizes: Sequence[int]
    shapes: LocalShapes
    dtypes: Sequence[str]
    grads: Sequence[bool]
    band: Band = ALL


class Choice(str):
    """A choice, which is its text, like a member of a `StrEnum`: it prints, compares, sorts and hashes as that.

    Attributes:
        factors: the factors that devices divide among them; none if each does all the work.
        blocks: the number of blocks, of each of which a device has its slice; 1 except for a blocked split.
        partial: the operands of which each device has a summand.
        inner: the choice by which a device computes once it has what is sent; the choice itself, if nothing is.
        exchange: the transfers between devices while the operator runs; None: none.
        moves: the step rules before and after `inner` that a certificate is composed of, where it is composed.
    """

    __slots__ = ("blocks", "factors", "partial")
    factors: tuple[str, ...]
    blocks: int
    partial: tuple[int, ...]
    exchange: ClassVar[type[Exchange] | None] = None
    moves: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, text: str, factors: tuple[str, ...] = (), blocks: int = 1, partial: tuple[int, ...] = ()) -> Self:
        self = super().__new__(cls, text)
        for name, value in (("factors", factors), ("blocks", blocks), ("partial", partial)):
            object.__setattr__(self, name, value)
        return self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a choice does not change: {name!r} of {self}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._fields()

    def _fields(self) -> tuple[Any, ...]:
        raise NotImplementedError

    @property
    def sends(self) -> bool:
        """Return whether devices send each other something while the operator runs."""
        return self.exchange is not None

    @classmethod
    def read(cls, text: str) -> Choice | None:
        """Return the choice of this kind that may print as `text`."""
        raise NotImplementedError

    @classmethod
    def offered(cls, row: Row, signature: Signature) -> Iterable[Choice]:
        """Return every choice of this kind that a row offers an operator, if devices send each other something."""
        return ()

    def layouts(self, signature: Signature, row: Row) -> tuple[Layouts, Layout]:
        """Return the layouts of operands and result along one axis; raise a `LayoutError` if there are none."""
        raise NotImplementedError

    @property
    def inner(self) -> Choice:
        return self

    @property
    def outward(self) -> Choice:
        """The split that the result shows from outside; for a dispatch, the split of the rows."""
        return self

    @property
    def single(self) -> tuple[str, ...]:
        """The factors that no other axis may divide as well."""
        return ()

    @property
    def unblocked(self) -> Choice:
        """The choice without blocks, as for an operator whose factor is refined into them (`Signature.refined`)."""
        return self

    def renamed(self, names: Mapping[str, str]) -> Choice:
        """Return the choice with other names of factors."""
        return self

    def in_blocks(self, times: int) -> Choice:
        """Return the choice by which a device has its part of each of so many times its blocks, or raise."""
        raise LayoutError(f"{self!r} gives no device parts of blocks")

    def senders(self, size: int) -> int:
        """Return how many of `size` devices, itself included, send a device their part of an operand."""
        return 1

    @classmethod
    def exchanges(cls, running: Running) -> Iterable[Exchange]:
        """Return the exchanges along the axes whose choice is of this kind, in the order of forward."""
        return ()


class Whole(Choice):
    """A choice by which each device does all the work; operands and result have one `layout`, R or C."""

    __slots__ = ("layout",)
    layout: Layout

    def __new__(cls, layout: Layout) -> Self:
        self = super().__new__(cls, str(layout))
        object.__setattr__(self, "layout", layout)
        return self

    def _fields(self) -> tuple[Any, ...]:
        return (self.layout,)

    @classmethod
    def read(cls, text: str) -> Whole | None:
        return next((choice for choice in (WHOLE, COPIED) if choice == text), None)

    def layouts(self, signature: Signature, row: Row) -> tuple[Layouts, Layout]:
        return (self.layout,) * len(signature.operands), self.layout


WHOLE, COPIED = Whole(R), Whole(C)
Choices = tuple[Choice, ...]
"""The choices of an operator, one for each axis."""


class Partial(Choice):
    """A choice by which each device does all the work with its summands of operands.

    The operator is jointly linear in these operands.
    """

    __slots__ = ()

    def __new__(cls, partial: Sequence[int]) -> Self:
        return super().__new__(cls, "P" + ",".join(map(str, partial)), partial=tuple(partial))

    def _fields(self) -> tuple[Any, ...]:
        return (self.partial,)

    @classmethod
    def read(cls, text: str) -> Partial | None:
        operands = text[1:].split(",")
        return cls([int(i) for i in operands]) if all(map(str.isdecimal, operands)) else None

    def layouts(self, signature: Signature, row: Row) -> tuple[Layouts, Layout]:
        if self.partial not in row.linear_in:
            known = row.linear_in
            raise LayoutError(f"{row.name} is not jointly linear in operands {self.partial}; choose from {known}")
        return tuple(P if i in self.partial else C for i in range(len(signature.operands))), P


class Split(Choice):
    """A choice by which each device has its part of a factor, or of each of several equal blocks of it."""

    __slots__ = ()

    def __new__(cls, factor: str, blocks: int = 1) -> Self:
        return super().__new__(cls, f"{factor}/{blocks}" if blocks > 1 else factor, (factor,), blocks)

    def _fields(self) -> tuple[Any, ...]:
        return (*self.factors, self.blocks)

    @classmethod
    def read(cls, text: str) -> Split:
        factor, _, blocks = text.partition("/")
        return cls(factor, int(blocks)) if blocks.isdecimal() else cls(text)

    def layouts(self, signature: Signature, row: Row) -> tuple[Layouts, Layout]:
        (name,) = self.factors
        factor = signature.index(name)
        if factor is None or signature.factors[factor].role == "fixed":
            splittable = [f.name for f in signature.factors if f.role != "fixed"]
            raise LayoutError(f"{row.name} cannot be split along {self!r}; choose R, C or one of {splittable}")
        if self.blocks == 1:
            return signature.split_layouts(factor)
        if needs_consecutive(row, name):
            raise LayoutError(f"{row.name} needs consecutive parts along {name!r}; split it without blocks")
        return signature.refined(factor, self.blocks).split_layouts(factor)

    @property
    def unblocked(self) -> Split:
        (name,) = self.factors
        return self if self.blocks == 1 else Split(name)

    def in_blocks(self, times: int) -> Split:
        (name,) = self.factors
        return Split(name, times * self.blocks)

    def renamed(self, names: Mapping[str, str]) -> Split:
        (name,) = self.factors
        return Split(names.get(name, name), self.blocks)


def needs_consecutive(row: Row, factor: str) -> bool:
    """Return whether a device's part of a factor may not lie in several blocks, as its elements' places count."""
    return factor == row.offset and not row.spaced


def step_along(split: Iterable[Choice], sizes: Iterable[int], factor: str | None) -> int:
    """Return how far apart a device's neighbouring positions along a factor are, where they are evenly spaced."""
    along = zip(split, sizes, strict=True)
    return prod(size for choice, size in along if choice.blocks > 1 and factor in choice.factors)


def uneven(row: Row, signature: Signature, split: Sequence[Choice], sizes: Sequence[int]) -> Factor | None:
    """Return the first factor of which a device's positions count and are not evenly spaced.

    They count along the row's own, and along what is divided with it. Divided without blocks they are neighbours.
    """
    counted = {
        name for choice in split if choice.blocks > 1 and row.offset in choice.factors for name in choice.factors
    }
    for factor in signature.factors if counted else ():
        digits = tuple(S(0, choice.blocks) if factor.name in choice.factors else R for choice in split)
        if factor.name in counted and positions(factor.size, digits, tuple(sizes), (0,) * len(digits)) is None:
            return factor
    return None


def indivisible(signature: Signature, split: Iterable[Choice], sizes: Sequence[int]) -> Factor | None:
    """Return the first factor that the axes splitting it do not divide together. Each axis has a choice and a size.

    Layouts alone cannot tell: g = 3 of a dimension `(g c)` of size 12 may not be split in two.
    """
    split = tuple(split)
    parts = [(name, choice.blocks, n) for choice, n in zip(split, sizes, strict=True) for name in choice.factors]
    names, single = {name for name, _, _ in parts}, {name for choice in split for name in choice.single}
    for factor in signature.factors:
        if factor.name not in names:
            continue
        if factor.name in single and sum(name == factor.name for name, _, _ in parts) > 1:
            return factor
        mine = [(blocks, size) for name, blocks, size in parts if name == factor.name]
        digits = tuple(S(0, blocks) for blocks, _ in mine)
        if isinstance(shard_order((factor.size,), digits, tuple(size for _, size in mine)), str):
            return factor
    return None


def axes_along(split: Sequence[Choice], factor: str) -> Iterator[int]:
    """Yield the axes that divide a factor."""
    return (axis for axis, choice in enumerate(split) if factor in choice.factors)


def degrees(split: Sequence[Choice], sizes: Sequence[int]) -> dict[str, int]:
    """Return the number of parts that each divided factor is divided into."""
    by_name: dict[str, int] = {}
    for choice, size in zip(split, sizes, strict=True):
        for name in choice.factors:
            by_name[name] = by_name.get(name, 1) * size
    return by_name


def sends(split: Iterable[Choice]) -> bool:
    """Return whether devices send each other something while an operator with this split runs."""
    return any(choice.sends for choice in split)


def exchanges(running: Running) -> tuple[Exchange, ...]:
    """Return the exchanges of an operator with this split, by axis in the order of forward."""
    kinds = dict.fromkeys(type(choice) for choice in running.split if choice.sends)
    return tuple(exchange for kind in kinds for exchange in kind.exchanges(running))


def num_senders(split: Iterable[Choice], sizes: Iterable[int]) -> int:
    """Return the number of devices, itself included, that send a device their part of an operand."""
    return prod(choice.senders(size) for choice, size in zip(split, sizes, strict=True))
