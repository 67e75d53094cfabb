"""Compare the step of torch's Muon on sharded parameters with that of `shardwright.Muon`: `python -m bench.muon`.

The linears of a GPT of 4 layers, on two gloo ranks, one thread each. The table has CPU seconds of a step, medians of
interleaved rounds, on the slower rank. One process alone is beside them.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import torch
from torch import nn

import shardwright as sw
from bench.gpt import Size, build, make_batch
from shardwright.lowering.ranks.launch import run_ranks

WIDTHS = 64, 256
PLANS: dict[str, dict[str, Any]] = {
    "data": {"mesh": {"x": 2}, "roles": "data"},
    "ZeRO-3": {"mesh": {"x": 2}, "roles": "zero"},
    "tensor": {"mesh": {"x": 2}, "roles": "tensor"},
}
_ROUNDS, _LIMIT_S = 5, 300.0


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]


def measure(size: Size, plan: str | None) -> list[float]:
    """Return the median seconds of a step of each optimizer on this rank: torch's, and ours where there is a plan."""
    model, batch = build(size), make_batch(size)
    trained: Any = model
    if plan is not None:
        trained = sw.compile(model, sw.Cluster.local(2), kwargs=batch, check_capture="never", **PLANS[plan])
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Muon(_matrices(trained), lr=1e-4)]
    optimizers += [sw.Muon(_matrices(trained), parallel=trained, lr=1e-4)] if plan is not None else []
    if plan is None:
        trained(**batch).backward()
    else:
        trained.forward_backward(**batch)
    times = [list[float]() for _ in optimizers]
    for _ in range(_ROUNDS + 1):
        for found, optimizer in zip(times, optimizers, strict=True):
            start = time.process_time()
            optimizer.step()
            found.append(time.process_time() - start)
    return [median(found[1:]) for found in times]


def main() -> int:
    """Print the table."""
    print("| width | plan | torch.optim.Muon | shardwright.Muon | one process |")
    print("|--:|---|--:|--:|--:|")
    for width in WIDTHS:
        size = Size(batch=4, seq=16, hidden=width)
        ((alone_s,),) = run_ranks(measure, 1, _LIMIT_S, args=(size, None))
        for plan in PLANS:
            theirs_s, ours_s = map(max, zip(*run_ranks(measure, 2, _LIMIT_S, args=(size, plan)), strict=True))
            row = " | ".join(f"{1e3 * s:.0f} ms" for s in (theirs_s, ours_s, alone_s))
            print(f"| {width} | {plan} | {row} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
