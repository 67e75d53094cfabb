"""Compare the fastest layouts within memory with an integer program's optimum, on models of the zoo.

Each model on two and on four local ranks, within several limits between the least memory that any layouts keep and what
the fastest ones do. The sum of compute and communication counts, as in the problem that both solve.

    python -m bench.within [--models NAME ...]      writes a section of docs/search.md
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from math import inf
from typing import NamedTuple

import torch

from bench.grid_page import WITHIN, replace_section
from bench.integer import integer_program
from examples.zoo import ZOO
from shardwright.cost.clusters.local import default_cluster
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT
from shardwright.search.choices.problem import Prices
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Solver
from shardwright.search.exact.within import kept_bytes, time_and_bytes, within_memory
from shardwright.search.request.restrict import FREE
from shardwright.verifier.choices import Certified

SHARES = tuple(i / 20 for i in range(1, 20, 2))
SECONDS = 60
"""For the integer program; where it is not through, its bound counts."""


class Case(NamedTuple):
    """Relative to the optimum: how much slower the layouts are, with prices alone too, and how far the bound is below.

    `cpu_s`: of the search; `judge_s`: of the integer program.
    """

    model: str
    gap: float
    hull_gap: float
    below: float
    cpu_s: float
    judge_s: float


def cases(model: str) -> Iterator[Case]:
    """All limits of one model."""
    torch.manual_seed(0)
    graph = capture(*ZOO[model]()).graph
    for num_ranks in (2, 4):
        solver = Solver(default_cluster(num_ranks), Certified())
        problem, eliminator = solver.problem(Folded(graph), Mesh.of(x=num_ranks), (FREE,), DEFAULT, "zero-3")
        fastest = eliminator.solve(problem)
        most = kept_bytes(problem, fastest)
        least = kept_bytes(problem, eliminator.solve(problem, Prices(1e6 * fastest.objective / most)))
        for limit in (least + share * (most - least) for share in SHARES if most > least):
            start = time.process_time()
            found = within_memory(problem, eliminator, limit, inf)
            then = time.process_time()
            known, bound = integer_program(problem, limit=limit, seconds=SECONDS, gap=1e-4)
            judged = time.process_time()
            best = bound if known is None or bound < known * (1 - 1e-4) else known
            if known is not None and found.bound_s > known * (1 + 1e-4):
                raise AssertionError(f"{model}, {num_ranks} ranks, {limit}: bound {found.bound_s} above {known}")
            hull = within_memory(problem, eliminator, limit, inf, hull=True)
            own_s, hull_s = (time_and_bytes(problem, f.solution)[0] for f in (found, hull))
            below = float(1 - found.bound_s / best)
            yield Case(model, own_s / best - 1, hull_s / best - 1, below, then - start, judged - then)


INTRODUCTION = """\
{heading}

Where memory is short, the search looks for the fastest layouts that fit. Of {count} such problems, what it finds is
within 1 % of the optimum in {near}, and {most:.1%} above it at most.

Written by `python -m bench.within` on {date}. The problems are small models on two and four local ranks, within 5 to
95 % of the memory between the least and that of the fastest layouts. The optimum is that of an integer program (HiGHS),
or its bound where it was not through. Each cell: at most, and at the median in brackets.

* *gap*: how much slower the layouts found are than the optimum, in compute and communication.
* *prices alone*: the same without branches (`search/exact/within.py`).
* *bound*: how far the search's bound is below the optimum.

| model | problems | gap | prices alone | bound | within 1 % | search | integer program |
|---|--:|--:|--:|--:|--:|--:|--:|
"""


def section(found: Sequence[Case]) -> str:
    """The table as Markdown."""
    head = INTRODUCTION.format(
        heading=WITHIN,
        date=date.today().isoformat(),
        count=len(found),
        near=_near(found),
        most=max(c.gap for c in found),
    )
    rows = ((name, [c for c in found if c.model == name]) for name in dict.fromkeys(c.model for c in found))
    return head + "".join(_row(name, own) for name, own in (*rows, ("all", list(found))))


def _near(found: Sequence[Case]) -> int:
    return sum(c.gap <= 0.01 for c in found)


def _row(name: str, own: Sequence[Case]) -> str:
    def both(values: Sequence[float]) -> str:
        return f"{max(values):.1%} ({sorted(values)[len(values) // 2]:.1%})"

    spent = [f"{sum(values):.0f} s" for values in zip(*((c.cpu_s, c.judge_s) for c in own), strict=True)]
    gaps = [both(values) for values in zip(*((c.gap, c.hull_gap, c.below) for c in own), strict=True)]
    cells = [name, str(len(own)), *gaps, f"{_near(own)} of {len(own)}", *spent]
    return "| " + " | ".join(cells) + " |\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Solve all problems and write the section; 1 where layouts are more than 5 % from the optimum."""
    parser = argparse.ArgumentParser(prog="python -m bench.within", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO), help="default: all")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = list[Case]()
    for model in options.models:
        for case in cases(model):
            found.append(case)
            print(case, file=sys.stderr, flush=True)
    text = section(found)
    print(text)
    replace_section(WITHIN, text)
    return int(any(case.gap > 0.05 for case in found))


if __name__ == "__main__":
    sys.exit(main())
