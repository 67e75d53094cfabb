"""Interleaved rounds: every contender takes a step in every round, so that what disturbs the machine disturbs all."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from bench.trainers import Trainer
from shardwright.cost.calibration.workload import trimmed_mean

Samples = np.ndarray
"""Seconds, [round, 3]: forward and backward, the whole step with the optimizer, and the CPU time of the former."""
FORWARD_BACKWARD, STEP, CPU = range(3)


PROGRESS_EVERY = 10


@dataclass(frozen=True)
class Quartiles:
    """The median and the quartiles of some samples."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def quartiles(samples: Sequence[float] | Samples) -> Quartiles:
    low, median, high = (float(q) for q in np.quantile(np.asarray(samples), [0.25, 0.5, 0.75]))
    return Quartiles(median, low, high)


def noise(samples: Sequence[float]) -> float:
    """Return the distance of the odd samples' mean from that of the even ones, as a share; see `trimmed_mean`."""
    odd, even = (trimmed_mean(half) for half in (samples[::2], samples[1::2]))
    return abs(odd / even - 1)


def run_rounds(trainers: Sequence[Trainer], num_rounds: int, num_warmup: int = 3) -> dict[str, Samples]:
    """Time every trainer on this rank. Who goes first changes from round to round."""
    for _ in range(num_warmup):
        for trainer in trainers:
            trainer.step()
    times = {t.name: np.zeros((num_rounds, 3)) for t in trainers}
    gc.collect()
    gc.disable()
    try:
        for number in range(num_rounds):
            if number % PROGRESS_EVERY == 0 and dist.get_rank() == 0:
                print(f"round {number} of {num_rounds}", file=sys.stderr, flush=True)
            first = number % len(trainers)
            for trainer in (*trainers[first:], *trainers[:first]):
                times[trainer.name][number] = _timed(trainer)
    finally:
        gc.enable()
    return times


def _timed(trainer: Trainer) -> tuple[float, float, float]:
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    trainer.forward_backward()
    middle, middle_cpu = time.perf_counter(), time.process_time()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    return middle - start, time.perf_counter() - start, middle_cpu - start_cpu


def slowest_rank(by_rank: Sequence[Mapping[str, Samples]]) -> dict[str, Samples]:
    """Return, per contender, round and quantity, the time of the rank that took longest."""
    return {name: np.max([times[name] for times in by_rank], axis=0) for name in by_rank[0]}


def ratio(ours: Samples, theirs: Samples, quantity: int = FORWARD_BACKWARD) -> Quartiles:
    """Ours to theirs, round by round."""
    return quartiles(ours[:, quantity] / theirs[:, quantity])
