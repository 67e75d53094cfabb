"""Measure how planning time grows with a model's depth and with devices: a table and a chart in docs/search.md.

Equal blocks are planned once, and devices enter by the sizes of meshes, so neither should matter much. A Llama with the
sizes of Llama-3-8B is planned for H100, with 8 to 96 layers on 64 of them, and with 32 layers on 8 to 4,096.

    python -m bench.growth [--dry]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import date
from functools import partial

import torch

from bench.charts import Series, curves
from bench.grid_page import GROWTH, PAGE, replace_section
from bench.search import Task, Timing, llama_8b, measure
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.ranks.launch import run_ranks

LAYERS, NODES = (8, 16, 32, 64, 96), (1, 8, 32, 128, 512)
USUAL_LAYERS, USUAL_NODES = 32, 8
CHART = "search-growth.svg"
_LIMIT_S = 1800.0


def measured(layers: int, nodes: int) -> Timing:
    """One case, in a process of its own; each device has one sequence of 4,096 tokens."""
    build = partial(llama_8b, layers, 8 * nodes)
    task = Task(f"{layers} layers", build, lambda: Cluster.preset("dgx-h100", nodes=nodes), 0.0, stages=None)
    return run_ranks(measure, 1, _LIMIT_S, args=(task,))[0]


INTRODUCTION = """\
{heading}

Equal blocks are planned once, and devices enter by the sizes of meshes; so neither depth nor devices should matter
much. Deeper models do take longer where not all that backward needs fits: more ways to run a step are tried then.

Written by `python -m bench.growth` on {date}: {cpus}-core CPU, torch {torch}, one thread, each in a process of its own.
The model is a Llama with the sizes of Llama-3-8B, with one sequence of 4,096 tokens for each H100. *planning* is CPU
time after capture, with rules, comparison with plans by hand and the check.

![planning time by layers and by devices]({chart})

| layers | devices | operators | capture | planning | mesh |
|--:|--:|--:|--:|--:|---|
"""


def section(found: dict[tuple[int, int], Timing]) -> str:
    """The table as Markdown."""
    rows = [
        f"| {layers} | {8 * nodes:,} | {t.num_nodes:,} | {t.capture_s:.1f} s | {t.after_capture_cpu_s:.1f} s "
        f"| {t.mesh} |"
        for (layers, nodes), t in found.items()
    ]
    head = INTRODUCTION.format(
        heading=GROWTH, date=date.today().isoformat(), cpus=os.cpu_count(), torch=torch.__version__, chart=CHART
    )
    return head + "\n".join(rows) + "\n"


def chart(found: dict[tuple[int, int], Timing]) -> str:
    """Planning time over layers, and over devices."""
    depth = [(float(n), found[n, USUAL_NODES].after_capture_cpu_s) for n in LAYERS]
    size = [(8.0 * n, found[USUAL_LAYERS, n].after_capture_cpu_s) for n in NODES]
    capture = [(float(n), found[n, USUAL_NODES].capture_s) for n in LAYERS]
    series = [
        Series("by devices", size), Series("by layers", depth), Series("capture, by layers", capture),
    ]  # fmt: skip
    title = f"Planning a Llama: {USUAL_LAYERS} layers, or {8 * USUAL_NODES} devices"
    return curves(title, "devices, or layers", "seconds of CPU", series)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, and write the section and the chart."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="print the section, do not write it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = dict.fromkeys([*((n, USUAL_NODES) for n in LAYERS), *((USUAL_LAYERS, n) for n in NODES)])
    found = dict[tuple[int, int], Timing]()
    for layers, nodes in cases:
        found[layers, nodes] = own = measured(layers, nodes)
        print(f"{layers} layers, {8 * nodes} devices: {own.after_capture_cpu_s:.1f} s", file=sys.stderr, flush=True)
    print(section(found))
    if not options.dry:
        replace_section(GROWTH, section(found))
        PAGE.with_name(CHART).write_text(chart(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
