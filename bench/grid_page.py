"""The page of the grid, from what is kept of it."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import inf
from pathlib import Path
from statistics import median

from bench.charts import Series, strips
from bench.grid_store import Found, Key
from shardwright.pcg.mesh import TIME

PAGE = Path(__file__).parents[1] / "docs" / "search.md"
TITLE = """\
# What the search finds, and how long it takes

The search chooses how a model is laid out and run. This page holds what it finds beside what other ways of planning
find, and says how long it takes; it is for those who want to know whether a plan could be better. The one thing to
take away: by the cost model, its plans are about as fast as the best that people set up by hand, or faster. How far
they are from the best of all is known where the bound is near. Planning of large models takes longer than we aim at.

All steps here are predicted, none was run; how true such predictions are is another question ([accuracy](accuracy.md)).
Words such as *mesh*, *bound* and *recomputation* are explained in [words](concepts.md), the search in
[planning](planning.md).
"""
GRID, REGRET, SEQUENCE, WITHIN, TIME_NEEDED, GROWTH = HEADINGS = (
    "## Plans beside a brute-force grid", "## Free plans beside pinned ones", "## Long sequences",
    "## Layouts within memory", "## Planning time", "## How planning time grows",
)  # fmt: skip
INTRODUCTION = """\
## Plans beside a brute-force grid

{count} cases: the plan is at most {bound:.0%} slower than the best of the grid in {good}, and at the median
{median:.1%} faster ({branchy:.1%} for mixtures of experts and models with branches: {names}). Plans are above their
bounds by {gap:.1%} at the median, at most {most:.1%}. How much of that a better plan could gain is not known, as the
bound does not know what memory costs. Planning takes {planning:.1f} s at the median.

Written by `make bench-search` on {date} from `bench/data/grid.jsonl`, made on a {cpus}-core CPU. The grid is what
people set up by hand:

* every mesh of one or two axes, each with a role of its own: data parallel, ZeRO, tensor parallel of up to 8
  devices, context parallel, expert parallel;
* every number of microbatches, lifetime of gathered weights and kind of recomputation.

It enumerates for itself. Both sides are costed by the same timeline, on fake tensors, within the same memory.

![plans beside the best of the grid](search-grid.svg)

* *gap*: how much slower the plan's step is than that of the best way of the grid. Below 0 it is faster.
* *by*: in what the two differ: the mesh of devices, the number of microbatches, what is made again, or else only
  layouts and lifetimes.
* *bound*: how far the plan is above the lower bound that it reports (`SearchReport.bound_s`).
* *plan*, *best of the grid*: the mesh (`mb`: microbatches), of the grid also the roles of its axes; for how long
  gathered weights stay, the most frequent first (`kept`, `zero-1` to `zero-3`); what is made again.
* *ways*, *costed*: how many the grid has, and how many the timeline costed. The others cannot be the best one that fits
  (`bench/grid.py` says why).
* *planning*, *grid*: seconds of CPU time on one thread, after capture.

| model | cluster | gap | by | bound | plan | step | best of the grid | step | ways | costed | planning | grid |
|---|---|--:|---|--:|---|--:|---|--:|--:|--:|--:|--:|
"""
STALE = """
`*`: under the costs that the plan was made with, which the gap is of too, this way does not take what it took when it
was found to be the best. Another one may be: delete its line in `bench/data/grid.jsonl`, and it is found again.
"""
BRANCHY = ("Mixtral", "Qwen3-MoE", "T5", "ResNeXt")
"""Models with experts, and those with branches that meet again."""
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
        """Return the plan's excess over the grid's best as a share, 0 where nothing fits in either."""
        plan_s, grid_s = self.plan.step_s or inf, self.plan.grid_s or inf
        return 0.0 if plan_s == grid_s else plan_s / grid_s - 1

    @property
    def differs(self) -> str:
        """Say in what the plan differs from the best way of the grid."""
        mesh, cell = self.plan.mesh, self.grid.cell
        if mesh is None or cell is None:
            return ""
        ours, theirs = ([size for name, size in m.items() if name != TIME] for m in (mesh, cell.mesh))
        found = {
            "mesh": ours != theirs,
            "microbatches": mesh.get(TIME, 1) != cell.mesh.get(TIME, 1),
            "recomputation": self.plan.recompute != cell.recompute,
        }
        return ", ".join(name for name, differs in found.items() if differs) or "layouts"

    @property
    def is_stale(self) -> bool:
        then, now = self.grid.step_s, self.plan.grid_s
        return then != now and (then is None or now is None or abs(now / then - 1) > TOLERANCE)


def rows(results: Mapping[Key, Found]) -> list[Row]:
    """Return the rows of the page, in the order of the results."""
    grids = [key for key in results if key.kind == "grid"]
    pairs = ((key, replace(key, kind="plan")) for key in grids)
    return [Row(key.model, key.cluster, results[own], results[key]) for key, own in pairs if own in results]


def page(table: Sequence[Row], bound: float) -> str:
    """Results as Markdown."""
    fitting = [row for row in table if row.plan.step_s is not None and row.grid.step_s is not None]
    bounds = [row.plan.bound_gap for row in fitting if row.plan.bound_gap is not None]
    head = INTRODUCTION.format(
        date=date.today().isoformat(), cpus=os.cpu_count(), count=len(table), bound=bound,
        good=sum(row.gap <= bound for row in table), median=_faster(fitting), names=", ".join(BRANCHY),
        branchy=_faster([row for row in fitting if row.model.startswith(BRANCHY)]),
        gap=_median(bounds), most=max(bounds, default=0.0), planning=_median([row.plan.cpu_s for row in table]),
    )  # fmt: skip
    return head + "".join(map(_line, table)) + STALE * any(row.is_stale for row in table)


def chart(table: Sequence[Row]) -> str:
    """Gaps by kind of model and of GPU, as SVG."""
    points = defaultdict[str, list[tuple[float, float]]](list)
    families = sorted({_family(row) for row in table})
    for row in table:
        points[_gpu(row)].append((families.index(_family(row)), 100 * row.gap))
    title = "Steps of plans beside the best of the grid; below 0: faster"
    series = [Series(gpu, points[gpu]) for gpu in sorted(points)]
    return strips(title, "plan / best of the grid", families, series, 30)


def _family(row: Row) -> str:
    return re.split("[ ,-]", row.model)[0]


def _gpu(row: Row) -> str:
    return row.cluster.rpartition(" ")[2].removeprefix("dgx-").partition("-")[0]


def _faster(table: Sequence[Row]) -> float:
    """Return by how much plans are faster than the best of the grid, at the median, relative to that."""
    return -_median([row.gap for row in table])


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _line(row: Row) -> str:
    plan, grid = row.plan, row.grid
    cells = (
        row.model, row.cluster, f"{row.gap:+.1%}", row.differs,
        "" if plan.bound_gap is None else f"{plan.bound_gap:.1%}", plan.way, _step(plan.step_s), grid.way,
        _step(plan.grid_s) + "*" * row.is_stale, str(grid.num_ways), str(grid.num_costed), f"{plan.cpu_s:.1f} s",
        f"{grid.cpu_s:.0f} s",
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |\n"


def _step(step_s: float | None) -> str:
    return "" if step_s is None else f"{step_s:.3f} s"


def write(table: Sequence[Row], bound: float) -> None:
    """Write this section of the page; the others stay."""
    replace_section(GRID, page(table, bound))
    PAGE.with_name("search-grid.svg").write_text(chart(table), encoding="utf-8")


def replace_section(heading: str, text: str) -> None:
    """Put a section in the page in place of the one with that heading; all of them stand in their order."""
    parts = (PAGE.read_text(encoding="utf-8") if PAGE.exists() else "").split("\n## ")[1:]
    sections = {f"## {part.partition(chr(10))[0]}": f"## {part.rstrip()}\n" for part in parts} | {heading: text}
    PAGE.write_text("\n".join([TITLE, *(sections[h] for h in HEADINGS if h in sections)]), encoding="utf-8")
