"""The page of the grid, from what is kept of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import inf
from pathlib import Path

from bench.grid_store import Found, Key

PAGE = Path(__file__).parents[1] / "docs" / "grid.md"
INTRODUCTION = """\
# Plans against a brute-force grid

Written by `python -m bench.grid` on {date} from `bench/data/grid.jsonl`, made on a {cpus}-core CPU. The grid is what
people set up by hand: every mesh of one or two axes, each with a role of its own (data parallel, ZeRO, tensor parallel
of up to 8 devices), every number of microbatches, lifetime of gathered weights and kind of recomputation. It enumerates
for itself; both sides are costed by the same timeline, on fake tensors, within the same memory. *Gap*: how much slower
the plan's step is than that of the best way of the grid; below 0 it is faster. Of the ways, so many were costed by the
timeline; the others cannot be the best one that fits (`bench/grid.py` says why). Seconds are CPU time on one thread,
after capture.

{count} cases: the plan is at most {bound:.0%} slower than the best of the grid in {good}.

| model | cluster | gap | plan | step | best of the grid | step | ways | costed | planning | grid |
|---|---|--:|---|--:|---|--:|--:|--:|--:|--:|
"""
STALE = """
`*`: under the costs that the plan was made with, which the gap is of too, this way does not take what it took when it
was found to be the best. Another one may be: delete its line in `bench/data/grid.jsonl`, and it is found again.
"""
TOLERANCE = 1e-3
"""How much the best way of the grid may take more or less than when it was found."""


@dataclass(frozen=True)
class Row:
    """A case of which both are known."""

    model: str
    cluster: str
    plan: Found
    grid: Found

    @property
    def gap(self) -> float:
        """0 where nothing fits in either."""
        plan_s, grid_s = self.plan.step_s or inf, self.plan.grid_s or inf
        return 0.0 if plan_s == grid_s else plan_s / grid_s - 1

    @property
    def is_stale(self) -> bool:
        then, now = self.grid.step_s, self.plan.grid_s
        return then != now and (then is None or now is None or abs(now / then - 1) > TOLERANCE)


def rows(results: Mapping[Key, Found]) -> list[Row]:
    """In the order of the results."""
    grids = [key for key in results if key.kind == "grid"]
    pairs = ((key, replace(key, kind="plan")) for key in grids)
    return [Row(key.model, key.cluster, results[own], results[key]) for key, own in pairs if own in results]


def page(table: Sequence[Row], bound: float) -> str:
    """Results as Markdown."""
    good = sum(row.gap <= bound for row in table)
    today = date.today().isoformat()
    head = INTRODUCTION.format(date=today, cpus=os.cpu_count(), count=len(table), bound=bound, good=good)
    return head + "".join(map(_line, table)) + STALE * any(row.is_stale for row in table)


def _line(row: Row) -> str:
    plan, grid = row.plan, row.grid
    cells = (
        row.model, row.cluster, f"{row.gap:+.1%}", plan.way, _step(plan.step_s), grid.way,
        _step(plan.grid_s) + "*" * row.is_stale, str(grid.num_ways), str(grid.num_costed), f"{plan.cpu_s:.1f} s",
        f"{grid.cpu_s:.0f} s",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |\n"


def _step(step_s: float | None) -> str:
    return "" if step_s is None else f"{step_s:.3f} s"


def write(table: Sequence[Row], bound: float) -> None:
    PAGE.write_text(page(table, bound), encoding="utf-8")
