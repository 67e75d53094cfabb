"""Measure the start of one rank, of a model that is larger than this machine: a section of docs/large.md.

    python -m bench.start [--dry] [--layers N] [--case drawn|files]

A Llama of 24 billion parameters in bf16 is planned for 64 H100, in ZeRO-3. Rank 0 of them is started here, by
`shardwright.compile` with that plan, in a process of its own. Its group is torch's `fake` one: the other ranks are not
there, and count as equal to it. Once it draws its weights, and once it reads them from safetensors files, which are
sparse: they have the model's size, and zeros. Memory is the resident set beyond that of a process which has started a
tiny model, and so has imported everything, at its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig

import shardwright as sw
from shardwright.lowering.module import ParallelModule

PAGE = Path(__file__).resolve().parents[1] / "docs" / "large.md"
HEADING = "## What it takes"
LAYERS, NODES = 58, 8
CASES = ("drawn", "files")
MOST = 1.15
"""The most that a rank may hold at once, as a multiple of its shards, beyond one whole parameter."""


@dataclass(frozen=True)
class Start:
    """Bytes of the model, of this rank's shards, of the largest parameter and at the peak; seconds of CPU time."""

    case: str
    model_bytes: int
    shard_bytes: int
    largest_bytes: int
    peak_bytes: int
    cpu_s: float

    @property
    def allowed_bytes(self) -> float:
        return MOST * self.shard_bytes + self.largest_bytes


def example(layers: int, width: int = 6144) -> tuple[nn.Module, dict[str, Tensor]]:
    """A Llama without memory, and a batch of one sequence for each device."""
    config = LlamaConfig(
        vocab_size=128256 * width // 6144, hidden_size=width, intermediate_size=width * 8 // 3,
        num_hidden_layers=layers, num_attention_heads=48, num_key_value_heads=8, max_position_embeddings=4096,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with sw.fake():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    ids = torch.zeros(8 * NODES, 4096, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}


def write_plan(file: Path, layers: int) -> None:
    model, batch = example(layers)
    cluster = sw.Cluster.preset("dgx-h100", nodes=NODES)
    found = sw.plan(model, cluster, kwargs=batch, mesh={"x": cluster.num_devices}, roles=["zero"])
    found.save(file)


def write_files(folder: Path, layers: int) -> None:
    """Sparse safetensors of the model, a file for each layer and one for the rest, with their index."""
    model, _ = example(layers)
    by_file = dict[str, dict[str, Tensor]]()
    for name, value in model.state_dict().items():
        part = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        by_file.setdefault(f"{part}.safetensors", {})[name] = value
    for file, tensors in by_file.items():
        header, end = dict[str, Any](), 0
        for name, value in tensors.items():
            header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [end, end + value.nbytes]}
            end += value.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
    index = {"weight_map": {name: file for file, tensors in by_file.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


# ---- one rank ----


@contextmanager
def among(size: int) -> Generator[None]:
    """Be rank 0 of so many, of which the others are not there and say whatever this one says."""

    def all_gather_object(rows: list[object], row: object) -> None:
        rows[:] = [row] * len(rows)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with mock.patch.object(dist, "all_gather_object", all_gather_object):
            yield
    finally:
        dist.destroy_process_group()


def resident_bytes() -> tuple[int, int]:
    """The resident set of this process, now and at its peak."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def started(case: str, plan: Path, layers: int, weights: Path | None) -> Start:
    """Start one rank in this process."""
    found = sw.Plan.load(plan)
    warm_up()
    before, begin = resident_bytes()[0], cpu_s()
    model, batch = example(layers)
    with among(found.cluster.num_devices):
        parallel = sw.compile(model, kwargs=batch, plan=found, check_capture="never", weights=weights)
        seconds, peak = cpu_s() - begin, resident_bytes()[1] - before
        sizes = [value.nbytes for value in model.parameters()]
        return Start(case, sum(sizes), shard_bytes(parallel), max(sizes), peak, seconds)


def warm_up() -> None:
    """Import everything, by the start of a tiny model."""
    model, batch = example(2, 96)
    with among(1):
        sw.compile(model, sw.Cluster.local(1), kwargs={name: ids[:2, :32] for name, ids in batch.items()})


def shard_bytes(parallel: ParallelModule) -> int:
    return sum(held.inside.nbytes for held in parallel._store.unique)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def in_a_process(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "bench.start", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


# ---- the section ----


INTRODUCTION = """\
{heading}

A Llama of {billions:.1f} billion parameters in bf16 ({layers} layers of width 6144), planned for {devices} H100 in
ZeRO-3. One rank's part was started by `python -m bench.start` on {date}: {cpus} cores, no GPU, {memory:.0f} GB, torch
{torch}. The other ranks are not there. *peak*: the largest resident set beyond that of a process that has imported
everything; capture is part of it. *allowed*: {most} times the shards, and the largest parameter. The files are sparse,
so reading them costs less than from a disk.

| values | model, GB | shards, GB | largest parameter, GB | peak, GB | allowed, GB | CPU time, s |
|---|--:|--:|--:|--:|--:|--:|
"""


def section(found: Sequence[Start], layers: int) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    head = INTRODUCTION.format(
        heading=HEADING, billions=found[0].model_bytes / 2e9, layers=layers, devices=8 * NODES, most=MOST,
        date=date.today().isoformat(), cpus=os.cpu_count(), memory=memory, torch=torch.__version__,
    )  # fmt: skip
    rows = [
        f"| {own.case} | {own.model_bytes / 1e9:.1f} | {own.shard_bytes / 1e9:.2f} | {own.largest_bytes / 1e9:.2f} "
        f"| {own.peak_bytes / 1e9:.2f} | {own.allowed_bytes / 1e9:.2f} | {own.cpu_s:.0f} |"
        for own in found
    ]
    return head + "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="print the section, do not write it")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--do", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    match given.do:
        case ["plan", file]:
            write_plan(Path(file), given.layers)
        case ["files", folder]:
            write_files(Path(folder), given.layers)
        case [what, plan, *weights]:
            own = started(what, Path(plan), given.layers, Path(weights[0]) if weights else None)
            print(json.dumps(vars(own)))
        case _:
            return measure(given.layers, given.case or CASES, dry=given.dry)
    return 0


def measure(layers: int, cases: Sequence[str], *, dry: bool) -> int:
    """Start a rank in every case; 1 if one of them took more memory than it may."""
    found, size = list[Start](), ("--layers", str(layers))
    with tempfile.TemporaryDirectory() as folder:
        plan, files = Path(folder) / "plan.json", Path(folder) / "files"
        in_a_process(*size, "--do", "plan", str(plan))
        files.mkdir()
        in_a_process(*size, "--do", "files", str(files))
        for case in cases:
            told = in_a_process(*size, "--do", case, str(plan), *([str(files)] if case == "files" else []))
            found.append(Start(**json.loads(told)))
            print(f"{case}: {found[-1].peak_bytes / 1e9:.2f} GB, {found[-1].cpu_s:.0f} s", file=sys.stderr, flush=True)
    text = section(found, layers)
    print(text)
    if not dry:
        page = PAGE.read_text(encoding="utf-8").partition(f"\n{HEADING}")[0].rstrip()
        PAGE.write_text(f"{page}\n\n{text}", encoding="utf-8")
    return int(any(own.peak_bytes > own.allowed_bytes for own in found))


if __name__ == "__main__":
    sys.exit(main())
