"""Measurements on one device, and the page that shows them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date

import torch

from bench.device_operators import Operator
from bench.rounds import noise
from shardwright.cost.calibration.workload import trimmed_mean
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.memory import Memory
from shardwright.pcg.step.precisions import Precision


@dataclass(frozen=True)
class Row:
    """A model in one mode: seconds of a step in every round, and the allocator's peaks (`reserved_bytes` on a GPU)."""

    model: str
    mode: str
    predicted_s: float
    predicted: Memory
    seconds: tuple[float, ...]
    allocated_bytes: int
    reserved_bytes: int | None

    @property
    def measured_s(self) -> float:
        return trimmed_mean(self.seconds)

    @property
    def predicted_bytes(self) -> int:
        """Return the bytes that the allocator is predicted to hand out."""
        memory = self.predicted
        return memory.total_bytes - memory.context_bytes - memory.communication_bytes - memory.slack_bytes

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.allocated_bytes - 1


@dataclass(frozen=True)
class Result:
    """All that was measured on one device. `left_out`: what did not fit its memory."""

    device: str
    precision: Precision
    cluster: Cluster
    rows: Sequence[Row]
    operators: Sequence[Operator]
    left_out: Sequence[str]

    def to_json(self) -> dict[str, object]:
        return {
            "date": date.today().isoformat(),
            "device": self.device,
            "torch": torch.__version__,
            "precision": self.precision,
            "left_out": list(self.left_out),
            "steps": [asdict(row) for row in self.rows],
            "operators": [asdict(operator) for operator in self.operators],
            "cluster": self.cluster.to_json(),
        }


INTRODUCTION = """\
# Predictions on one GPU

Written by `python -m bench.device_steps` on {date}: {device}, torch {torch}, {precision}, AdamW (`fused=True`). The
measurements are in `bench/data/{data}`.

The device is calibrated first, by operators and kernels, never by a model. *Measured* is the mean of {rounds} rounds of
steps but for the slowest tenth; *noise* is how far that of the odd rounds is from that of the even ones. Memory is the
most that torch's allocator had handed out at once, against what is predicted without the CUDA context, buffers of
communication and the allocator's slack.

Calibration: {calibration}.

## Training steps

"""
STEPS = """\
| model | mode | predicted | measured | error | noise | memory predicted | measured | error |
|---|---|--:|--:|--:|--:|--:|--:|--:|
"""
OPERATORS = """\

## Operators

The {number} operators of these models whose kernels are predicted to take most of a step, each operator and shape once,
alone, in their predicted dtypes (outside autocast), without dispatch.

| operator | shapes | median error forward | backward |
|---|--:|--:|--:|
"""
WORST = """\

The five that are furthest off, for each direction:

| model | operator | operands | times | direction | predicted | measured | error |
|---|---|---|--:|---|--:|--:|--:|
"""
NUM_WORST = 5


def page(result: Result) -> str:
    """The results as Markdown."""
    text = INTRODUCTION.format(
        date=date.today().isoformat(),
        device=result.device,
        torch=torch.__version__,
        precision=result.precision,
        data=data_name(result.device),
        rounds=max((len(row.seconds) for row in result.rows), default=0),
        calibration=result.cluster.provenance,
    )
    for mode in (None, *dict.fromkeys(row.mode for row in result.rows)):
        if mine := [row for row in result.rows if mode in (None, row.mode)]:
            times, memory = ([abs(error) for error in errors] for errors in zip(*map(_errors, mine), strict=True))
            medians = f"{statistics.median(times):.1%} of a step's time, {statistics.median(memory):.1%} of memory"
            text += f"Median error, {mode or 'all'}: {medians}.\n"
    if result.left_out:
        text += f"\nNot enough memory (a smaller `--batch` may do): {'; '.join(result.left_out)}.\n"
    text += "\n" + STEPS + "".join(map(_step_line, sorted(result.rows, key=lambda row: -abs(row.time_error))))
    return text + _operators(result.operators)


def _errors(row: Row) -> tuple[float, float]:
    return row.time_error, row.memory_error


def _step_line(row: Row) -> str:
    times, memory = (row.predicted_s, row.measured_s), (row.predicted_bytes, row.allocated_bytes)
    cells = [row.model, row.mode, *(f"{x * 1e3:.2f} ms" for x in times), f"{row.time_error:+.0%}"]
    cells += [f"{noise(row.seconds):.0%}", *(f"{x / 1e6:.1f} MB" for x in memory), f"{row.memory_error:+.0%}"]
    return _line(cells)


def _operators(operators: Sequence[Operator]) -> str:
    text = OPERATORS.format(number=len(operators))
    for name in sorted({operator.op for operator in operators}):
        mine = [operator for operator in operators if operator.op == name]
        medians = (_median(operator.errors[direction] for operator in mine) for direction in (0, 1))
        text += _line([name, str(len(mine)), *medians])
    text += _line(["all", str(len(operators)), *(_median(o.errors[d] for o in operators) for d in (0, 1))])
    text += WORST
    for direction, words in enumerate(("forward", "backward")):
        known = [(error, operator) for operator in operators if (error := operator.errors[direction]) is not None]
        for error, o in sorted(known, key=lambda entry: -abs(entry[0]))[:NUM_WORST]:
            times = [f"{x[direction] * 1e6:.1f} µs" for x in (o.predicted_s, o.measured_s)]
            text += _line([o.model, o.op, ", ".join(o.operands), str(o.count), words, *times, f"{error:+.0%}"])
    return text


def _median(errors: Iterable[float | None]) -> str:
    known = [abs(error) for error in errors if error is not None]
    return f"{statistics.median(known):.1%}" if known else "–"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def data_name(device: str) -> str:
    """The file of the measurements."""
    return f"device-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
