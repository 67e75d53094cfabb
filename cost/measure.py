"""What one rank of a calibration runs: `python -m shardwright.cost.measure rank store spec result`.

All ranks measure at once, as they run at once in training. Every rank takes the same number of samples of everything,
so that collectives pair up; a time is the median over samples, then the maximum over ranks. Rank 0 prints one line of
progress per stage and writes the figures to `result` as JSON. `spec` is a `Workload` as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured. Sizes of collectives are of the full tensor of a group, as `cost.communication` counts them."""

    num_ranks: int
    num_threads: int
    timeout_s: float
    matmul_sizes: tuple[int, ...] = (128, 256, 512, 1024)
    memory_bytes: tuple[int, ...] = (2**20, 2**23, 2**25)
    collective_bytes: tuple[int, ...] = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**25)
    seconds_per_point: float = 0.06

    @property
    def group_sizes(self) -> list[int]:
        """Sizes of groups to measure collectives on: every divisor of the number of ranks but 1."""
        return [size for size in range(2, self.num_ranks + 1) if self.num_ranks % size == 0]


class _Rank:
    """One rank between `init_process_group` and the last barrier."""

    def __init__(self, rank: int, workload: Workload) -> None:
        self.rank = rank
        self.workload = workload

    def progress(self, stage: str) -> None:
        if self.rank == 0:
            sys.stdout.write(f"{stage}\n")
            sys.stdout.flush()

    def measure(self) -> dict[str, Any]:
        with_groups = {size: self._group(size) for size in self.workload.group_sizes}
        self.progress("matmul")
        matmul = [(size, self._time(_matmul(size))) for size in self.workload.matmul_sizes]
        self.progress("memory")
        memory = [(size, self._time(_add(size))) for size in self.workload.memory_bytes]
        self.progress("dispatch")
        overhead_s = self._time(_dispatch(_DISPATCHED)) / _DISPATCHED
        collectives: list[tuple[str, int, int, float]] = []
        for size, group in with_groups.items():
            for num_bytes in self.workload.collective_bytes:
                self.progress(f"collectives of {size} ranks, {num_bytes} bytes")
                for name, call in _collectives(size, group, num_bytes).items():
                    collectives.append((name, size, num_bytes, self._time(call)))
        return {"matmul": matmul, "memory": memory, "op_overhead_s": overhead_s, "collectives": collectives}

    def _group(self, size: int) -> Any:  # noqa: ANN401  a c10d process group
        """This rank's group of `size` neighbours; every rank makes all of them, in the same order."""
        import torch.distributed as dist

        starts = range(0, self.workload.num_ranks, size)
        groups = [dist.new_group(list(range(start, start + size))) for start in starts]
        return groups[self.rank // size]

    def _time(self, call: Callable[[], object]) -> float:
        """Seconds of `call`: warmed up, median of as many samples as the time per point allows, slowest rank."""
        call()
        call()
        once = self._slowest(_seconds(call))
        samples = min(200, max(5, ceil(self.workload.seconds_per_point / max(once, 1e-6))))
        return self._slowest(statistics.median(_seconds(call) for _ in range(samples)))

    def _slowest(self, seconds: float) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()


_DISPATCHED = 500


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _matmul(size: int) -> Callable[[], object]:
    import torch

    a, b = torch.randn(size, size), torch.randn(size, size)
    return lambda: a @ b


def _add(num_bytes: int) -> Callable[[], object]:
    """Read two tensors and write a new one, as most operators between matmuls do: 3 · `num_bytes`."""
    import torch

    a, b = torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)
    return lambda: a + b


def _dispatch(count: int) -> Callable[[], object]:
    """`count` operators on next to nothing, recorded for backward."""
    import torch

    x = torch.ones(8, requires_grad=True)

    def run() -> None:
        for _ in range(count):
            x * 2.0  # pyright: ignore[reportUnusedExpression]

    return run


def _collectives(size: int, group: Any, num_bytes: int) -> dict[str, Callable[[], object]]:  # noqa: ANN401
    import torch
    import torch.distributed as dist

    num_elements = ceil(num_bytes / 4 / size**2) * size**2  # divides into shards, and these among the group
    full, shard = torch.zeros(num_elements), torch.zeros(num_elements // size)
    exchanged = torch.zeros_like(shard)
    first = dist.get_process_group_ranks(group)[0]
    return {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: dist.all_gather_single(full, shard, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(exchanged, shard, group=group),
        "broadcast": lambda: dist.broadcast(full, first, group=group),
    }


def main(arguments: list[str]) -> None:
    """Run one rank; `arguments` are its rank, the rendezvous file, the workload as JSON and where results go."""
    rank, store, spec, result = int(arguments[0]), *arguments[1:]
    workload = Workload(**json.loads(spec))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(workload.num_threads)
    timeout = timedelta(seconds=workload.timeout_s)
    world, place = workload.num_ranks, f"file://{store}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world, timeout=timeout)
    try:
        figures = _Rank(rank, workload).measure()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if rank == 0:
        figures |= {"torch": torch.__version__, "workload": asdict(workload)}
        Path(result).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
