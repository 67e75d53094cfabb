"""Attention in a ring under a sliding window: what is sent and computed if ranks know which keys they see.

A window of 256 of 4,096 tokens, as a mask of truth values; forward and backward on gloo ranks. Bytes are exact. CPU
time is that of all ranks together, the median over interleaved rounds. Run it with `python -m bench.ring_bands`; it
prints a table of docs/ring.md.
"""

from __future__ import annotations

import time
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime.attention import sdpa
from shardwright.pcg.slices import Sees

TOKENS, WINDOW, HEADS, WIDTH = 4096, 256, 4, 64
RANKS = (2, 4, 8)
ROUNDS = 5


class Cost(NamedTuple):
    """Bytes that a rank sends, and seconds of its CPU time, forward and backward."""

    sent: int
    seconds: float


def cost(axis: Axis, sees: Sees | None) -> Cost:
    own = slice(axis.rank * TOKENS // axis.size, (axis.rank + 1) * TOKENS // axis.size)
    places = torch.arange(TOKENS)
    rows = places[own, None]
    q, k, v = (torch.randn(1, HEADS, len(rows), WIDTH, requires_grad=True) for _ in range(3))
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as batches:
        start = time.process_time()
        y = sdpa(False, None, own.start, q, k, v, (places <= rows) & (places > rows - WINDOW), ring=axis, sees=sees)
        y.backward(torch.ones_like(y))
        seconds = time.process_time() - start
    messages = (message for call in batches.call_args_list for message in call.args[0])
    return Cost(sum(m.tensor.nbytes for m in messages if m.op is dist.isend), seconds)


def costs(sees: Sees) -> list[tuple[Cost, Cost]]:
    """Return the costs of each round, without and with what is known of the mask."""
    torch.set_num_threads(1)
    axis = Axis("cp", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    return [(cost(axis, None), cost(axis, sees)) for _ in range(ROUNDS + 1)][1:]


def row(num_ranks: int) -> str:
    """Return a row of the table."""
    sees = Sees(1 - WINDOW, 0, TOKENS // num_ranks)
    by_rank = run_ranks(costs, num_ranks, 300.0, args=(sees,))
    sent = [sum(rank[0][way].sent for rank in by_rank) for way in (0, 1)]
    seconds = [[sum(rank[n][way].seconds for rank in by_rank) for n in range(ROUNDS)] for way in (0, 1)]
    ratios = sorted(known / unknown for unknown, known in zip(*seconds, strict=True))
    low, middle, high = ratios[0], ratios[ROUNDS // 2], ratios[-1]
    return f"| {num_ranks} | {sent[0] / 1e6:.1f} MB | {sent[1] / sent[0]:.2f} | {middle:.2f} ({low:.2f}–{high:.2f}) |"


def main() -> None:
    print("| ranks | all rounds send | sent ÷ | CPU time ÷ |\n|--:|--:|--:|--:|")
    for num_ranks in RANKS:
        print(row(num_ranks), flush=True)


if __name__ == "__main__":
    main()
