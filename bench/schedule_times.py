"""Simulated against measured times of given schedules: RCCL 2.21.5 running MSCCL's on eight MI300X, from 1 MiB on.

The measurements are those of rouge3877/ns3-msccl-data (Validation/SingleCollective/GroundTruth). No schedule there
comes near the rate of a link, 64 GB/s: what limits it is how fast the thread blocks of a connection copy. So there are
two predictions: from the links alone, and with one rate of a block for each protocol, taken from the largest all-gather
over all pairs; the schedules that it is taken from are then left out.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

from shardwright.cost.clusters.networks import GB
from shardwright.cost.clusters.shapes import complete
from shardwright.cost.collectives.simulation import simulate
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.schedule import Schedule

DATA = Path(__file__).parent / "data" / "mi300x_schedules.csv"
RANKS, LINK = 8, 64 * GB
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


def _seconds(row: Measured, rate: float) -> float:
    return simulate(_schedule(row.algorithm, row.collective), complete(RANKS, rate), row.num_bytes).seconds


def fit(rows: Sequence[Measured], rates: Sequence[float]) -> Fit:
    times = [_seconds(row, rate) for row, rate in zip(rows, rates, strict=True)]
    errors = [abs(time / row.seconds - 1) for row, time in zip(rows, times, strict=True)]
    pairs = [(a.seconds < b.seconds, x < y) for (a, x), (b, y) in combinations(zip(rows, times, strict=True), 2)
             if (a.collective, a.num_bytes) == (b.collective, b.num_bytes)
             and max(a.seconds, b.seconds) > ALIKE * min(a.seconds, b.seconds)]  # fmt: skip
    return Fit(median(errors), sum(real == said for real, said in pairs) / len(pairs), len(rows))


def fits() -> tuple[Fit, Fit]:
    """From links alone, and with a rate of a block for each protocol."""
    rows = measured()
    pairs = [row for row in rows if row[:2] == ("all_gather", "allpair")]
    fewest = {row.protocol: min(one.blocks for one in pairs if one.protocol == row.protocol) for row in pairs}
    simple = [row for row in pairs if row.blocks == fewest[row.protocol]]
    largest = {row.protocol: row for row in sorted(simple, key=lambda row: row.num_bytes)}
    block = {name: row.num_bytes / RANKS / row.seconds / row.blocks for name, row in largest.items()}
    others = [row for row in rows if row not in simple]
    return fit(rows, [LINK] * len(rows)), fit(others, [min(LINK, block[row.protocol] * row.blocks) for row in others])
