"""A collective's task: the ranks that hold each chunk before, and those that hold it, or its sum, afterwards.

A *chunk* is a piece of the data, and a *cell* is the place of a chunk on a rank. What a cell holds is a multiset of
contributions. Where the collective reduces, every source contributes its own summand; else all sources hold the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
MOST_CELLS = 1 << 23
"""The most cells that hold something before or afterwards: about two for each transfer that a schedule may have."""


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
        ScheduleError: a rank that is none of the group or stands twice, a size that is negative, or chunks that no rank
            holds; chunks that are not those of the kind, or sizes whose sum is not 1. A "custom" one may have any.
    """

    kind: Kind
    num_ranks: int
    chunks: tuple[Chunk, ...]
    reduces: bool = False
    root: int = 0

    def __post_init__(self) -> None:
        if not 0 < len(self.chunks) <= MOST_CHUNKS:
            raise ScheduleError(f"{self.kind}: expected 1 to {MOST_CHUNKS} chunks, got {len(self.chunks)}; use others")
        require_at_most(self.kind, self.num_cells, MOST_CELLS, "cells")
        for index, chunk in enumerate(self.chunks):
            for fault in self._faults(chunk):
                expected = (
                    f"ranks from 0 to {self.num_ranks - 1}, each once, at least one source and a size of at least 0"
                )
                raise ScheduleError(f"{self.kind}: chunk {index}: expected {expected}, got {fault}; correct the chunk")
        if self.kind != "custom":
            self._check_kind(RULES[self.kind])

    @property
    def num_cells(self) -> int:
        """Return the number of cells that hold something before, plus the number of those that do afterwards."""
        return sum(len(chunk.sources) + len(chunk.targets) for chunk in self.chunks)

    @cached_property
    def pre(self) -> Mapping[Cell, frozenset[int]]:
        """Return the contents of each cell before, as the ranks that contributed. Other cells hold nothing."""
        return {(rank, index): self._given(chunk, rank) for index, chunk in enumerate(self.chunks)
                for rank in chunk.sources}  # fmt: skip

    @cached_property
    def post(self) -> Mapping[Cell, frozenset[int]]:
        """Return the contents that each cell must have afterwards, each contribution once. Others may hold anything."""
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
    def has_equal_units(self) -> bool:
        """True if every rank gives and gets as much as any other, as in the collectives of tensors of one shape."""
        if self.kind == "custom":
            return False
        number = RULES[self.kind].num_units(self.num_ranks, self.root)
        pieces = len(self.chunks) // number
        starts = range(0, len(self.chunks), pieces)
        return all(number * sum(chunk.size for chunk in self.chunks[i : i + pieces]) == 1 for i in starts)

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
        rule = RULES[DUALS[self.kind]]
        units = rule.units(self.num_ranks, self.root)
        pieces = len(self.chunks) // len(units)
        chunks = tuple(
            Chunk(chunk.size, units[index // pieces][0], chunk.targets and units[index // pieces][1])
            for index, chunk in enumerate(self.chunks)
        )
        return Collective(DUALS[self.kind], self.num_ranks, chunks, rule.reduces, self.root)

    def _faults(self, chunk: Chunk) -> Iterator[str]:
        if unknown := [rank for rank in (*chunk.sources, *chunk.targets) if not 0 <= rank < self.num_ranks]:
            yield f"ranks {unknown}"
        yield from (f"ranks {ranks}" for ranks in chunk[1:] if len(set(ranks)) < len(ranks))
        if chunk.targets and not chunk.sources:
            yield "no source"
        if chunk.size < 0:
            yield f"size {chunk.size}"

    def _check_kind(self, rule: _Rule) -> None:
        """Refuse chunks that are not those of the kind: as many for each unit; one of no size may be needed nowhere."""
        what, number = f"{self.kind} of {self.num_ranks} ranks", rule.num_units(self.num_ranks, self.root)
        pieces, rest = divmod(len(self.chunks), number)
        if rest or self.reduces != rule.reduces or not 0 <= self.root < self.num_ranks:
            expected = (
                f"a multiple of {number} chunks, {'sums' if rule.reduces else 'copies'} and a root that is a rank"
            )
            got = f"{len(self.chunks)}, {'sums' if self.reduces else 'copies'} and root {self.root}"
            raise ScheduleError(f"{what}: expected {expected}, got {got}; correct it or call it custom")
        units = rule.units(self.num_ranks, self.root)
        for index, (size, *ends) in enumerate(self.chunks):
            if tuple(ends) != (unit := units[index // pieces]) and (size or ends != [unit[0], ()]):
                expected = f"sources {_shown(unit[0])} and targets {_shown(unit[1])}"
                got = f"{_shown(ends[0])} and {_shown(ends[1])}"
                problem = f"expected {expected}, got {got}; correct it or call it custom"
                raise ScheduleError(f"{what}: chunk {index}: {problem}")
        if (total := sum(chunk.size for chunk in self.chunks)) != 1:
            raise ScheduleError(f"{what}: expected sizes whose sum is 1, got {total}; divide them by it")

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


Ranks = tuple[int, ...]
_Sets = Callable[[int, int], list[Ranks]]
"""Sets of ranks, of `num_ranks` and a root."""


class _Rule(NamedTuple):
    """The way in which a kind of collective divides its data: one unit for each source with each target."""

    sources: _Sets
    targets: _Sets
    reduces: bool = False

    def num_units(self, num_ranks: int, root: int = 0) -> int:
        return len(self.sources(num_ranks, root)) * len(self.targets(num_ranks, root))

    def num_cells(self, num_ranks: int, root: int = 0) -> int:
        """Return how many ranks hold something before and afterwards, of all units together."""
        sources, targets = self.sources(num_ranks, root), self.targets(num_ranks, root)
        return sum(map(len, sources)) * len(targets) + sum(map(len, targets)) * len(sources)

    def units(self, num_ranks: int, root: int) -> list[tuple[Ranks, Ranks]]:
        """Return the sources and targets of each unit."""
        return list(product(self.sources(num_ranks, root), self.targets(num_ranks, root)))


def _each(num_ranks: int, root: int) -> list[Ranks]:
    return [(rank,) for rank in range(num_ranks)]


def _all(num_ranks: int, root: int) -> list[Ranks]:
    return [tuple(range(num_ranks))]


def _root(num_ranks: int, root: int) -> list[Ranks]:
    return [(root,)]


RULES: Mapping[str, _Rule] = {
    "all_gather": _Rule(_each, _all),
    "reduce_scatter": _Rule(_all, _each, reduces=True),
    "all_reduce": _Rule(_all, _all, reduces=True),
    "broadcast": _Rule(_root, _all),
    "reduce": _Rule(_all, _root, reduces=True),
    "gather": _Rule(_each, _root),
    "scatter": _Rule(_root, _each),
    "all_to_all": _Rule(_each, _each),
}


def require_at_most(what: str, number: int, most: int, of: str) -> None:
    """Refuse more of something than memory is for, before it is made.

    Raises:
        ScheduleError: there are more than `most`.
    """
    if number > most:
        raise ScheduleError(f"{what}: expected at most {most} {of}, got {number}; use fewer chunks or ranks")


def _shown(ranks: Ranks) -> str:
    more = f", … of {len(ranks)}" if len(ranks) > 8 else ""
    return f"({', '.join(map(str, ranks[:8]))}{more})"


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
    rule, what = RULES[kind], f"{kind} of {num_ranks} ranks"
    if (number := rule.num_units(num_ranks, root)) * pieces > MOST_CHUNKS:
        problem = f"expected at most {MOST_CHUNKS} chunks, got {number} × {pieces}"
        raise ScheduleError(f"{what}: {problem}; use fewer pieces")
    require_at_most(what, rule.num_cells(num_ranks, root) * pieces, MOST_CELLS, "cells")
    units = rule.units(num_ranks, root)
    given = [Fraction(1)] * len(units) if weights is None else [Fraction(weight) for weight in weights]
    if len(given) != len(units) or min(given) < 0 or not any(given):
        expected = f"{len(units)} weights of at least 0, not all of them 0"
        raise ScheduleError(f"{what}: expected {expected}, got {len(given)}; give one for each unit")
    total = sum(given) * pieces
    chunks = tuple(
        Chunk(weight / total, sources, targets if weight else ())
        for (sources, targets), weight in zip(units, given, strict=True)
        for _ in range(pieces)
    )
    return Collective(kind, num_ranks, chunks, rule.reduces, root)  # pyright: ignore[reportArgumentType]
