"""Measure a rank's cost of exact dropout masks: its part by `seed_exactly`, and the whole by torch's generator.

Two measurements: the mask alone, of which a rank holds 1/32 in several ways, and whole training steps of the small GPT
of `examples/zoo.py` on two gloo ranks. Both in turns. Run it with `python -m bench.dropout`; it ends docs/randomness.md
with its tables.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import shardwright as sw
from bench.plans import CERTIFIED, fast_links
from examples.zoo import GPT
from shardwright.lowering.module import lower
from shardwright.lowering.random.philox import keep_mask
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime import kernels as rt
from shardwright.pcg.capture.capture import Captured, capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.tree.planner import Planner

PAGE = Path(__file__).parents[1] / "docs" / "randomness.md"
HEADING = "## What it costs"
SHAPE, NUM_RANKS, P = (64, 1024, 1024), 32, 0.1
CPU = torch.device("cpu")
Contender = Callable[[], object]


def shards() -> dict[str, rt.Shard | None]:
    """Return the shards of the mask that a rank may hold, by their names."""
    axis, half, rest = Axis("x", NUM_RANKS, 5), Axis("y", 2, 1), Axis("z", NUM_RANKS // 2, 3)
    return {
        "all of it": None,
        f"1/{NUM_RANKS} of the batch": rt.Shard(SHAPE, (axis, 0, 1)),
        f"1/{NUM_RANKS} of the columns": rt.Shard(SHAPE, (axis, 2, 1)),
        f"1/{NUM_RANKS} of each of 4 blocks of columns": rt.Shard(SHAPE, (axis, 2, 4)),
        f"half of the batch, 1/{NUM_RANKS // 2} of the rows": rt.Shard(SHAPE, (half, 0, 1), (rest, 1, 1)),
    }


def in_turns(contenders: Mapping[str, Contender], num_rounds: int) -> dict[str, float]:
    """The median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender()
    for _ in range(num_rounds):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            times[name].append(time.perf_counter() - start)
    return {name: median(found) for name, found in times.items()}


def masks(num_rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of dropout of a part, by torch's generator and by ours."""
    found = dict[str, dict[str, float]]()
    for name, shard in shards().items():
        x = torch.ones(SHAPE) if shard is None else shard.take(torch.ones(SHAPE))
        mask = torch.empty(x.shape, dtype=torch.bool)
        found[name] = in_turns(
            {
                "global": lambda x=x, shard=shard: rt.dropout(x, P, rt.Draw(), shard),
                "own": lambda x=x, shard=shard: rt.dropout(x, P, rt.Draw(0, 0), shard),
                "bernoulli_": lambda mask=mask: torch.empty_like(mask).bernoulli_(1 - P),
                "philox": lambda shard=shard: keep_mask(SHAPE, 1 - P, 0, 0, CPU, shard and shard.cuts()),
            },
            num_rounds,
        )
    return found


def gpt() -> tuple[GPT, dict[str, Tensor], Captured]:
    torch.manual_seed(0)
    model = GPT(vocab=512, max_seq=128, hidden=256, num_heads=8, num_layers=4)
    batch = {key: torch.randint(512, (8, 128)) for key in ("ids", "targets")}
    return model, batch, capture(model, batch)


def train(graph: Graph, model: GPT, batch: dict[str, Tensor], captured: Captured, num_rounds: int) -> dict[str, float]:
    parallel = lower(graph, model, constants=captured.constants, options=captured.options)

    def exact() -> None:
        with sw.seed_exactly(0):
            parallel.forward_backward(**batch)

    return in_turns({"global": lambda: parallel.forward_backward(**batch), "own": exact}, num_rounds)


def steps(num_rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of forward and backward on two ranks, by the axis's role."""
    model, batch, captured = gpt()
    found = dict[str, dict[str, float]]()
    for role in ("data", "tensor"):
        planner = Planner(fast_links(2), CERTIFIED)
        graph = planner.plan(captured.graph, "GPT", mesh=Mesh.of(x=2), roles=[role]).graph
        by_rank = run_ranks(train, 2, 300, args=(graph, model, batch, captured, num_rounds))
        found[role] = {name: max(times[name] for times in by_rank) for name in by_rank[0]}
    return found


def section(masks: Mapping[str, Mapping[str, float]], steps: Mapping[str, Mapping[str, float]], num_rounds: int) -> str:
    rows = [
        f"| {name} | {1e3 * t['global']:.1f} ms | {1e3 * t['own']:.1f} ms | {t['global'] / t['own']:.1f} "
        f"| {1e3 * t['bernoulli_']:.1f} ms | {1e3 * t['philox']:.1f} ms |"
        for name, t in masks.items()
    ]
    trained = [
        f"| {role} | {1e3 * t['global']:.0f} ms | {1e3 * t['own']:.0f} ms | {t['own'] / t['global']:.2f} |"
        for role, t in steps.items()
    ]
    shape = " × ".join(map(str, SHAPE))
    return f"""{HEADING}

Written by `python -m bench.dropout` on {date.today()}: {os.cpu_count()}-core CPU, torch {torch.__version__}, one
thread, medians of {num_rounds} rounds in turns. Dropout (p = {P}) of a rank's part of a tensor of {shape}, where the
rank draws the global mask from torch's generator, and where it computes its own part; beside them the mask of the part
alone, by torch's generator and by Philox.

| the rank holds | global mask | own part | times as fast | `bernoulli_` alone | Philox alone |
|---|--:|--:|--:|--:|--:|
{chr(10).join(rows)}

Forward and backward of a GPT (4 blocks of width 256, 8 heads, dropout 0.1 in attention too) on 8 × 128 tokens, on two
gloo ranks of one thread each. With two ranks half of the masks is saved; the more ranks, the more.

| axis | global masks | own parts | ratio |
|---|--:|--:|--:|
{chr(10).join(trained)}
"""


def write(text: str) -> None:
    """The page with this as its last section."""
    page = PAGE.read_text(encoding="utf-8").split(HEADING)[0].rstrip() + "\n\n"
    PAGE.write_text(page + text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="print the tables, write nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    trained = steps(options.rounds)  # first: ranks are forked
    text = section(masks(options.rounds), trained, options.rounds)
    print(text)
    if not options.dry:
        write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
