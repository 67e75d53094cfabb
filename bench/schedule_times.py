"""Simulated against measured times of given schedules: RCCL 2.21.5 running MSCCL's on eight MI300X, from 1 MiB on.

The measurements are those of rouge3877/ns3-msccl-data (Validation/SingleCollective/GroundTruth). No schedule there
comes near the rate of a link, 64 GB/s: what limits it is how fast the thread blocks of a connection copy. So there are
two predictions: from the links alone; and with a start and a rate of a block for each protocol, the line through the
smallest and the largest all-gather over all pairs with the fewest blocks. These schedules are then left out.

Links alone say the same of all protocols and numbers of blocks. `least_error` is what no such prediction can beat.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.collectives import measured as published
from bench.collectives import predicted, tables
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.networks import GB
from shardwright.cost.clusters.shapes import complete, of_levels
from shardwright.cost.collectives.groups import group_of, network_of
from shardwright.cost.collectives.simulation import simulate
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.schedule import Schedule

DATA = Path(__file__).parent / "data" / "mi300x_schedules.csv"
RANKS, LINK = 8, float(64 * GB)
ALIKE = 1.1
"""Times that differ by less have no order."""


class Measured(NamedTuple):
    collective: str
    algorithm: str
    protocol: str
    blocks: int
    num_bytes: int
    seconds: float


class Fit(NamedTuple):
    """The median of relative errors, and the share of pairs of schedules whose order is right."""

    error: float
    ordered: float
    num_rows: int


def measured() -> list[Measured]:
    with DATA.open(encoding="utf-8") as file:
        return list(map(_read, csv.DictReader(file)))


def _read(row: dict[str, str]) -> Measured:
    blocks, seconds = int(row["channels"]) * int(row["instances"]), float(row["time_us"]) * 1e-6
    return Measured(row["collective"], row["algorithm"], row["protocol"], blocks, int(row["bytes"]), seconds)


@cache
def _schedule(algorithm: str, collective: str) -> Schedule:
    return build("direct" if algorithm == "allpair" else "ring", collective, (RANKS,))


class Line(NamedTuple):
    """A protocol's seconds before anything is copied, and how fast a block copies."""

    start_s: float
    bytes_per_s: float


LINKS_ALONE = Line(0.0, LINK)


def _seconds(row: Measured, line: Line) -> float:
    rate = min(LINK, line.bytes_per_s * row.blocks)
    return (
        line.start_s + simulate(_schedule(row.algorithm, row.collective), complete(RANKS, rate), row.num_bytes).seconds
    )


def fit(rows: Sequence[Measured], lines: Mapping[str, Line]) -> Fit:
    """Judge predictions with a line for each protocol."""
    times = [_seconds(row, lines.get(row.protocol, LINKS_ALONE)) for row in rows]
    errors = [abs(time / row.seconds - 1) for row, time in zip(rows, times, strict=True)]
    pairs = [(a.seconds < b.seconds, x < y) for (a, x), (b, y) in combinations(zip(rows, times, strict=True), 2)
             if (a.collective, a.num_bytes) == (b.collective, b.num_bytes)
             and max(a.seconds, b.seconds) > ALIKE * min(a.seconds, b.seconds)]  # fmt: skip
    return Fit(median(errors), sum(real == said for real, said in pairs) / len(pairs), len(rows))


def fits() -> tuple[Fit, Fit]:
    """Return two fits: from links alone, and with a line for each protocol."""
    rows = measured()
    pairs = [row for row in rows if row[:2] == ("all_gather", "allpair")]
    fewest = {row.protocol: min(one.blocks for one in pairs if one.protocol == row.protocol) for row in pairs}
    simple = [row for row in pairs if row.blocks == fewest[row.protocol]]
    by_protocol = {name: [row for row in simple if row.protocol == name] for name in fewest}
    others = [row for row in rows if row not in simple]
    return fit(rows, {}), fit(others, {name: _line(own) for name, own in by_protocol.items()})


def nccls_rings() -> tuple[int, float]:
    """Return how many published times of NCCL's rings there are, and the median error of a simulated one.

    By the links of eight H100 alone: of the all-gathers for which NCCL takes its protocol Simple, which adds little.
    """
    rows = predicted(tables(published())["8-h100-azure", "all_gather"])
    own = [row.measured for row in rows if row.choice == "ring Simple"]
    levels = Cluster.preset("dgx-h100", nodes=1).levels
    topology, ring = (
        of_levels("8 H100", network_of(group_of((RANKS,), 0, levels), levels)),
        _schedule("ring", "all_gather"),
    )
    seconds = [simulate(ring, topology, row.num_bytes).seconds for row in own]
    return len(own), median(abs(said / row.seconds - 1) for said, row in zip(seconds, own, strict=True))


def _line(rows: Sequence[Measured]) -> Line:
    """Return the line through the smallest and the largest of one schedule, in which a link carries an eighth."""
    least, most = (choose(rows, key=lambda row: row.num_bytes) for choose in (min, max))
    s_per_byte = (most.seconds - least.seconds) / (most.num_bytes - least.num_bytes)
    return Line(least.seconds - s_per_byte * least.num_bytes, 1 / (s_per_byte * RANKS * least.blocks))


def least_error() -> float:
    """Return the least median error of any prediction that says the same of all protocols and numbers of blocks."""
    alike = defaultdict[tuple[str, str, int], list[float]](list)
    rows = measured()
    for row in rows:
        alike[row.collective, row.algorithm, row.num_bytes].append(row.seconds)
    steps = range(1000)
    return next(
        step / 1000 for step in steps if 2 * sum(_most_within(own, step / 1000) for own in alike.values()) >= len(rows)
    )


def _most_within(seconds: Sequence[float], error: float) -> int:
    """Return how many of these one number can be within this relative error of: it may be the least that one allows."""
    said = [own * (1 - error) for own in seconds]
    return max(sum(own * (1 - error) <= one <= own * (1 + error) for own in seconds) for one in said)
