"""The command of a benchmark whose cases run over a slow link: each by itself, in network namespaces of its own.

The process that is started calls itself again for each case, within `unshare`, and ends a page of docs/ with the
results. `bench.throttled` makes the link.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bench.throttled import may_have_namespaces

HEADING = "## What it saves"
"""The heading of the section that a benchmark writes, the last one of its page."""


def command(
    module: str,
    cases: Iterable[tuple[object, float]],
    inside: Callable[[str, float, int], Any],
    section: Callable[[Sequence[Any], int], str],
    arguments: Sequence[str] | None,
    *,
    about: str | None,
    rounds: int,
    timeout_s: float = 900.0,
) -> int:
    """Run the benchmark `bench.module` and write its section of docs/module.md; return the exit status.

    Args:
        module: its name, without the package.
        cases: what is measured, and over which rate of the link in bytes per second.
        inside: measures one case, which it is given as text, in so many rounds; its result is data for JSON.
        section: the text behind `_setting`, from the results in order and the number of rounds.
        arguments: of the command line; None: those of the process.
        about: the help of the command.
        rounds: how many there are by default.
        timeout_s: the longest that one case may take.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--dry", action="store_true", help="print the section, write nothing")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.inside:
        case, rate = options.inside
        print(json.dumps(inside(case, float(rate), options.rounds)))
        return 0
    if not may_have_namespaces():
        print("this kernel allows no namespaces, or has no `tc`", file=sys.stderr)
        return 1
    results = list[Any]()
    for case, rate in cases:
        words = ["-m", f"bench.{module}", "--inside", str(case), str(rate), "--rounds", str(options.rounds)]
        started = ["unshare", "-Urn", "--kill-child", sys.executable, *words]
        done = subprocess.run(started, check=True, stdout=subprocess.PIPE, text=True, timeout=timeout_s)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    text = f"{HEADING}\n\n{_setting(module)} {section(results, options.rounds)}"
    print(text)
    if not options.dry:
        page = Path(__file__).parents[1] / "docs" / f"{module}.md"
        page.write_text(page.read_text(encoding="utf-8").split(HEADING)[0].rstrip() + f"\n\n{text}", encoding="utf-8")
    return 0


def _setting(module: str) -> str:
    """Return how the results were made, for the page."""
    version, _, _ = torch.__version__.partition("+")
    return f"""Written by `python -m bench.{module}` on {date.today()}: two cores, no GPU, torch {version}. Two gloo
ranks, one thread each, in two network namespaces; the kernel keeps the link between them to a rate."""
