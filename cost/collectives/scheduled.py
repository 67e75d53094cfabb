"""Collectives by schedules: which schedule is worth running for a group and a size, and how long it takes.

A group's own network is its members with their share of the links (`network_of`), so groups of one shape have one
answer, however large the cluster is. Candidates are simulated at a few sizes; between these, time is the chord, which
is no less than the simulation where that is convex. A schedule is picked where it takes at most `WORTH` of the
library's time: both are models, and a schedule costs memory and work of the host.

    time   start + steps · STEP_S + chunks that a rank receives · CHUNK_S + simulated seconds

What the library does stays in the curve elsewhere, piece by piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from shardwright.cost.clusters.cluster import Backend, Collective
from shardwright.cost.clusters.schedules import Schedules
from shardwright.cost.clusters.shapes import of_levels
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives import gloo, nccl
from shardwright.cost.collectives.curve import CostLine, Curve, CurvePiece, rising
from shardwright.cost.collectives.simulation import busiest_s_per_byte, simulate
from shardwright.pcg.collectives.bounds import least_seconds_per_byte
from shardwright.pcg.collectives.collective import collective as collective_of
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.collectives.topology import Topology
from shardwright.pcg.errors import ClusterError

MOST_RANKS = 64
"""The most members of a group for which schedules are priced."""
MOST_TRANSFERS = 20_000
SIZES = tuple(float(4096 * 8**k) for k in range(7))
"""The bytes at which candidates are simulated: 4 KiB to 1 GiB."""
WORTH = 0.95
STEP_S: dict[Backend, float] = {"gloo": 60e-6, "nccl": 40e-6}
"""The seconds of a step on a rank, beside its links: messages are posted and awaited. gloo: measured on two ranks of
one machine (100 µs with the hop). NCCL: assumed, a few launches by the host."""
CHUNK_S: dict[Backend, float] = {"gloo": 3.5e-6, "nccl": 4e-6}
"""The seconds to pack and unpack a chunk that a rank receives. gloo: measured so. NCCL: assumed, a kernel."""


class Picks(NamedTuple):
    """Time over bytes, and from each of `starts` on the schedule that is picked; None: the library's algorithm."""

    curve: Curve
    starts: tuple[float, ...] = (0.0,)
    schedules: tuple[Schedule | None, ...] = (None,)

    def at(self, num_bytes: float) -> Schedule | None:
        """Return what carries out a collective of this size."""
        return self.schedules[bisect_right(self.starts, num_bytes) - 1]


class _Candidate:
    """A schedule on a network: the time that it takes at least, and its simulated time where that is asked for."""

    def __init__(self, schedule: Schedule, topology: Topology, backend: Backend) -> None:
        self.schedule, self._topology = schedule, topology
        self._overhead_s = overhead_s(schedule, backend)
        self.least = CostLine(self._overhead_s, busiest_s_per_byte(schedule, topology))
        self._seconds: dict[int, float] = {}

    def line(self, at: int) -> CostLine:
        """Return the line from size number `at` to the next; before the first, what the first takes."""
        if at < 0:
            return CostLine(self._at(0), 0.0)
        at = min(at, len(SIZES) - 2)
        slope = (self._at(at + 1) - self._at(at)) / (SIZES[at + 1] - SIZES[at])
        return CostLine(self._at(at) - slope * SIZES[at], slope)

    def _at(self, number: int) -> float:
        if number not in self._seconds:
            seconds = simulate(self.schedule, self._topology, SIZES[number]).seconds
            self._seconds[number] = self._overhead_s + seconds
        return self._seconds[number]


@lru_cache(maxsize=1024)
def picks(
    collective: Collective, levels: tuple[Level, ...], schedules: Schedules, backend: Backend, library: Curve
) -> Picks:
    """Return what is picked for a collective in a group whose network has these levels.

    `library`: the time of the library's own algorithm.
    """
    if prod(level.size for level in levels) > MOST_RANKS:  # before its links are made
        return Picks(library)
    topology = of_levels("group", levels)
    if not _can_pay(collective, topology, backend, library):
        return Picks(library)
    given = schedules.candidates(collective, levels, topology.num_ranks)
    candidates = [_Candidate(one, topology, backend) for one in given if fits(one, topology)]
    if not candidates:
        return Picks(library)
    starts = sorted({0.0, *SIZES, *(piece.start_bytes for piece in library.pieces)})
    pieces, picked = list[CurvePiece](), list[Schedule | None]()
    for start, end in pairwise([*starts, 4 * starts[-1]]):
        usual, best = library.at(start), _best(candidates, start, (start + end) / 2, library)
        picked.append(best.schedule if best else None)
        line = best.line(bisect_right(SIZES, start) - 1) if best else usual.line
        pieces.append(CurvePiece(start, line, best.schedule.name if best else usual.name))
    changed = [i for i, one in enumerate(picked) if not i or one is not picked[i - 1]]
    return Picks(rising(pieces), tuple(starts[i] for i in changed), tuple(picked[i] for i in changed))


def _best(candidates: Sequence[_Candidate], start: float, middle: float, library: Curve) -> _Candidate | None:
    """Return what is fastest around `middle`, if it is worth running. What cannot be is not simulated."""
    best, best_s, at = None, WORTH * library.time_s(middle), bisect_right(SIZES, start) - 1
    for one in sorted(candidates, key=lambda one: one.least.time_s(middle)):
        if one.least.time_s(middle) >= best_s:
            break
        if (seconds := one.line(at).time_s(middle)) < best_s:
            best, best_s = one, seconds
    return best


def _can_pay(kind: Collective, topology: Topology, backend: Backend, library: Curve) -> bool:
    """Return whether a schedule of one step at the bound of the network would be worth running at some size."""
    bound = least_seconds_per_byte(topology, collective_of(kind, topology.num_ranks)).seconds_per_byte
    least = CostLine(_start_s(backend) + STEP_S[backend], float(bound))
    return any(least.time_s(num_bytes) <= WORTH * library.time_s(num_bytes) for num_bytes in SIZES)


def _start_s(backend: Backend) -> float:
    return nccl.send_base_s() if backend == "nccl" else gloo.BASE_S


def overhead_s(schedule: Schedule, backend: Backend) -> float:
    """Return the seconds of a schedule in which nothing is on a link."""
    most = max(Counter(transfer.dst for transfer in schedule.transfers).values(), default=0)
    return _start_s(backend) + schedule.num_steps * STEP_S[backend] + most * CHUNK_S[backend]


def time_s(schedule: Schedule, topology: Topology, backend: Backend, num_bytes: float) -> float:
    """Return the seconds of a schedule of `num_bytes` of the whole, as ranks run it step by step."""
    return overhead_s(schedule, backend) + simulate(schedule, topology, num_bytes).seconds


def fits(schedule: Schedule, topology: Topology) -> bool:
    """Return whether a schedule is of a size that can be priced, and the network has a way for every transfer."""
    if len(schedule.transfers) > MOST_TRANSFERS:
        return False
    try:
        for src, dst, via in {(t.src, t.dst, t.via) for t in schedule.transfers}:
            topology.path(src, dst, via)
    except ClusterError:
        return False
    return True
