"""Units in a row, spread over stages by an exact program: where each stage begins, and how it is run.

A step of m microbatches takes about the time of one microbatch in all stages, plus m - 1 times its time in the slowest
stage. For every bound on the slowest stage, the least sum over all stages that begin where others end is a shortest
path. Bounds are tried from the least one that admits a path, until no larger one can win.

Source: Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning" (2022),
section 5.2, where a stage's devices are chosen too, and memory rules stages out by the microbatches in flight as here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from sys import float_info
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.pcg.errors import PlanError

_STEP = 2e-3
"""Bounds on the slowest stage are tried in steps of this share."""
_EVEN = 1e-4
"""The penalty for a full memory or a slowest stage, as a share of the slowest stage's time: it breaks ties."""
_ROUNDING = 1e-9
MOST_UNITS = 512
"""The most units: more are merged with neighbours into about this number of equally long ones."""

_Floats = NDArray[np.float64]
_Path = list[tuple[int, int]]
"""The first unit of each stage, and the unit after its last."""


class Unit(NamedTuple):
    """A section that cannot be cut, run in one way on one kind of device.

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
    """A stage: every unit in each way in which the stage may be run, all units in the same way.

    in_flight    microbatches at once
    free_bytes   for its units
    """

    ways: tuple[tuple[Unit, ...], ...]
    in_flight: int = 1
    free_bytes: float = inf

    def num_bytes(self, way: int, start: int, end: int) -> float:
        """Return the bytes that units from `start` until `end` need in a way."""
        units = self.ways[way][start:end]
        kept_bytes = sum(unit.stored_bytes + self.in_flight * unit.kept_bytes for unit in units)
        return kept_bytes + max((unit.peak_bytes for unit in units), default=0.0)


class Spread(NamedTuple):
    """The number of units of each stage, and the way in which it is run."""

    sizes: tuple[int, ...]
    ways: tuple[int, ...]


class _Tables(NamedTuple):
    """Tables of stages by the unit after the last and by size, the smallest last: seconds, fullness, the best way.

    Seconds are infinite where the units do not fit, or are too few. `fullness`: the share of memory that is used.
    `kinds`: the table of each stage, as equal stages share one. `whole_s`: the least seconds of all units on one stage.
    """

    whole_s: float
    kinds: tuple[int, ...]
    seconds: _Floats
    fullness: _Floats
    way: NDArray[np.intp]

    @property
    def most(self) -> int:
        """The most units of a stage."""
        return self.seconds.shape[-1]

    def at(self, entries: NDArray[np.generic], path: _Path) -> list[float]:
        """Return the entries of the stages on a path."""
        where = zip(self.kinds, path, strict=True)
        return [entries[kind, end, self.most - (end - start)].item() for kind, (start, end) in where]


def chained(places: Sequence[Place], num_microbatches: int) -> Spread | None:
    """Return the spread of units over stages that makes a step fastest; None where they do not fit.

    Of equally fast spreads, memory or time is spread evenly. First, each stage may have a few units only; the limit
    grows until no stage above it can be as fast.

    Raises:
        PlanError: fewer units than stages.
    """
    num_units, num_stages = len(places[0].ways[0]), len(places)
    if num_units < num_stages:
        problem = f"{num_stages} virtual stages, but the model has only {num_units} sections to put on them"
        raise PlanError(f"{problem}; choose fewer stages or chunks, or name the model's blocks in `repeats`")
    ends = _ends(places)
    rows = {id(place.ways): _row(place, ends) for place in {id(place.ways): place for place in places}.values()}
    num_units = len(ends) - 1
    least_s = float(np.min([row.seconds.min(0) for row in rows.values()], axis=0).sum())
    most, all_units = 1 + 2 * num_units // num_stages, num_units - num_stages + 1
    while True:
        most = min(most, all_units)
        tables = _tables(places, rows, most)
        path = _fastest(tables, num_microbatches)
        if most == all_units:
            break
        longer_s = least_s + (num_microbatches - 1) * min(row.least_s(most + 1) for row in rows.values())
        if path is not None and _step_s(tables, path, num_microbatches) < longer_s:
            break
        most *= 2
    if path is None:
        return None
    sizes = tuple(ends[end] - ends[start] for start, end in path)
    return Spread(sizes, tuple(int(way) for way in tables.at(tables.way, path)))


def _fastest(tables: _Tables, num_microbatches: int) -> _Path | None:
    if (least := _path(tables, inf)) is None:
        return None
    bounds = np.unique(tables.seconds[np.isfinite(tables.seconds)])
    at, high = 0, len(bounds) - 1  # the least bound with which there is a path
    while at < high:
        middle = (at + high) // 2
        at, high = (at, middle) if _path(tables, bounds[middle]) is not None else (middle + 1, high)
    fastest, fastest_s = least, _step_s(tables, least, num_microbatches)
    least_s = sum(tables.at(tables.seconds, least))
    while at < len(bounds) and least_s + (num_microbatches - 1) * bounds[at] < fastest_s * (1 - _ROUNDING):
        path = _path(tables, bounds[at])
        if path is not None and (found_s := _step_s(tables, path, num_microbatches)) < fastest_s:
            fastest, fastest_s = path, found_s
        at = int(np.searchsorted(bounds, bounds[at] * (1 + _STEP), side="right"))
    return fastest


def _ends(places: Sequence[Place]) -> list[int]:
    """Return the units at which stages may begin and end, by number."""
    units = places[0].ways[0]
    if len(units) <= MOST_UNITS:
        return list(range(len(units) + 1))
    until = np.cumsum([unit.seconds for unit in units])
    steps = np.linspace(0.0, until[-1], MOST_UNITS + 1)[1:-1]
    ends = {0, len(units), *(int(i) + 1 for i in np.searchsorted(until, steps))}
    further = np.linspace(0, len(units), len(places) + 1)  # in case few units take nearly all of the time
    return sorted(ends.union(map(int, further)))


class _Row(NamedTuple):
    """The units of a place, by way."""

    seconds: _Floats
    stored_bytes: _Floats
    kept_bytes: _Floats
    peak_bytes: _Floats

    def sums(self, most: int) -> tuple[_Floats, _Floats, _Floats, _Floats]:
        """Return the sums over neighbours, and the largest of their peaks."""
        stored, kept_bytes = (_sums(values, most, too_few=0.0) for values in (self.stored_bytes, self.kept_bytes))
        return _sums(self.seconds, most), stored, kept_bytes, _most(self.peak_bytes, most)

    def least_s(self, size: int) -> float:
        """Return the least seconds of `size` neighbours."""
        return float(_sums(self.seconds, size)[..., size:, 0].min())


def _row(place: Place, ends: Sequence[int]) -> _Row:
    """Return the units of a place, with those between two of the `ends` merged."""
    columns, starts = np.array(place.ways), list(ends[:-1])
    seconds, stored, kept_bytes = (np.add.reduceat(columns[..., kind], starts, axis=1) for kind in range(3))
    return _Row(seconds, stored, kept_bytes, np.maximum.reduceat(columns[..., 3], starts, axis=1))


def _tables(places: Sequence[Place], rows: Mapping[int, _Row], most: int) -> _Tables:
    """Return the tables of up to `most` units a stage. Where all memory is free, `in_flight` does not matter."""
    keys = [(id(p.ways), p.free_bytes, p.in_flight if p.free_bytes < inf else 1) for p in places]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    sums = {key: row.sums(most) for key, row in rows.items()}
    by_kind = [_table(*sums[key], free_bytes, in_flight) for key, free_bytes, in_flight in numbers]
    seconds, fullness, way = map(np.stack, zip(*by_kind, strict=True))
    whole_s = min(float(row.seconds.cumsum(1)[:, -1].min()) for row in rows.values())
    return _Tables(whole_s, tuple(numbers[key] for key in keys), seconds, fullness, way)


def _table(
    seconds: _Floats, stored: _Floats, kept_bytes: _Floats, peak: _Floats, free_bytes: float, in_flight: int
) -> tuple[_Floats, _Floats, NDArray[np.intp]]:
    """Return the seconds, fullness and best way of a stage."""
    needed = stored + in_flight * kept_bytes + peak
    seconds = np.where(needed <= free_bytes, seconds, inf)
    way = seconds.argmin(0)
    fullness = needed / (free_bytes or 1.0)
    seconds, fullness = (np.take_along_axis(table, way[None], 0)[0] for table in (seconds, fullness))
    return seconds, fullness, way


def _sums(values: _Floats, most: int, too_few: float = inf) -> _Floats:
    """Return the sums of neighbours, as in `_Tables`."""
    ways, num_units = values.shape
    until = np.full((ways, most + num_units + 1), -too_few)
    until[:, most] = 0.0
    np.cumsum(values, axis=1, out=until[:, most + 1 :])
    return until[:, most:, None] - np.lib.stride_tricks.sliding_window_view(until, most, axis=1)[:, : num_units + 1]


def _most(values: _Floats, most: int) -> _Floats:
    """Return the maxima of neighbours."""
    ways, num_units = values.shape
    maxima = np.zeros((ways, num_units + 1, most))
    for size in range(1, most + 1):
        maxima[:, size:, most - size] = values[:, : num_units - size + 1]
    return np.maximum.accumulate(maxima[..., ::-1], axis=-1)[..., ::-1]


def _path(tables: _Tables, bound_s: float) -> _Path | None:
    """Return the path with the least sum and no stage above the bound, or None."""
    num_units, weighted = tables.seconds.shape[1] - 1, _weighted(tables, bound_s)
    best, froms = np.full(tables.most + num_units + 1, inf), list[NDArray[np.intp]]()
    best[tables.most] = 0.0
    starts = np.lib.stride_tricks.sliding_window_view(best, tables.most)[: num_units + 1]  # a view of `best`
    for kind in tables.kinds:
        through = starts + weighted[kind]
        froms.append(through.argmin(1))
        best[tables.most :] = through.min(1)
    if not np.isfinite(best[-1]):
        return None
    return list(reversed(list(_back(froms, num_units, tables.most))))


def _weighted(tables: _Tables, bound_s: float) -> _Floats:
    """Return the seconds, and a little more for stages that are full or slow."""
    allowed = tables.seconds <= min(bound_s * (1 + _ROUNDING), float_info.max)
    seconds = np.where(allowed, tables.seconds, 0.0)
    slowest_s = bound_s if bound_s < inf else tables.whole_s or 1.0
    weight = np.where(tables.fullness > 0, tables.fullness, seconds / slowest_s)
    return np.where(allowed, seconds + _EVEN * slowest_s * weight**2, inf)


def _back(froms: Sequence[NDArray[np.intp]], end: int, most: int) -> Iterator[tuple[int, int]]:
    for columns in reversed(froms):
        start = end - most + int(columns[end])
        yield start, end
        end = start


def _step_s(tables: _Tables, path: _Path, num_microbatches: int) -> float:
    stages_s = tables.at(tables.seconds, path)
    return sum(stages_s) + (num_microbatches - 1) * max(stages_s)
