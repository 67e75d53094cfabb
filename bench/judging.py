"""Judge predictions: errors of step times by group, the order of alternatives, and the constant-MFU predictor.

error    predicted / published − 1
order    of two runs of one model on one GPU type with one sequence length whose throughputs per GPU differ by more
         than 5 %, whether the faster one is predicted to be faster
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from bench.decoders import Decoder
from bench.published import Run
from shardwright.cost.timeline.memory import SAFE_SHARE

_TIE = 1e-9
DIFFERENT = 0.05
"""Throughputs that lie closer are not ordered: llm-foundry's rows scatter by 2 to 3 % at the 90th percentile."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A run with the step time that a model predicts, and whether constants were fitted to it.

    memory   predicted at the peak, as a share of the device's
    """

    run: Run
    step_s: float
    fitted: bool = False
    memory: float = 0.0

    @property
    def error(self) -> float:
        return self.step_s / self.run.step_s - 1

    @property
    def tokens_per_s_gpu(self) -> float:
        return self.run.tokens_per_step / self.step_s / self.run.num_gpus


def said_to_fit(rows: Iterable[Predicted]) -> list[Predicted]:
    """Return the rows that the product says fit their devices."""
    return [row for row in rows if row.memory <= SAFE_SHARE]


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of a group of rows: their number, median and 90th percentile of |error|, largest, signed median."""

    count: int
    median: float
    ninetieth: float
    worst: float
    bias: float


def errors(rows: Iterable[Predicted]) -> Errors:
    """The statistics of a group. Raises `ValueError` where it is empty."""
    signed = [row.error for row in rows]
    if not signed:
        raise ValueError("errors: the group has no rows; leave it out")
    sizes = np.abs(signed)
    middle, ninetieth, worst = (float(np.quantile(sizes, share)) for share in (0.5, 0.9, 1.0))
    return Errors(len(signed), middle, ninetieth, worst, median(signed))


def by_group(rows: Iterable[Predicted], key: Callable[[Run], Hashable]) -> dict[Hashable, list[Predicted]]:
    """Rows by what `key` says of their runs, in the order of the first of each group."""
    groups: dict[Hashable, list[Predicted]] = defaultdict(list)
    for row in rows:
        groups[key(row.run)].append(row)
    return dict(groups)


@dataclass(frozen=True, slots=True)
class Order:
    """The number of pairs that were judged, and of those that were predicted in the right order."""

    pairs: int
    right: int

    @property
    def share(self) -> float:
        return self.right / self.pairs if self.pairs else 1.0


def order(rows: Sequence[Predicted]) -> Order:
    """Judge all pairs of one model, GPU and sequence length whose throughputs per GPU differ enough."""
    judged = [_in_order(*pair) for pair in _pairs(rows)]
    return Order(len(judged), sum(judged))


def misordered(rows: Sequence[Predicted]) -> list[tuple[Predicted, Predicted]]:
    """The pairs that are predicted in the wrong order."""
    return [pair for pair in _pairs(rows) if not _in_order(*pair)]


def _pairs(rows: Sequence[Predicted]) -> Iterator[tuple[Predicted, Predicted]]:
    """The faster one first."""
    for group in by_group(rows, lambda run: (run.model, run.gpu, run.seq)).values():
        ordered = sorted(group, key=lambda row: -median(row.run.published))
        yield from (
            (a, b) for a, b in combinations(ordered, 2)
            if median(a.run.published) > (1 + DIFFERENT) * median(b.run.published)
        )  # fmt: skip


def _in_order(faster: Predicted, slower: Predicted) -> bool:
    return faster.tokens_per_s_gpu > (1 + _TIE) * slower.tokens_per_s_gpu


# ---- the predictor to beat ----


def mfu_s(decoder: Decoder, run: Run) -> float:
    """Seconds of a step in which every GPU did the model's FLOPs at 1 FLOP per second; divide by MFU · peak."""
    return decoder.model_flops(run.seq, run.tokens_per_step) / run.num_gpus


def constant_mfu(runs: Sequence[Run], names: frozenset[str], decoder: Callable[[Run], Decoder]) -> list[Predicted]:
    """Step times from one rate per GPU type and precision: the median of what the rows in `names` reached."""
    rates: dict[Hashable, list[float]] = defaultdict(list)
    for run in runs:
        if run.name in names:
            rates[run.gpu].append(mfu_s(decoder(run), run) / run.step_s)
    missing = sorted({run.gpu for run in runs} - set(rates))
    if missing:
        raise ValueError(f"constant_mfu: no row of {missing[0]} is fitted; choose another offset")
    return [Predicted(r, mfu_s(decoder(r), r) / median(rates[r.gpu]), r.name in names) for r in runs]
