"""Measure how long a save holds a step up: `python -m bench.saving`.

A GPT of 38 million parameters trains with AdamW on two gloo ranks under ZeRO-3. Each round times, on rank 0, a save
that waits, a save beside further steps, and the load. The bytes are those of all ranks together; times are medians:
those of the clock, and the CPU time of the thread that calls, which other processes on the machine change little.
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


def measure(place: str) -> tuple[float, dict[str, list[tuple[float, float]]]]:
    """Return the bytes saved, and by kind of call the seconds of each, of the clock and of CPU time."""
    batch = make_batch(SIZE)
    words = {"mesh": {"x": 2}, "roles": "zero", "check_capture": "never"}
    parallel = sw.compile(build(SIZE), sw.Cluster.local(2), kwargs=batch, **words)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4, fused=True)
    folder, seconds = Path(place), dict[str, list[tuple[float, float]]]()

    def timed(name: str, do: Callable[[], object]) -> object:
        dist.barrier()
        start, cpu = time.perf_counter(), time.thread_time()
        result = do()
        seconds.setdefault(name, []).append((time.perf_counter() - start, time.thread_time() - cpu))
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
    num_bytes = float(sum(file.stat().st_size for file in folder.rglob("*.distcp")))
    return num_bytes, {name: times[1:] for name, times in seconds.items()}


def main() -> None:
    """Print the table."""
    place = tempfile.mkdtemp()
    try:
        num_bytes, times = run_ranks(measure, 2, _LIMIT_S, args=(place,))[0]
    finally:
        shutil.rmtree(place)
    columns = "seconds | of a save that waits | CPU seconds of the caller"
    sys.stdout.write(f"two ranks, {num_bytes / 1e6:.0f} MB\n\n| | {columns} |\n|---|---:|---:|---:|\n")
    whole = median(clock for clock, _ in times["save"])
    for name, own in times.items():
        clock, cpu = (median(column) for column in zip(*own, strict=True))
        sys.stdout.write(f"| {name} | {clock:.3f} | {clock / whole:.1%} | {cpu:.3f} |\n")


if __name__ == "__main__":
    main()
