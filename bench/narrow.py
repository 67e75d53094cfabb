"""CPU time of whole steps with AdamW of a narrow model, where Python counts most: a section of docs/speed.md.

    python -m bench.narrow [--rounds 40]

Two gloo ranks train a GPT of width 64 in our data parallel and in tuned DDP, and one rank trains it in our program and
eagerly. Then one rank updates 773 parameters. Contenders take turns. Printed are medians of each round's ratios, ours
to theirs, of the slowest rank's CPU time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bench.gpt import Size, build, make_batch
from bench.plans import forced, single
from bench.trainers import Trainer, ddp, eager, lowered, serial_graph
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.graph import Graph

SIZE, DEEP = Size(hidden=64, heads=4), Size(hidden=64, heads=4, layers=48)
QUANTITIES = ("forward and backward", "update", "whole step")
UPDATES: dict[str, dict[str, Any]] = {"fused=True": {"fused": True}, "default": {}, "foreach=True": {"foreach": True}}
Seconds = np.ndarray


def steps(graph: Graph, maker: Callable[[Size], Trainer], num_rounds: int) -> list[Seconds]:
    """Return the seconds of both contenders, theirs and ours, [round, quantity], on this rank."""
    torch.set_num_threads(1)
    contenders = [maker(SIZE), lowered(SIZE, graph, "ours")]
    found = [np.zeros((num_rounds + 3, len(QUANTITIES))) for _ in contenders]
    for number in range(num_rounds + 3):
        for trainer, times in zip(contenders, found, strict=True):
            start = time.process_time()
            trainer.forward_backward()
            middle = time.process_time()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
            end = time.process_time()
            times[number] = middle - start, end - middle, end - start
    return [times[3:] for times in found]


def updates(graph: Graph, num_rounds: int) -> list[str]:
    """Return rows of the update of many parameters: the first one, and later ones."""
    torch.set_num_threads(1)
    plain, rows = build(DEEP), list[str]()
    parallel = lower(graph, build(DEEP))
    plain(**make_batch(DEEP)).backward()
    parallel.forward_backward(**make_batch(DEEP))
    for name, options in UPDATES.items():
        own, other = (torch.optim.AdamW(module.parameters(), **options) for module in (parallel, plain))
        pairs = np.array([[_timed(own.step), _timed(other.step)] for _ in range(num_rounds + 1)]) * 1e3
        first, (ours, theirs) = pairs[0], np.median(pairs[1:], axis=0)
        rows.append(f"| AdamW, {name} | {first[0]:.1f} | {first[1]:.1f} | {ours:.1f} | {theirs:.1f} |")
    return rows


def _timed(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def row(name: str, by_rank: Sequence[list[Seconds]]) -> str:
    theirs, ours = (np.max([times[number] for times in by_rank], axis=0) for number in range(2))
    ratios = np.median(ours / theirs, axis=0)
    return f"| {name} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} | {np.median(ours[:, -1]) * 1e3:.1f} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.narrow", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args(arguments).rounds
    torch.set_num_threads(1)
    serial, deep = serial_graph(SIZE), single().plan(serial_graph(DEEP), "GPT").graph
    data = next(case for case in forced(2) if case.name == "data").plan(serial, "GPT").graph
    print(f"| CPU time, ours to theirs | {' | '.join(QUANTITIES)} | ours, ms |\n|---|--:|--:|--:|--:|")
    print(row("data parallel / tuned DDP", run_ranks(steps, 2, 600.0, args=(data, ddp, rounds))))
    alone = single().plan(serial, "GPT").graph
    print(row("one rank / eager", run_ranks(steps, 1, 600.0, args=(alone, eager, rounds))))
    print("\n| update of 773 parameters | first, ms | a plain model's | later, ms | a plain model's |")
    print("|---|--:|--:|--:|--:|")
    print("\n".join(run_ranks(updates, 1, 600.0, args=(deep, rounds))[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
