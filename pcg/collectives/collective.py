"""What a collective has to do: which ranks hold each chunk before, and which hold it, or its sum, afterwards.

A *chunk* is a piece of the data, and a *cell* is the place of a chunk on a rank. What a cell holds is a multiset of
contributions. Where the collective reduces, every source contributes its own summand; else all sources hold the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple, get_args

from shardwright.pcg import checks
from shardwright.pcg.errors import ScheduleError

Kind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather", "scatter", "all_to_all", "custom"
]
Cell = tuple[int, int]
"""A rank and a chunk."""
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_CHUNKS = 1 << 20


class Chunk(NamedTuple):
    """A piece of the data: its share of all bytes, the ranks that hold it before, and those that need it."""

    size: Fraction
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Collective:
    """A collective of `num_ranks` ranks: its chunks, and whether the contributions of sources are summed.

    A chunk's `size` is its share of the whole: the full tensor of the group, or each summand of a sum; of an
    all-to-all, what all ranks send together, also to themselves. The input of a rank is the chunks of which it is a
    source, in order; its output the chunks of which it is a target.

    Raises:
        ScheduleError: a rank that is none of the group, a size that is negative, or chunks that no rank holds.
    """

    kind: Kind
    num_ranks: int
    chunks: tuple[Chunk, ...]
    reduces: bool = False
    root: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.chunks) <= MOST_CHUNKS:
            raise ScheduleError(f"{self.kind}: expected 1 to {MOST_CHUNKS} chunks, got {len(self.chunks)}; use others")
        for index, chunk in enumerate(self.chunks):
            outside = [rank for rank in (*chunk.sources, *chunk.targets) if not 0 <= rank < self.num_ranks]
            orphan = chunk.targets and not chunk.sources
            if outside or orphan or chunk.size < 0:
                found = f"ranks {outside}" if outside else "no source" if orphan else f"size {chunk.size}"
                expected = f"ranks from 0 to {self.num_ranks - 1}, at least one source and a size of at least 0"
                raise ScheduleError(f"{self.kind}: chunk {index}: expected {expected}, got {found}; correct the chunk")

    @cached_property
    def pre(self) -> Mapping[Cell, frozenset[int]]:
        """What each cell holds before, as ranks that contributed; the other cells hold nothing."""
        return {(rank, index): self._given(chunk, rank) for index, chunk in enumerate(self.chunks)
                for rank in chunk.sources}  # fmt: skip

    @cached_property
    def post(self) -> Mapping[Cell, frozenset[int]]:
        """What each cell must hold afterwards, each contribution once; other cells may hold anything."""
        totals = [frozenset(chunk.sources if self.reduces else chunk.sources[:1]) for chunk in self.chunks]
        return {(rank, index): totals[index] for index, chunk in enumerate(self.chunks) for rank in chunk.targets}

    @cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each rank's input, in order."""
        return self._held(lambda chunk: chunk.sources)

    @cached_property
    def outputs(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each rank's output, in order."""
        return self._held(lambda chunk: chunk.targets)

    @cached_property
    def sizes(self) -> tuple[tuple[Fraction, ...], tuple[int, ...]]:
        """The different sizes of chunks, and which of them each chunk has."""
        kinds = {size: kind for kind, size in enumerate(dict.fromkeys(chunk.size for chunk in self.chunks))}
        return tuple(kinds), tuple(kinds[chunk.size] for chunk in self.chunks)

    @property
    def is_even(self) -> bool:
        return len(self.sizes[0]) == 1

    @property
    def unit(self) -> Fraction:
        """The size of the largest chunk."""
        return max(chunk.size for chunk in self.chunks)

    def dual(self) -> Collective:
        """Return the collective that a schedule run backwards carries out, as all-gather for reduce-scatter.

        Raises:
            ScheduleError: the collective has none: chunks with several sources whose targets are not all ranks.
        """
        if self.kind not in DUALS:
            raise ScheduleError(f"{self.kind}: it has no dual; reverse one of {', '.join(DUALS)}")
        reduces = self.kind in ("all_gather", "broadcast")
        everyone = tuple(range(self.num_ranks))
        chunks = tuple(
            Chunk(size, targets, sources) if targets else Chunk(size, everyone if reduces else sources, ())
            for size, sources, targets in self.chunks
        )
        return Collective(DUALS[self.kind], self.num_ranks, chunks, reduces, self.root)

    def _given(self, chunk: Chunk, rank: int) -> frozenset[int]:
        return frozenset((rank if self.reduces else chunk.sources[0],))

    def _held(self, where: Callable[[Chunk], tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        lists: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for index, chunk in enumerate(self.chunks):
            for rank in where(chunk):
                lists[rank].append(index)
        return tuple(map(tuple, lists))


DUALS: Mapping[Kind, Kind] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "gather": "scatter",
    "scatter": "gather",
}


class _Rule(NamedTuple):
    """How a kind of collective divides its data: sources and targets of each unit."""

    units: Callable[[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]]  # of num_ranks and root
    reduces: bool = False


def _each(n: int) -> list[tuple[int, ...]]:
    return [(rank,) for rank in range(n)]


def _all(n: int) -> tuple[int, ...]:
    return tuple(range(n))


RULES: Mapping[str, _Rule] = {
    "all_gather": _Rule(lambda n, root: [(one, _all(n)) for one in _each(n)]),
    "reduce_scatter": _Rule(lambda n, root: [(_all(n), one) for one in _each(n)], reduces=True),
    "all_reduce": _Rule(lambda n, root: [(_all(n), _all(n))], reduces=True),
    "broadcast": _Rule(lambda n, root: [((root,), _all(n))]),
    "reduce": _Rule(lambda n, root: [(_all(n), (root,))], reduces=True),
    "gather": _Rule(lambda n, root: [(one, (root,)) for one in _each(n)]),
    "scatter": _Rule(lambda n, root: [((root,), one) for one in _each(n)]),
    "all_to_all": _Rule(lambda n, root: list(product(_each(n), _each(n)))),
}


def collective(
    kind: str, num_ranks: int, pieces: int = 1, *, root: int = 0, weights: Sequence[Fraction | int] | None = None
) -> Collective:
    """Return a collective of the kinds that libraries have, its units cut into `pieces` equal chunks each.

    A unit is what one rank gives or gets: a rank's input of all-gather and gather, its output of reduce-scatter and
    scatter, what one rank sends another in an all-to-all (sender · num_ranks + receiver), else the whole buffer. Chunk
    unit · pieces + j is piece j of a unit.

    `weights`: bytes of each unit, in any measure, where they are not equal; a unit of 0 bytes is needed nowhere.

    Raises:
        ScheduleError: an unknown kind, a root that is no rank, or weights that are not one for each unit.
    """
    if kind not in RULES:
        raise ScheduleError(f"collective: expected one of {', '.join(RULES)}, got {kind!r}; choose one of them")
    checks.positive_int(num_ranks, "collective", "num_ranks", "the number of ranks")
    checks.positive_int(pieces, "collective", "pieces", "the number of chunks of a unit")
    if not 0 <= root < num_ranks:
        raise ScheduleError(f"{kind}: expected a root from 0 to {num_ranks - 1}, got {root}; choose a rank")
    units = RULES[kind].units(num_ranks, root)
    given = [Fraction(1)] * len(units) if weights is None else [Fraction(weight) for weight in weights]
    if len(given) != len(units) or min(given) < 0 or not any(given):
        expected = f"{len(units)} weights of at least 0, not all of them 0"
        raise ScheduleError(
            f"{kind} of {num_ranks} ranks: expected {expected}, got {len(given)}; give one for each unit"
        )
    if len(units) * pieces > MOST_CHUNKS:
        problem = f"expected at most {MOST_CHUNKS} chunks, got {len(units)} × {pieces}"
        raise ScheduleError(f"{kind} of {num_ranks} ranks: {problem}; use fewer pieces")
    total = sum(given) * pieces
    chunks = tuple(
        Chunk(weight / total, sources, targets if weight else ())
        for (sources, targets), weight in zip(units, given, strict=True)
        for _ in range(pieces)
    )
    return Collective(kind, num_ranks, chunks, RULES[kind].reduces, root)  # pyright: ignore[reportArgumentType]
