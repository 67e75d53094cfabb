"""What workers run in tests: tasks that report, fail, die, and a generator of a few rules."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwright.substitutions.equations import Equation
from shardwright.substitutions.rules.catalogue import CATALOGUE
from shardwright.verifier.judge import RuleVerdict

Report = Callable[[object], None]


def square(x: int, report: Report) -> int:
    report(f"on {x}")
    return x * x


def fail(text: str, report: Report) -> None:
    raise ValueError(text)


def die(report: Report) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(seconds: float, report: Report) -> None:
    report(os.getpid())
    time.sleep(seconds)


def pid(report: Report) -> int:
    return os.getpid()


@dataclass(frozen=True)
class FakeContext:
    """Hand-named rules instead of an enumeration; `log` gets a line for each time it is asked."""

    name: str
    operators: tuple[str, ...]
    rules: tuple[str, ...]
    log: str = ""
    deaths: int = 0


def generate(
    context: FakeContext, max_ops: int, seed: int, report: Callable[[Mapping[str, int]], None]
) -> list[Equation]:
    log = Path(context.log)
    with log.open("a") as file:
        file.write(f"{context.name}\n")
    if log.read_text().splitlines().count(context.name) <= context.deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    report({"graphs": 10 * max_ops, "fingerprints": 5})
    return [CATALOGUE[name] for name in context.rules]


def doubt(rules: list[Equation], limit_s: float, explain: bool, report: Report) -> list[RuleVerdict]:
    """A prover that proves nothing."""
    return [RuleVerdict("unknown", None, "too hard") for _ in rules]
