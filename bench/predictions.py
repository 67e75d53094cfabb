"""Predicted against published runs: `make bench-accuracy` writes docs/accuracy.md and its two charts.

Every run goes through the product: captured, laid out, timed by the timeline. Two ways are judged: with the product's
own constants, two of which per GPU type come from a tenth of one table, and with four rates fitted to other tenths.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.accuracy_page import charts, page
from bench.decoders import DECODERS
from bench.fitting import Constants, fit_each, predicted
from bench.judging import Predicted, constant_mfu, said_to_fit
from bench.published import LeftOut, earlier, fitted, llm_foundry, megatron_bridge
from bench.published_plans import Planned, all_planned

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "accuracy.md"
OFFSETS = tuple(range(10))
MAIN_OFFSET = 0
"""The offset whose rows are shown one by one; chosen before any error was seen."""


@dataclass(frozen=True)
class Fitted:
    """One offset: the constants, every run predicted with them, and what a constant MFU predicts."""

    offset: int
    constants: dict[str, Constants]
    rows: list[Predicted]
    constant_mfu: list[Predicted]


@dataclass(frozen=True)
class Results:
    """All that the page shows.

    plain    llm-foundry's bf16 rows with the product's own constants
    known    the same with what is known without the table; nothing is fitted
    dated    the same with the product's own constants, but for the attention kernels of 2023
    fp8      its fp8 rows, likewise
    earlier  runs before that table was made, with the constants fitted at the main offset
    soon     the same with weights gathered early in backward
    bridge   Megatron-Bridge with the product's own constants
    """

    plain: list[Predicted]
    known: list[Predicted]
    dated: list[Predicted]
    known_constants: dict[str, Constants]
    fitted: list[Fitted]
    fp8: list[Predicted]
    earlier: list[Predicted]
    soon: list[Predicted]
    bridge: list[Predicted]
    left_out: list[LeftOut]


def measure() -> Results:
    """Plan and predict every run, on all cores."""
    bridge, left_out = megatron_bridge()
    before, unusable = earlier()
    plans = all_planned([*llm_foundry(), *before, *bridge])
    foundry = [p for p in plans if p.run.table == "llm-foundry"]
    bf16 = [p for p in foundry if p.run.precision != "fp8"]
    fit = frozenset(row.run.name for row in said_to_fit(predicted(bf16)))
    shipped = fitted([p.run for p in bf16], MAIN_OFFSET) & fit
    with ProcessPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        by_offset = list(pool.map(_fitted, [bf16] * len(OFFSETS), [fit] * len(OFFSETS), OFFSETS))
    fp8 = [p for p in foundry if p.run.precision == "fp8"]
    known = {p.run.gpu: Constants.known(p.run.gpu) for p in bf16}
    dated = {p.run.gpu: Constants.dated(p.run.gpu, p.cluster.device) for p in bf16}
    old = [p for p in plans if p.run.table == "earlier"]
    soon = [replace(p, execution=p.execution.having(late_gathers=False)) for p in old]
    constants = by_offset[MAIN_OFFSET].constants
    return Results(
        predicted(bf16, names=shipped),
        predicted(bf16, known),
        predicted(bf16, dated, shipped),
        known,
        by_offset,
        predicted(fp8, dated),
        predicted(old, constants),
        predicted(soon, constants),
        predicted(p for p in plans if p.run.table == "Megatron-Bridge"),
        [*left_out, *unusable],
    )


def _fitted(plans: Sequence[Planned], fit: frozenset[str], offset: int) -> Fitted:
    """`fit`: the names of the runs that are said to fit their devices."""
    runs = [p.run for p in plans]
    names = fitted(runs, offset) & fit
    constants = fit_each(plans, names)
    flat = constant_mfu(runs, names, lambda run: DECODERS[run.model])
    return Fitted(offset, constants, predicted(plans, constants, names), flat)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and the charts."""
    parser = argparse.ArgumentParser(prog="make bench-accuracy", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="print the page, write nothing")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    results = measure()
    text = page(results, MAIN_OFFSET)
    if options.dry:
        print(text)
        return 0
    PAGE.write_text(text)
    for name, svg in charts(results, MAIN_OFFSET).items():
        (DOCS / name).write_text(svg)
    print(f"{PAGE}: written after {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
