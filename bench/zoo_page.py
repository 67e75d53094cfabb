"""What was predicted and measured of the model zoo, and the page that says it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

import torch


@dataclass(frozen=True)
class Calibration:
    """What was measured before and after plans ran alone. `drift`: how much longer a loop took then."""

    num_ranks: int
    provenance: str
    drift: float


@dataclass(frozen=True)
class Row:
    """What was predicted and measured of a plan.

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


INTRODUCTION = """\
# Predictions on the local machine

Written by `python -m bench.zoo_times` on {date}: {cpus}-core CPU, torch {torch}, ranks of one thread each under gloo;
{load:.0f} processes were running when it began. Every model of `examples/zoo.py` takes whole training steps in fp32
with AdamW (`fused=True`).

Operators, kernels, collectives and a chain of parameters calibrate the machine, never a model. *Alone* is a step in
processes of the plan's own, in {rounds} rounds of {alone} steps; its error is that of two calibrations, one before and
one after, as `shardwright calibrate` makes them but for Python's garbage collection, which is off. A loop of plain
Python says how much slower or faster those minutes were (drift).

*Predicted* is what the {passes} passes of another calibration say, and *measured* what was measured in the same minutes
and processes: after every {visits} points one of the plans takes {steps} steps, of which the first does not count. A
processor that shares its core with other work of its host can be half as fast for seconds, and machines drift. *Noise*
is how far the prediction by odd passes is from that by even ones, and odd turns from even ones. *CPU time* leaves out
waiting: for another rank, and for a processor that other work has taken (but not that its core is shared). On an idle
machine the wall time of a plan without communication is its CPU time; on a loaded one only the latter can be compared,
and plans that communicate cannot be judged at all.

Times are wall times of the slowest rank, and means but for the slowest tenth. A collective is timed from the moment at
which the first rank comes to it, which counts part of a wait twice where the slowest rank's work is counted too.

*searched* is the search's plan; *data*, *zero* and *tensor* are forced. Memory is all that torch's CPU allocator has
handed out at the worst moment of a step, by the profiler's record, on top of every storage that is alive before it:
parameters, buffers, optimizer states, the pool of gathered weights, buckets of gradients, the rank's batch. The record
lacks what gloo's threads release, which can only make it too large: the least of {memory} steps counts.
"""
HEAD = """\
| model | plan | alone | error | predicted | noise | measured | noise | error | CPU time | error \
| memory | measured | error |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def page(table: Sequence[Row], calibrations: Sequence[Calibration], load: float, facts: Mapping[str, int]) -> str:
    """The results as Markdown. `facts`: passes, points from turn to turn, steps of a turn, steps for memory."""
    machine = {"date": date.today().isoformat(), "cpus": os.cpu_count(), "torch": torch.__version__, "load": load}
    sections = (section([row for row in table if row.num_ranks == c.num_ranks], c) for c in calibrations)
    return INTRODUCTION.format(**machine, **facts) + "".join(sections)


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
