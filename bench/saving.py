"""Measure how long a save holds a step up: `python -m bench.saving`.

A GPT of 38 million parameters trains with AdamW on two gloo ranks under ZeRO-3. Each round times, on rank 0, a save
that waits, a save beside further steps, and the load. The bytes are those of all ranks together; times are medians.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import shardwright as sw
from bench.gpt import Size, build, make_batch
from shardwright.lowering.ranks.launch import run_ranks

SIZE = Size(batch=2, seq=32, layers=12, hidden=512)
ROUNDS = 5
_LIMIT_S = 600.0


def measure(place: str) -> dict[str, list[float]]:
    """Return the seconds of each kind of call."""
    batch = make_batch(SIZE)
    words = {"mesh": {"x": 2}, "roles": "zero", "check_capture": "never"}
    parallel = sw.compile(build(SIZE), sw.Cluster.local(2), kwargs=batch, **words)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4, fused=True)
    folder, found = Path(place), dict[str, list[float]]()

    def timed(name: str, do: Callable[[], object]) -> object:
        dist.barrier()
        start = time.perf_counter()
        result = do()
        found.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def train() -> None:
        parallel.forward_backward(**batch)
        optimizer.step()
        optimizer.zero_grad()

    train()

    def save(step: int, *, wait: bool) -> sw.Saving:
        return sw.save(folder, parallel, optimizer, step=step, keep=1, wait=wait)

    for number in range(ROUNDS + 1):  # the first round is not counted
        timed("step", train)
        timed("save", partial(save, 2 * number, wait=True))
        saving = timed("save beside steps", partial(save, 2 * number + 1, wait=False))
        assert isinstance(saving, sw.Saving)
        timed("step beside a save", train)
        saving.wait()
        timed("load", partial(sw.load, folder, parallel, optimizer))
    found["bytes"] = [float(sum(file.stat().st_size for file in folder.rglob("*.distcp")))]
    return {name: times[1:] or times for name, times in found.items()}


def main() -> None:
    """Print the table."""
    place = tempfile.mkdtemp()
    try:
        found = run_ranks(measure, 2, _LIMIT_S, args=(place,))[0]
    finally:
        shutil.rmtree(place)
    (num_bytes,), seconds = found.pop("bytes"), {name: median(times) for name, times in found.items()}
    sys.stdout.write(f"two ranks, {num_bytes / 1e6:.0f} MB\n\n| | seconds | of a save that waits |\n|---|---:|---:|\n")
    for name, own in seconds.items():
        sys.stdout.write(f"| {name} | {own:.3f} | {own / seconds['save']:.1%} |\n")


if __name__ == "__main__":
    main()
