"""Predictions and measurements of the model zoo, and the page that shows them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch


@dataclass(frozen=True)
class Calibration:
    """Calibrations from before and after plans ran alone. `drift`: how much longer a loop took then."""

    num_ranks: int
    provenance: str
    drift: float


@dataclass(frozen=True)
class Row:
    """Predictions and measurements of a plan.

    predicted_alone_s   a step, by the calibrations before and after those in processes of the plan's own
    alone_s             what those took
    predicted_noise     how far the prediction by odd passes is from that by even ones
    measured_noise      how far the measurements of odd turns are from those of even ones
    cpu_s               a step's CPU time on the rank where that is longest
    """

    model: str
    plan_name: str
    num_ranks: int
    predicted_alone_s: float
    alone_s: float
    predicted_s: float
    predicted_noise: float
    measured_s: float
    measured_noise: float
    cpu_s: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def error_alone(self) -> float:
        return self.predicted_alone_s / self.alone_s - 1

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def cpu_error(self) -> float:
        return self.predicted_s / self.cpu_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


TEMPLATE = Path(__file__).with_suffix(".md")
"""The page's prose, with {names} in place of its tables."""
HEAD = """\
| model | plan | alone | error | predicted | noise | measured | noise | error | CPU time | error \
| memory | measured | error |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def page(table: Sequence[Row], calibrations: Sequence[Calibration], load: float, facts: Mapping[str, int]) -> str:
    """The results as Markdown. `facts`: passes, points from turn to turn, steps of a turn, steps for memory."""
    machine = {"date": date.today().isoformat(), "cpus": os.cpu_count(), "torch": torch.__version__, "load": load}
    sections = [(c, [row for row in table if row.num_ranks == c.num_ranks]) for c in calibrations]
    tables = "".join(section(rows, c) for c, rows in sections)
    takeaway = _takeaway([rows for _, rows in sections])
    return TEMPLATE.read_text(encoding="utf-8").format(**machine, **facts, takeaway=takeaway, sections=tables)


def _takeaway(tables: Sequence[Sequence[Row]]) -> str:
    """Say how far off steps alone and memory are, over all tables."""
    rows = [row for table in tables for row in table]
    own = [[row for row in table if row.plan_name == "searched"] for table in tables]
    medians = [statistics.median(abs(row.error_alone) for row in mine) for mine in (*tables, *own) if mine]
    errors, memory = [row.error_alone for row in rows], max(abs(row.memory_error) for row in rows)
    return (
        f"a step is predicted within {max(medians):.0%} at the median, in single cases from {min(errors):+.0%} to "
        f"{max(errors):+.0%}, and its memory within {memory:.0%}"
    ).replace("%", " %")


def section(table: Sequence[Row], around: Calibration) -> str:
    """The rows of one number of ranks, the worst first, and their medians."""
    text = f"\n## {around.num_ranks} {'rank' if around.num_ranks == 1 else 'ranks'}\n\n"
    for what, mine in (("searched plans", [r for r in table if r.plan_name == "searched"]), ("all", table)):
        apart, wall, cpu, memory = (
            statistics.median(abs(error(row)) for row in mine)
            for error in (
                lambda r: r.error_alone,
                lambda r: r.time_error,
                lambda r: r.cpu_error,
                lambda r: r.memory_error,
            )
        )
        text += f"Median error, {what}: {apart:.1%} of a step alone; {wall:.1%} as calibrated between the steps "
        text += f"({cpu:.1%} of CPU time); {memory:.1%} of memory.\n"
    lines = "".join(_line(row) for row in sorted(table, key=lambda r: -abs(r.error_alone)))
    text += f"\n{HEAD}{lines}\nDrift: the loop took {around.drift:+.0%} while plans ran alone.\n"
    return f"{text}The calibrations before and after: {around.provenance}.\n"


def _line(row: Row) -> str:
    times = (row.alone_s, row.predicted_s, row.measured_s, row.cpu_s)
    apart, predicted, measured, cpu = (f"{x * 1e3:.2f} ms" for x in times)
    memory = [f"{x / 1e6:.2f} MB" for x in (row.predicted_bytes, row.measured_bytes)]
    cells = [
        row.model,
        row.plan_name,
        apart,
        f"{row.error_alone:+.0%}",
        predicted,
        f"{row.predicted_noise:.0%}",
        measured,
        f"{row.measured_noise:.0%}",
        f"{row.time_error:+.0%}",
        cpu,
        f"{row.cpu_error:+.0%}",
        *memory,
        f"{row.memory_error:+.0%}",
    ]
    return "| " + " | ".join(cells) + " |\n"
