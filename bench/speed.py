"""Lowered programs against hand-written torch.distributed code of the same layout, side by side in one run.

Two gloo ranks with one thread each train the same GPT with the same weights on the same batch. In every round each
contender takes one step; ratios are taken within a round, and their median is reported. Run it with `make bench`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from bench.charts import ranges
from bench.gpt import Size
from bench.plans import forced, single
from bench.rounds import CPU, FORWARD_BACKWARD, STEP, Samples, quartiles, ratio, run_rounds, slowest_rank
from bench.trainers import Trainer, ddp, dtensor_parallel, eager, fsdp, lowered, megatron, serial_graph
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.graph import Graph

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
BOUND = 1.05
"""The largest median ratio that we accept."""
TOLERANCE = 1e-4
"""Of every gradient, relative to its norm or, if larger, a thousandth of the whole gradient's: contenders that do not
agree are not compared."""
MAKERS: tuple[Callable[[Size], Trainer], ...] = (ddp, fsdp, dtensor_parallel, megatron)
OURS = {"data": "our data parallel", "zero": "our ZeRO-3", "tensor": "our tensor parallel"}


@dataclass(frozen=True)
class Pair:
    """Ours, and the hand-written baseline of the same layout."""

    ours: str
    theirs: str


PAIRS = (
    Pair("our data parallel", "tuned DDP"),
    Pair("our ZeRO-3", "fully_shard"),
    Pair("our tensor parallel", "parallelize_module"),
    Pair("our tensor parallel", "hand-written Megatron"),
)
SINGLE = Pair("our program on one rank", "eager")


def two_ranks(size: Size, num_rounds: int) -> dict[str, Samples]:
    """Every contender of `PAIRS` in one run."""
    serial = serial_graph(size)
    graphs = {OURS[case.name]: case.plan(serial, "GPT").graph for case in forced(2)}
    return slowest_rank(run_ranks(_race, 2, 600.0, args=(size, graphs, MAKERS, num_rounds)))


def one_rank(size: Size, num_rounds: int) -> dict[str, Samples]:
    """Our program on a mesh of one device against the module itself."""
    graph = single().plan(serial_graph(size), "GPT").graph
    return slowest_rank(run_ranks(_race, 1, 600.0, args=(size, {SINGLE.ours: graph}, (eager,), num_rounds)))


def _race(
    size: Size, graphs: dict[str, Graph], makers: Sequence[Callable[[Size], Trainer]], num_rounds: int
) -> dict[str, Samples]:
    """One rank's part of a run: make the contenders, see that they agree, time them."""
    trainers = [make(size) for make in makers] + [lowered(size, graph, name) for name, graph in graphs.items()]
    reference = eager(size)
    expected = (reference.whole_loss(), reference.gradients())
    for trainer in trainers:
        check_agreement(trainer, *expected)
    return run_rounds(trainers, num_rounds)


def check_agreement(trainer: Trainer, loss: Tensor, gradients: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Raise an `AssertionError` unless the trainer's loss and gradients are these; clears its gradients.

    `tolerance`: of gradients; losses agree to a tenth of it.
    """
    found_loss, found = trainer.whole_loss(), trainer.gradients()
    trainer.optimizer.zero_grad(set_to_none=True)
    if abs(found_loss - loss) > 0.1 * tolerance * abs(loss):
        raise AssertionError(f"{trainer.name}: loss {found_loss:.6f}, expected {loss:.6f}")
    if found.keys() != gradients.keys():
        raise AssertionError(f"{trainer.name}: gradients of {found.keys() ^ gradients.keys()} are missing or too many")
    floor = 1e-3 * sum(float(g.norm()) ** 2 for g in gradients.values()) ** 0.5
    for name, gradient in gradients.items():
        error = float((found[name] - gradient).norm()) / max(float(gradient.norm()), floor)
        if not error <= tolerance:
            raise AssertionError(f"{trainer.name}: the gradient of {name} is off by {error:.1e}")


# ---- the page ----

INTRODUCTION = """\
# Lowered programs against hand-written ones

Written by `make bench` on {date}: {cpus}-core CPU, torch {torch}, two gloo ranks with one thread each, {rounds}
interleaved rounds. In every round each contender takes one step of the same GPT ({layers} blocks of width {hidden},
{heads} heads, vocabulary {vocab}, {parameters:.1f} M parameters, no dropout, fp32) on the same {batch} × {seq} tokens.
A round's ratio is ours to theirs, each as slow as its slowest rank. Reported is the median of the ratios (and their
quartiles): of forward and backward alone, of the whole step with AdamW (`fused=True` for all; gradients set to None),
and of the CPU time of forward and backward, all threads together, which other work on the machine disturbs least.
Before the first round, every contender's loss and gradients were seen to equal the single process's.

| ours | theirs | forward and backward | whole step | CPU time | ours | theirs |
|---|---|---|---|---|--:|--:|
"""
NOTES = """
![ratios of the table](speed-ratios.svg)

The last two columns are medians of forward and backward. Layouts are the same on both sides: *tuned DDP* is
`DistributedDataParallel(gradient_as_bucket_view=True, static_graph=True)`; *fully_shard* is FSDP2 on every block and
on the root; both tensor-parallel baselines split attention by heads and the MLP by hidden units, the embeddings and the
head by output, and gather what those two give. *One rank* is the overhead of a captured and lowered program over the
module itself.
"""


def page(size: Size, num_rounds: int, both: dict[str, Samples], alone: dict[str, Samples]) -> str:
    """The results as Markdown."""
    head = INTRODUCTION.format(
        date=date.today().isoformat(),
        cpus=os.cpu_count(),
        torch=torch.__version__,
        rounds=num_rounds,
        parameters=num_parameters(size) / 1e6,
        **{name: getattr(size, name) for name in size.__dataclass_fields__},
    )
    return head + "\n".join([*(row(p, both) for p in PAIRS), row(SINGLE, alone)]) + "\n" + NOTES


def chart(text: str) -> str:
    """The ratios of the page's table, as SVG."""
    found = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([\d.]+) \(([\d.]+)–([\d.]+)\)", text, re.MULTILINE)
    rows = [(f"{ours} / {theirs}", float(low), float(mid), float(high)) for ours, theirs, mid, low, high in found]
    return ranges("Time of forward and backward, ours to theirs", "median and quartiles; below 1: faster", rows)


def row(pair: Pair, times: dict[str, Samples]) -> str:
    """One line of the table."""
    ours, theirs = times[pair.ours], times[pair.theirs]
    ratios = [str(ratio(ours, theirs, quantity)) for quantity in (FORWARD_BACKWARD, STEP, CPU)]
    ms = [f"{quartiles(t[:, FORWARD_BACKWARD]).median * 1e3:.0f} ms" for t in (ours, theirs)]
    return "| " + " | ".join([pair.ours, pair.theirs, *ratios, *ms]) + " |"


def num_parameters(size: Size) -> int:
    """Return the number of parameters of the benchmark's GPT."""
    block = 12 * size.hidden**2 + 13 * size.hidden
    return (2 * size.vocab + size.seq) * size.hidden + size.layers * block + 2 * size.hidden


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and write the page; 1 where a median ratio is above the bound."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dry", action="store_true", help="print the page, do not write it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = Size()
    both, alone = two_ranks(size, options.rounds), one_rank(size, options.rounds)
    text = page(size, options.rounds, both, alone)
    print(text)
    if not options.dry:
        _, heading, rest = PAGE.read_text().partition("\n## ")  # of what `bench.pipelines` writes
        PAGE.write_text(text + heading + rest)
        PAGE.with_name("speed-ratios.svg").write_text(chart(text))
    ratios = {p: ratio(t[p.ours], t[p.theirs]).median for p, t in [*((p, both) for p in PAIRS), (SINGLE, alone)]}
    slow = [f"{p.ours} takes {r:.2f} × {p.theirs}" for p, r in ratios.items() if r > BOUND]
    for line in slow:
        print(f"above {BOUND}: {line}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
