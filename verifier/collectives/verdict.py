"""Verdicts on schedules and programs: a certificate, or refusals that say where and why."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from shardwright.pcg.errors import ShardwrightError

Fault = Literal["form", "incomplete", "counted twice", "not there", "race", "deadlock", "rate"]
MOST_REFUSALS = 5
"""A verdict reports no more refusals than this."""


class Refusal(NamedTuple):
    """The reason of a refusal. `rank`, `step` and `chunk` are its place; -1 stands for all, or none in particular."""

    fault: Fault
    rank: int
    step: int
    chunk: int
    problem: str

    def __str__(self) -> str:
        places = (("rank", self.rank), ("step", self.step), ("chunk", self.chunk))
        where = ", ".join(f"{name} {number}" for name, number in places if number >= 0)
        return f"{self.fault}: {where}: {self.problem}" if where else f"{self.fault}: {self.problem}"


class Refused(Exception):  # noqa: N818 - a verdict, and no error of the judge
    """Ends the judging; carries the refusals."""

    def __init__(self, *refusals: Refusal) -> None:
        super().__init__("; ".join(map(str, refusals)))
        self.refusals = refusals[:MOST_REFUSALS]


@dataclass(frozen=True, slots=True)
class ScheduleCertificate:
    """A schedule or program that the judge has proven.

    Attributes:
        subject: a hash of what was judged, and of the topology if there was one.
        judge: a hash of the judge's source.
        least_capacity: the messages that each queue must hold so that nothing blocks; 0 is a rendezvous. None where
            there are no queues.
        facts: what else was found out, for people.
    """

    subject: str
    judge: str
    claim: str
    least_capacity: int | None = None
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduleVerdict:
    """Certified, or refused for reasons."""

    certificate: ScheduleCertificate | None = None
    refusals: tuple[Refusal, ...] = field(default=())

    @property
    def is_certified(self) -> bool:
        return self.certificate is not None


def verdict_of(prove: Callable[[], ScheduleCertificate]) -> ScheduleVerdict:
    """Return the certificate of a proof, or what refuses it; data that has no meaning is refused for its form."""
    try:
        return ScheduleVerdict(prove())
    except Refused as refused:
        return ScheduleVerdict(refusals=refused.refusals)
    except ShardwrightError as error:
        return ScheduleVerdict(refusals=(Refusal("form", -1, -1, -1, str(error)),))


def subject_hash(*parts: object) -> str:
    """Return a hash of frozen data, by its representation."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def judge_digest() -> str:
    """Return a hash of the judge's source, and of the data types whose meaning it relies on."""
    here = Path(__file__).parent
    types = here.parents[1] / "pcg" / "collectives"
    names = ("topology", "collective", "schedule", "program", "plan")
    return _digest([*sorted(here.glob("*.py")), *(file for name in names if (file := types / f"{name}.py").exists())])


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
