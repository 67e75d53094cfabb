"""Measure the cost of another shape of batch, or of the other mode, in a compiled model: `python -m bench.shapes`.

A GPT of 12 layers is compiled on two gloo ranks. The first call with each further shape makes a program. The table has
the CPU seconds of that call on rank 0, which captures and plans; of the same call in a later run, for which the program
was kept; and of the second call. Beside them are those of rank 1. The last column says by how many bytes parameters,
gradients and optimizer states have grown.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import shardwright as sw
from bench.gpt import Size, build, make_batch
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks

SIZE = Size(batch=16, seq=96, layers=12)
FIRST = 16, 64
CALLS = ((8, 64, True), (16, 96, True), (3, 64, True), (16, 64, False))
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"mesh": {"x": 2}, "roles": "zero"},
    "tensor": {"mesh": {"x": 2}, "roles": "tensor"},
    "two stages": {"mesh": {"x": 1}, "stages": 2, "microbatches": 4},
}
_LIMIT_S = 300.0


class Cost(NamedTuple):
    """The CPU seconds of the first call and the second, and the bytes by which what is trained has grown."""

    call: str
    first_s: float
    second_s: float
    grown_bytes: int


def measure(plan: str) -> list[Cost]:
    """Return this rank's costs of each call."""
    model, batch = build(SIZE), _batch(*FIRST)
    parallel = sw.compile(model, sw.Cluster.local(2), kwargs=batch, check_capture="never", **PLANS[plan])
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    _step(parallel, batch)
    optimizer.step()
    found = list[Cost]()
    for rows, length, training in CALLS:
        parallel.train(training)
        other = _batch(rows, length)
        before, name = _bytes(parallel, optimizer), f"{rows} × {length}{'' if training else ', eval'}"
        first_s, second_s = (_step_s(parallel, other) for _ in range(2))
        found.append(Cost(name, first_s, second_s, _bytes(parallel, optimizer) - before))
    return found


def _batch(rows: int, length: int) -> dict[str, Tensor]:
    return make_batch(replace(SIZE, batch=rows, seq=length))


def _step_s(parallel: ParallelModule, batch: dict[str, Tensor]) -> float:
    start = time.process_time()
    _step(parallel, batch)
    return time.process_time() - start


def _step(parallel: ParallelModule, batch: dict[str, Tensor]) -> None:
    if parallel.training:
        parallel.forward_backward(**batch)
    else:
        with torch.no_grad():
            parallel(**batch)


def _bytes(parallel: ParallelModule, optimizer: torch.optim.Optimizer) -> int:
    held = [*parallel.parameters(), *(p.grad for p in parallel.parameters() if p.grad is not None)]
    held += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    locally = [x.to_local() if isinstance(x, DTensor) else x for x in held]
    return sum(x.untyped_storage().nbytes() for x in locally)


def main() -> int:
    """Print the table."""
    print("| plan | batch | rank 0, first call | kept | second | rank 1, first call | second | more bytes |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for plan in PLANS:
            (own, others), (later, _) = (run_ranks(measure, 2, _LIMIT_S, args=(plan,)) for _ in range(2))
            for first, other, kept in zip(own, others, later, strict=True):
                seconds = first.first_s, kept.first_s, first.second_s, other.first_s, other.second_s
                times = " | ".join(f"{s:.2f} s" for s in seconds)
                print(f"| {plan} | {first.call} | {times} | {max(first.grown_bytes, other.grown_bytes)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
