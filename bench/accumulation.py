"""Steps as people set them up by hand: accumulation, ZeRO's lifetimes, checkpoints and autocast with DDP and FSDP2.

Two gloo ranks with one thread each train the same GPT with the same weights on the same global batch. In every round
each contender takes one step; ratios of whole steps are taken within a round, and their median is reported. Peaks are
those of `bench.allocations`, of a step and what is there before it, with DDP's buckets.

    python -m bench.accumulation            writes the last section of docs/microbatches.md
    python -m bench.accumulation --rounds 2 --dry
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from bench.allocations import live_storages, peak_bytes
from bench.gpt import Size, build, make_batch
from bench.plans import Case
from bench.recompute import Resident
from bench.rounds import CPU, STEP, Samples, quartiles, ratio, run_rounds, slowest_rank
from bench.speed import BOUND, TOLERANCE, Pair, check_agreement, num_parameters
from bench.trainers import Trainer, adamw, eager, lowered, my_part, serial_graph, whole_gradients
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.precisions import Precision
from shardwright.pcg.step.recompute import Recompute
from shardwright.search.request.restrict import DATA, ZERO

PAGE = Path(__file__).parents[1] / "docs" / "microbatches.md"
HEADING = "## Against hand-written accumulation"
STEPS_FOR_MEMORY = 2
IN_16_BITS = 0.1
"""How far gradients in bf16 may be from those in fp32; what `shardwright verify` allows."""
Maker = Callable[[Size, str], Trainer]


@dataclass(frozen=True)
class Ours:
    """A step of so many microbatches on two ranks: data parallel, or with one lifetime of all parameters."""

    zero: Zero | None
    many: int
    recompute: Recompute = "none"
    precision: Precision | None = None

    @property
    def name(self) -> str:
        again = "" if self.recompute == "none" else f"{self.recompute} recomputation"
        return ", ".join(filter(None, [self.zero or "data parallel", again, self.precision, str(self.many)]))

    @property
    def execution(self) -> Execution:
        return Execution(self.precision, recompute=self.recompute)

    def plan(self, serial: Graph) -> Graph:
        mesh, role = Mesh.of(mb=self.many, dp=2), DATA if self.zero is None else ZERO
        case = Case(self.name, 2, mesh, (role,), zero=self.zero, recompute=self.recompute)
        return case.plan(serial, "GPT").graph


def accumulated(
    model: Callable[..., Tensor],
    batch: Mapping[str, Tensor],
    many: int,
    around: Callable[[bool], AbstractContextManager[None]],
) -> Callable[[], Tensor]:
    """Forward and backward of microbatches one by one, each `around` whether it is the last; the loss is their mean."""
    parts = [{key: value.chunk(many)[number] for key, value in batch.items()} for number in range(many)]

    def forward_backward() -> Tensor:
        total = torch.zeros(())
        for number, part in enumerate(parts):
            with around(number == many - 1):
                loss = model(**part) / many
                loss.backward()
            total += loss.detach()
        return total

    return forward_backward


def ddp(many: int, size: Size, name: str, *, shards_states: bool = False, in_bf16: bool = False) -> Trainer:
    """DDP with `no_sync` in all microbatches but the last; AdamW, or the same in a ZeroRedundancyOptimizer."""
    model = build(size)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    forward = torch.autocast("cpu", torch.bfloat16)(wrapped) if in_bf16 else wrapped
    step = accumulated(
        forward, my_part(make_batch(size)), many, lambda last: nullcontext() if last else wrapped.no_sync()
    )
    if shards_states:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, fused=True
        )
    else:
        optimizer = adamw(list(model.parameters()))
    return Trainer(name, step, optimizer, lambda: whole_gradients(model), mean_loss=True)


def fsdp(zero: Zero, many: int, size: Size, name: str, *, checkpoints: bool = False) -> Trainer:
    """FSDP2 on every block and on the whole, told to gather and scatter as often as this lifetime does."""
    model, mesh = build(size), init_device_mesh("cpu", (dist.get_world_size(),))
    reshard = None if zero == "zero-3" else False  # None: after forward, but of the root, which backward begins with
    for block in model.blocks:
        if checkpoints:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    whole = fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def around(last: bool) -> AbstractContextManager[None]:
        whole.set_reshard_after_backward(last or zero in ("zero-3", "kept"))
        whole.set_requires_gradient_sync(last or zero != "zero-1")
        return nullcontext()

    step, optimizer = accumulated(model, my_part(make_batch(size)), many, around), adamw(list(model.parameters()))
    return Trainer(name, step, optimizer, lambda: whole_gradients(model), mean_loss=True)


_OURS = (
    *(Ours(zero, 4) for zero in (None, "zero-1", "zero-2", "kept", "zero-3")),
    *(Ours(zero, 1) for zero in ("zero-1", "zero-3")),
    *(Ours("zero-3", many, "full") for many in (1, 4)),
    *(Ours(None, many, precision="amp_bf16") for many in (1, 4)),
)
OURS = {one.name: one for one in _OURS}
WITH_BUCKETS: Mapping[str, Maker] = {
    "DDP, `no_sync`, 4": partial(ddp, 4),
    "DDP, ZeroRedundancyOptimizer, 1": partial(ddp, 1, shards_states=True),
    "DDP, bf16 autocast, 1": partial(ddp, 1, in_bf16=True),
    "DDP, `no_sync`, bf16 autocast, 4": partial(ddp, 4, in_bf16=True),
}
THEIRS: Mapping[str, Maker] = {
    **WITH_BUCKETS,
    "FSDP2, 1": partial(fsdp, "zero-3", 1),
    "FSDP2, 4": partial(fsdp, "zero-3", 4),
    "FSDP2, not resharded after forward, 1": partial(fsdp, "kept", 1),
    "FSDP2, not resharded after forward, 4": partial(fsdp, "kept", 4),
    "FSDP2, resharded after the last backward, 4": partial(fsdp, "zero-2", 4),
    "FSDP2, gradients synchronized once, too, 4": partial(fsdp, "zero-1", 4),
    "FSDP2, checkpoint per block, 1": partial(fsdp, "zero-3", 1, checkpoints=True),
    "FSDP2, checkpoint per block, 4": partial(fsdp, "zero-3", 4, checkpoints=True),
}
PAIRS = (
    Pair("data parallel, 4", "DDP, `no_sync`, 4"),
    Pair("data parallel, amp_bf16, 1", "DDP, bf16 autocast, 1"),
    Pair("data parallel, amp_bf16, 4", "DDP, `no_sync`, bf16 autocast, 4"),
    Pair("zero-1, 1", "DDP, ZeroRedundancyOptimizer, 1"),
    Pair("zero-3, 1", "FSDP2, 1"),
    Pair("zero-3, 4", "FSDP2, 4"),
    Pair("zero-3, full recomputation, 1", "FSDP2, checkpoint per block, 1"),
    Pair("zero-3, full recomputation, 4", "FSDP2, checkpoint per block, 4"),
    Pair("zero-1, 1", "FSDP2, not resharded after forward, 1"),
    Pair("kept, 4", "FSDP2, not resharded after forward, 4"),
    Pair("zero-2, 4", "FSDP2, resharded after the last backward, 4"),
    Pair("zero-1, 4", "FSDP2, gradients synchronized once, too, 4"),
)


def planned(size: Size) -> dict[str, Graph]:
    """Our graphs by name."""
    precisions: set[Precision | None] = {one.precision for one in _OURS}
    serial = {precision: serial_graph(size, precision) for precision in precisions}
    return {name: one.plan(serial[one.precision]) for name, one in OURS.items()}


def trainer(graphs: Mapping[str, Graph], size: Size, name: str) -> Trainer:
    return lowered(size, graphs[name], name, OURS[name].execution) if name in graphs else THEIRS[name](size, name)


def race(graphs: Mapping[str, Graph], size: Size, num_rounds: int) -> dict[str, Samples]:
    """One rank's part: make the contenders, see that they agree with a single process, time them."""
    trainers = [trainer(graphs, size, name) for name in (*graphs, *THEIRS)]
    reference = eager(size)
    loss, gradients = reference.whole_loss(), reference.gradients()
    for found in trainers:
        check_agreement(found, loss, gradients, IN_16_BITS if "bf16" in found.name else TOLERANCE)
    return run_rounds(trainers, num_rounds)


def peak(graphs: Mapping[str, Graph], size: Size, name: str) -> int:
    """Return a step's peak bytes on this rank. DDP's buckets, invisible to Python, are as large as the parameters."""
    before = live_storages()
    resident = Resident(trainer(graphs, size, name), before)
    resident.step()
    resident.step()
    return peak_bytes(resident, STEPS_FOR_MEMORY) + (4 * num_parameters(size) if name in WITH_BUCKETS else 0)


# ---- the page ----

INTRODUCTION = """

Written by `python -m bench.accumulation` on {date}: {cpus}-core CPU, torch {torch}, two gloo ranks with one thread
each, {rounds} interleaved rounds. A GPT ({layers} blocks of width {hidden}, {heads} heads, no dropout, fp32) on
{batch} × {seq} tokens, in 1 or 4 microbatches, fused AdamW. The ratio is of whole steps, each as slow as its slowest
rank: the median and the quartiles. The aim is 1.00, the most that is accepted {bound}. *CPU time* is the ratio of that
of forward and backward, which other work on the machine disturbs least. Memory is the peak of a step on rank 0, with
parameters, gradients and optimizer states. Every contender's loss and gradients were seen to equal the single
process's; those in bf16 within its rounding.

| microbatches | ours | theirs | step, ours to theirs | | CPU time | ours | theirs | ours, peak | theirs, peak |
|--:|---|---|---|---|---|--:|--:|--:|--:|
"""
NOTES = """
With one microbatch, `zero-1`, `zero-2` and `kept` are the same. FSDP2 is on every block and on the root, with plain
accumulation where nothing else is said: it scatters gradients in each microbatch.
DDP's peaks are measured without its buckets, whose size is added.
"""


def verdict(median: float) -> str:
    return "met" if median <= 1.0 else "accepted" if median <= BOUND else "**missed**"


def section(size: Size, num_rounds: int, times: Mapping[str, Samples], peaks: Mapping[str, int]) -> str:
    """The results as Markdown."""
    head = INTRODUCTION.format(
        date=date.today().isoformat(), cpus=os.cpu_count(), torch=torch.__version__, rounds=num_rounds, bound=BOUND,
        **{name: getattr(size, name) for name in size.__dataclass_fields__},
    )  # fmt: skip
    rows = []
    for pair in PAIRS:
        both, found = (pair.ours, pair.theirs), ratio(times[pair.ours], times[pair.theirs], STEP)
        names = [name.rpartition(", ")[0] for name in both]
        ms = [f"{quartiles(times[name][:, STEP]).median * 1e3:.0f} ms" for name in both]
        mb = [f"{peaks[name] / 1e6:.0f} MB" for name in both]
        many, cpu = pair.ours.rpartition(", ")[2], ratio(times[pair.ours], times[pair.theirs], CPU)
        rows.append("| " + " | ".join([many, *names, str(found), verdict(found.median), str(cpu), *ms, *mb]) + " |\n")
    return HEADING + head + "".join(rows) + NOTES


def write(text: str) -> None:
    """The page with this as its last section."""
    page = PAGE.read_text(encoding="utf-8").split(HEADING)[0].rstrip() + "\n\n"
    PAGE.write_text(page + text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and write the section; 1 where a median ratio is above the bound."""
    parser = argparse.ArgumentParser(prog="python -m bench.accumulation", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="print the section, do not write it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = Size()
    graphs = planned(size)
    times = slowest_rank(run_ranks(race, 2, 600.0, args=(graphs, size, options.rounds)))
    peaks = {name: run_ranks(peak, 2, 300.0, args=(graphs, size, name))[0] for name in times}
    text = section(size, options.rounds, times, peaks)
    print(text)
    if not options.dry:
        write(text)
    return int(any(ratio(times[pair.ours], times[pair.theirs], STEP).median > BOUND for pair in PAIRS))


if __name__ == "__main__":
    sys.exit(main())
