"""The workload of a calibration, and the points measured so far, as data in files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import NamedTuple

from shardwright.cost.calibration.probes import CPU_SIZES, Sizes

CHAINS = (4, 44)  # parameters of the two chains; their steps give the seconds of a parameter and of a step
OVERHEADS = "shardwright.overheads"
VISITS, WORKLOAD = "visits.jsonl", "workload.pickle"
_TRIMMED = 0.1


@dataclass(frozen=True, slots=True)
class Workload:
    """The points to measure. A collective's size is that of a group's full tensor, as in `Communication`.

    `overheads` names the module with the lowering's `runtime`, `chain_step`, `products` and `collective`: ranks
    import it, costs do not.
    `seconds_per_point` are divided among `num_passes`, which are as far apart as one pass takes.
    """

    num_ranks: int
    num_threads: int
    timeout_s: float
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32",)
    sizes: Sizes = CPU_SIZES
    collective_bytes: tuple[int, ...] = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**25)
    seconds_per_point: float = 0.03
    num_passes: int = 6
    overheads: str = OVERHEADS

    @property
    def group_sizes(self) -> list[int]:
        """The sizes of groups to measure collectives on: every divisor of the number of ranks but 1."""
        return [size for size in range(2, self.num_ranks + 1) if self.num_ranks % size == 0]


class Visit(NamedTuple):
    """The times of a point in one pass: the seconds of every sample, each by its slowest rank."""

    key: str
    seconds: list[float]


class Point(NamedTuple):
    """A measured time. `spread`: how much longer the upper quartile of the samples is than the lower, as a share."""

    seconds: float
    spread: float

    @classmethod
    def of(cls, visits: Sequence[Visit]) -> Point:
        """Return one time from all samples of all visits."""
        seconds = [max(s, 1e-9) for visit in visits for s in visit.seconds]
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(trimmed_mean(seconds), high / low - 1)


def trimmed_mean(seconds: Sequence[float]) -> float:
    """Return the mean of all but the slowest tenth.

    A step is the sum of its parts, and means add up, as quantiles do not. The trimmed samples are the few that other
    work on the machine slowed down. Without them, a sum's mean is at least the sum of the means.
    """
    return statistics.fmean(sorted(seconds)[: ceil(len(seconds) * (1 - _TRIMMED))])


def read_visits(path: Path) -> dict[str, list[Visit]]:
    """Return the visits of a file by their keys, without a line that was cut off as it was written."""
    by_key: dict[str, list[Visit]] = {}
    if not path.exists():
        return by_key
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(data, dict) and set(data) == set(Visit._fields):
            by_key.setdefault(data["key"], []).append(Visit(**data))
    return by_key


def points_of(visits: Mapping[str, Sequence[Visit]]) -> dict[str, Point]:
    """Return one time for each point."""
    return {key: Point.of(of_point) for key, of_point in visits.items()}
