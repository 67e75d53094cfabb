"""Units in a row, spread over stages: where each stage begins, and how it is run, by an exact program.

A step of m microbatches takes about what one of them takes in all stages, and m - 1 times what one takes in the slowest
stage. For every bound on the slowest stage, the least sum over all stages that begin where others end is a shortest
path; bounds are tried from the least with which there is one, until no larger one can win.

Source: Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning" (2022),
section 5.2, where a stage's devices are chosen too, and memory rules stages out by the microbatches in flight as here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.pcg.errors import PlanError

_STEP = 2e-3
"""Bounds on the slowest stage are tried in steps of this share."""
_EVEN = 1e-4
"""Of the slowest stage's time: what a full memory counts, or a stage as slow as that, where plans take the same."""
_ROUNDING = 1e-9
MOST_UNITS = 512
"""Of more, neighbours are taken together until there are about so many that take equally long: tables are square."""

_Floats = NDArray[np.float64]


class Unit(NamedTuple):
    """What cannot be cut, as it is run in one way on one kind of device.

    seconds       of a microbatch
    stored_bytes  of its parameters
    kept_bytes    of each microbatch in flight
    peak_bytes    beside these, at most, while it runs
    """

    seconds: float
    stored_bytes: float = 0.0
    kept_bytes: float = 0.0
    peak_bytes: float = 0.0


class Place(NamedTuple):
    """A stage: every unit in each way in which the stage may be run, all units in the same one.

    in_flight    microbatches at once
    free_bytes   for its units
    """

    ways: tuple[tuple[Unit, ...], ...]
    in_flight: int = 1
    free_bytes: float = inf

    def num_bytes(self, way: int, start: int, end: int) -> float:
        """What units from `start` until `end` need in a way."""
        own = self.ways[way][start:end]
        kept = sum(unit.stored_bytes + self.in_flight * unit.kept_bytes for unit in own)
        return kept + max((unit.peak_bytes for unit in own), default=0.0)


class Spread(NamedTuple):
    """How many units each stage has, and in which of its ways it is run."""

    sizes: tuple[int, ...]
    ways: tuple[int, ...]


class _Table(NamedTuple):
    """Of one stage, for units from the row's until the column's: seconds, the share of memory that is used, the way.

    Seconds are without end where nothing fits, or there is no unit.
    """

    seconds: _Floats
    fullness: _Floats
    way: NDArray[np.intp]


def chained(places: Sequence[Place], num_microbatches: int) -> Spread | None:
    """Units over stages such that a step is as fast as can be; None where they do not fit.

    Of spreads that are equally fast, one with its memory or its time spread evenly.

    Raises:
        PlanError: fewer units than stages.
    """
    num_units = len(places[0].ways[0])
    if num_units < len(places):
        problem = f"{len(places)} virtual stages, but the model has only {num_units} sections to put on them"
        raise PlanError(f"{problem}; choose fewer stages or chunks, or name the model's blocks in `repeats`")
    ends = _ends(places)
    known = {place: _table(_together(place, ends)) for place in dict.fromkeys(places)}
    tables = [known[place] for place in places]
    if (least := _path(tables, inf)) is None:
        return None
    bounds = np.unique(np.concatenate([t.seconds[np.isfinite(t.seconds)] for t in known.values()]))
    at, high = 0, len(bounds) - 1  # the least bound with which there is a path
    while at < high:
        middle = (at + high) // 2
        at, high = (at, middle) if _path(tables, bounds[middle]) is not None else (middle + 1, high)
    fastest, fastest_s = least, _step_s(tables, least, num_microbatches)
    least_s = sum(_seconds(tables, least))
    while at < len(bounds) and least_s + (num_microbatches - 1) * bounds[at] < fastest_s * (1 - _ROUNDING):
        found = _path(tables, bounds[at])
        if found is not None and (found_s := _step_s(tables, found, num_microbatches)) < fastest_s:
            fastest, fastest_s = found, found_s
        at = int(np.searchsorted(bounds, bounds[at] * (1 + _STEP), side="right"))
    sizes = tuple(ends[end] - ends[start] for start, end in fastest)
    return Spread(sizes, tuple(int(t.way[start, end]) for t, (start, end) in zip(tables, fastest, strict=True)))


def _ends(places: Sequence[Place]) -> list[int]:
    """Where stages may begin and end, by number of unit."""
    units = places[0].ways[0]
    if len(units) <= MOST_UNITS:
        return list(range(len(units) + 1))
    until = np.cumsum([unit.seconds for unit in units])
    steps = np.linspace(0.0, until[-1], MOST_UNITS + 1)[1:-1]
    own = {0, len(units), *(int(i) + 1 for i in np.searchsorted(until, steps))}
    further = np.linspace(0, len(units), len(places) + 1)  # where few units take nearly all of the time
    return sorted(own.union(map(int, further)))


def _together(place: Place, ends: Sequence[int]) -> Place:
    """With the units between each of these places and the next as one."""
    return place._replace(ways=tuple(tuple(_one(way[a:b]) for a, b in pairwise(ends)) for way in place.ways))


def _one(units: Sequence[Unit]) -> Unit:
    if len(units) == 1:
        return units[0]
    seconds, stored, kept, peaks = zip(*units, strict=True)
    return Unit(sum(seconds), sum(stored), sum(kept), max(peaks))


def _table(place: Place) -> _Table:
    num_units = len(place.ways[0])
    shape = num_units + 1, num_units + 1
    best = _Table(np.full(shape, inf), np.zeros(shape), np.zeros(shape, dtype=np.intp))
    is_some = np.triu(np.ones(shape, dtype=bool), 1)
    for way, units in enumerate(place.ways):
        seconds = _between([unit.seconds for unit in units])
        kept = _between([unit.stored_bytes + place.in_flight * unit.kept_bytes for unit in units])
        needed = kept + _most([unit.peak_bytes for unit in units])
        better = is_some & (needed <= place.free_bytes) & (seconds < best.seconds)
        fullness = needed / (place.free_bytes or 1.0)
        best.seconds[better], best.fullness[better], best.way[better] = seconds[better], fullness[better], way
    return best


def _between(values: Sequence[float]) -> _Floats:
    """The sum of the values from the row's until the column's."""
    until = np.concatenate(([0.0], np.cumsum(values)))
    return until[None, :] - until[:, None]


def _most(values: Sequence[float]) -> _Floats:
    """The largest of the values from the row's until the column's."""
    found = np.zeros((len(values) + 1, len(values) + 1))
    for start in range(len(values)):
        found[start, start + 1 :] = np.maximum.accumulate(values[start:])
    return found


_Path = list[tuple[int, int]]


def _path(tables: Sequence[_Table], bound_s: float) -> _Path | None:
    """The first unit of each stage and that behind its last, of the least sum with no stage above the bound."""
    num_units = len(tables[0].seconds) - 1
    best, froms = np.full(num_units + 1, inf), list[NDArray[np.intp]]()
    best[0] = 0.0
    known = dict[int, _Floats]()
    for table in tables:
        if id(table) not in known:
            known[id(table)] = _weighted(table, bound_s)
        through = best[:, None] + known[id(table)]
        froms.append(through.argmin(0))
        best = through.min(0)
    if not np.isfinite(best[-1]):
        return None
    return list(reversed(list(_back(froms, num_units))))


def _weighted(table: _Table, bound_s: float) -> _Floats:
    """Seconds, and a little more for what is full or slow."""
    allowed = table.seconds <= bound_s * (1 + _ROUNDING)
    seconds = np.where(allowed, table.seconds, inf)
    slowest_s = bound_s if bound_s < inf else float(table.seconds[np.isfinite(table.seconds)].max(initial=0.0)) or 1.0
    slow = np.where(allowed, table.seconds, 0.0) / slowest_s
    return seconds + _EVEN * slowest_s * np.where(table.fullness > 0, table.fullness, slow) ** 2


def _back(froms: Sequence[NDArray[np.intp]], end: int) -> Iterator[tuple[int, int]]:
    for starts in reversed(froms):
        start = int(starts[end])
        yield start, end
        end = start


def _seconds(tables: Sequence[_Table], path: _Path) -> list[float]:
    return [float(table.seconds[start, end]) for table, (start, end) in zip(tables, path, strict=True)]


def _step_s(tables: Sequence[_Table], path: _Path, num_microbatches: int) -> float:
    stages_s = _seconds(tables, path)
    return sum(stages_s) + (num_microbatches - 1) * max(stages_s)
