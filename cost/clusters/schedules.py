"""Schedules that a cluster's collectives may run by, beside the algorithms of its library.

A value of the cluster: files hold it, plans carry it, and two clusters with other schedules are unlike. Which schedule
carries out which collective is decided by prices (`cost.collectives.scheduled`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from shardwright.cost.clusters.topology import Level
from shardwright.pcg import checks
from shardwright.pcg.collectives.files.own import read_schedule, write_schedule
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.errors import ClusterError

SYNTHESIZED = "synthesized"
"""The word for schedules that the planner makes for the networks of groups."""


class Schedules:
    """Schedules to choose from. Equal if they hold the same ones.

    given: schedules that are given, each for groups of its number of ranks.
    """

    is_synthesized = False

    def __init__(self, given: Sequence[Schedule] = ()) -> None:
        self.given = tuple(given)
        texts = sorted(map(write_schedule, self.given))
        self.digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedules) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Schedules({', '.join(schedule.name for schedule in self.given)})"

    @property
    def _key(self) -> tuple[bool, str]:
        return self.is_synthesized, self.digest

    def candidates(self, kind: str, levels: tuple[Level, ...], num_ranks: int) -> tuple[Schedule, ...]:
        """Return what can carry out a kind of collective in a group of `num_ranks`, whose network has these levels."""
        return tuple(one for one in self.given if (one.collective.kind, one.num_ranks) == (kind, num_ranks))

    def to_json(self) -> object:
        """Return the form of cluster files: the schedules, one after the other."""
        return [json.loads(write_schedule(schedule)) for schedule in self.given]


class Synthesized(Schedules):
    """The wish for schedules that the planner makes; `search.collectives.candidates` fulfils it."""

    is_synthesized = True

    def __repr__(self) -> str:
        return f"Schedules({SYNTHESIZED})"

    def candidates(self, kind: str, levels: tuple[Level, ...], num_ranks: int) -> tuple[Schedule, ...]:
        raise ClusterError(
            f"schedules={SYNTHESIZED!r}: the planner makes them; price a plan's own cluster, or "
            "search.collectives.candidates.for_planner(cluster)"
        )

    def to_json(self) -> object:
        return SYNTHESIZED


def schedules_of(value: object, owner: str = "Cluster") -> Schedules | None:
    """Return schedules from what a user gives: None, schedules, "synthesized", or the path of a folder of files.

    Raises:
        ClusterError: the folder has no schedule, or a file that holds something else.
        ScheduleError: a file cannot be read.
    """
    if value is None or isinstance(value, Schedules):
        return value
    if value == SYNTHESIZED:
        return Synthesized()
    if isinstance(value, (str, os.PathLike)):
        return Schedules(_in_folder(Path(value)))
    expected = f"None, Schedules, {SYNTHESIZED!r} or the path of a folder"
    raise checks.FieldError(owner, "schedules", f"expected {expected}, got {value!r}; give one of them")


def read_schedules(value: object, source: str) -> Schedules | None:
    """Return the schedules of a cluster file: null, "synthesized", a folder beside it, or the schedules themselves.

    Raises:
        ClusterError, ScheduleError: naming the place, what was expected, what was found and what to do.
    """
    if isinstance(value, list):
        return Schedules([read_schedule(json.dumps(entry), f"{source}[{i}]") for i, entry in enumerate(value)])
    with checks.located(f"{source}: "):
        return schedules_of(value)


def _in_folder(folder: Path) -> list[Schedule]:
    from shardwright.pcg.collectives.files.anyfile import read_collective  # few clusters have a folder of them

    if not folder.is_dir():
        expected = f"{SYNTHESIZED!r} or a folder of schedules"
        raise ClusterError(f"schedules: expected {expected}, got {str(folder)!r}; correct the path")
    schedules = list[Schedule]()
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".xml")):
        read = read_collective(path)
        if not isinstance(read.subject, Schedule):
            problem = f"expected a schedule, got a {read.form}; only schedules are run here, move it elsewhere"
            raise ClusterError(f"{path}: {problem}")
        schedules.append(read.subject)
    if not schedules:
        problem = "expected .json or .xml files of schedules, got none; save some with `collectives build -o`"
        raise ClusterError(f"schedules: {folder}: {problem}")
    return schedules
