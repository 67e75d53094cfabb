"""CPU time from plan.json to the end of the first step, beside hand-written code: a section of docs/speed.md.

    python -m bench.first_step [--layers 12 48] [--rounds 5]

Each of two gloo ranks is a process of its own, as `torchrun` starts them, and counts its CPU time from the moment at
which torch is imported: imports, the model, compile, the optimizer, one step. Contenders take turns, and Python's
bytecode is kept, as it is where packages are installed. Printed are medians over rounds, of rank 0 and of rank 1. The
capture of the model is kept from the start before, and in one row it is not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch

STARTED = time.process_time()
PORT = 29611
NUM_RANKS = 2


def start(name: str, layers: int, plan: str) -> None:
    """Take the first step of a contender, in this process, as one of the ranks."""
    from bench.gpt import Size, make_batch  # what is loaded from here on counts

    torch.set_num_threads(1)
    size = Size(layers=layers)
    model, step = MAKERS[name](size, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step(make_batch(size))
    optimizer.step()


def _ddp(size: object, plan: str) -> tuple[torch.nn.Module, Callable[..., object]]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = _model(size)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, lambda batch: wrapped(**_rows(batch, dist.get_rank())).backward()


def _fsdp(size: object, plan: str) -> tuple[torch.nn.Module, Callable[..., object]]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = _model(size)
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(block)
    fully_shard(model)
    return model, lambda batch: model(**_rows(batch, dist.get_rank())).backward()


def _model(size: object) -> torch.nn.Module:
    import torch.distributed as dist

    from bench.gpt import Size, build

    assert isinstance(size, Size)
    dist.init_process_group("gloo")
    return build(size)


def _rows(batch: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {name: value.chunk(NUM_RANKS)[rank] for name, value in batch.items()}


def _ours(size: object, plan: str) -> tuple[torch.nn.Module, Callable[..., object]]:
    import shardwright as sw
    from bench.gpt import Size, build, make_batch

    assert isinstance(size, Size)
    parallel = sw.compile(build(size), kwargs=make_batch(size), plan=plan)
    return parallel, lambda batch: parallel.forward_backward(**batch)


KEPT, FIRST = "our data parallel", "our data parallel, nothing kept"
MAKERS = {"DDP": _ddp, "fully_shard": _fsdp, KEPT: _ours, FIRST: _ours}


# ---- the table ----


def make_plan(layers: int, file: Path) -> None:
    import shardwright as sw
    from bench.gpt import Size, build, make_batch

    size = Size(layers=layers)
    model, cluster = build(size), sw.Cluster.local(NUM_RANKS)
    found = sw.plan(
        model, cluster, kwargs=make_batch(size), mesh={"x": NUM_RANKS}, roles=["data"], check_capture="first"
    )
    found.save(file)


def cpu_s(name: str, layers: int, plan: Path, cache: Path) -> list[float]:
    """Start all ranks of a contender, and return what each took."""
    known = {"WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS, "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1}
    shared = {key: str(value) for key, value in known.items()} | {
        "MASTER_ADDR": "127.0.0.1", "PYTHONPYCACHEPREFIX": str(cache / "bytecode"), "PYTHONDONTWRITEBYTECODE": "",
        "XDG_CACHE_HOME": str(cache / (f"{time.monotonic_ns()}" if name == FIRST else "kept")),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "bench.first_step", "--do", name, str(layers), str(plan)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)},
                         stdout=subprocess.PIPE, text=True)
        for r in range(NUM_RANKS)
    ]  # fmt: skip
    told = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{name}: a rank failed")
    return [float(text.split()[-1]) for text in told]


def table(all_layers: Sequence[int], num_rounds: int) -> str:
    rows = ["| layers | | rank 0, s | rank 1, s | of DDP's, rank 0 | rank 1 |", "|--:|---|--:|--:|--:|--:|"]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        for layers in all_layers:
            plan = cache / f"plan-{layers}.json"
            make_plan(layers, plan)
            found = {name: list[list[float]]() for name in MAKERS}
            for number in range(num_rounds + 1):  # the first one writes bytecode, and is left out
                for name, times in found.items():
                    times.append(cpu_s(name, layers, plan, cache))
                    print(f"{layers} layers, round {number}, {name}: {times[-1]}", file=sys.stderr, flush=True)
            rows += _rows_of(layers, {name: times[1:] for name, times in found.items()})
    return "\n".join(rows)


def _rows_of(layers: int, found: dict[str, list[list[float]]]) -> list[str]:
    def cells(name: str) -> list[str]:
        ranks = range(NUM_RANKS)
        own = [median(times[rank] for times in found[name]) for rank in ranks]
        pairs = list(zip(found[name], found["DDP"], strict=True))
        ratios = [median(ours[rank] / theirs[rank] for ours, theirs in pairs) for rank in ranks]
        return [f"{x:.2f}" for x in (*own, *ratios)]

    return [f"| {layers} | {name} | {' | '.join(cells(name))} |" for name in found]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.first_step", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--do", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.do is None:
        torch.set_num_threads(1)
        print(table(given.layers, given.rounds))
        return 0
    name, layers, plan = given.do
    start(name, int(layers), plan)
    print(time.process_time() - STARTED, flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
