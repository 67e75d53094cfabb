"""Measure the cost and gain of recomputation: our ZeRO-3 against FSDP2 with a checkpoint per block.

Two gloo ranks with one thread each train the same GPT, its attention written out, with the same weights on the same
batch. In every round each contender takes one step; ratios are taken within a round, and their median is reported.
Peaks are those of `bench.allocations`, of a step and what is there before it.

    python -m bench.recompute               writes docs/recompute.md
    python -m bench.recompute --rounds 2 --dry
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from bench.allocations import live_storages, peak_bytes
from bench.gpt import GPT, Attention, Size, build, make_batch
from bench.plans import forced
from bench.rounds import STEP, Samples, ratio, run_rounds, slowest_rank
from bench.speed import check_agreement
from bench.trainers import Trainer, adamw, my_part, plain_backward, whole_gradients
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.recompute import RECOMPUTES, Recompute

PAGE = Path(__file__).parents[1] / "docs" / "recompute.md"
SIZE = Size(seq=256)
STEPS_FOR_MEMORY = 4
OURS: Mapping[str, Recompute] = {f"ours, {mode}": mode for mode in RECOMPUTES}
FSDP, CHECKPOINTED = "FSDP2", "FSDP2, checkpoint per block"
Maker = Callable[[], Trainer]


class WrittenOut(nn.Module):
    """An attention by two products and a softmax, with the weights of another."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.num_heads = attention.num_heads
        self.q, self.k, self.v, self.proj = attention.q, attention.k, attention.v, attention.proj

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (f(x).view(batch, seq, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        causal = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
        y = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, seq, -1))


def model(size: Size = SIZE) -> GPT:
    """The benchmark's GPT with its attention written out."""
    made = build(size)
    for block in made.blocks:
        block.attn = WrittenOut(block.attn)  # pyright: ignore[reportArgumentType]
    return made


def ours(graph: Graph, size: Size, name: str) -> Trainer:
    parallel, batch = lower(graph, model(size), execution=Execution(recompute=OURS[name])), make_batch(size)
    step = partial(parallel.forward_backward, **batch)
    return Trainer(name, step, adamw(list(parallel.parameters())), lambda: whole_gradients(parallel))


def fsdp(size: Size, name: str) -> Trainer:
    """`fully_shard` on every block and on the whole; `torch.utils.checkpoint` around each block."""
    made, mesh = model(size), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in made.blocks:
        if name == CHECKPOINTED:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, mesh=mesh)
    fully_shard(made, mesh=mesh)
    step, optimizer = plain_backward(made, my_part(make_batch(size))), adamw(list(made.parameters()))
    return Trainer(name, step, optimizer, lambda: whole_gradients(made), mean_loss=True)


@dataclass(frozen=True)
class Resident:
    """A trainer, whose memory is what it has brought."""

    trainer: Trainer
    before: Mapping[int, int]

    def step(self) -> None:
        self.trainer.step()

    def resident_bytes(self) -> int:
        return sum(num_bytes for address, num_bytes in live_storages().items() if address not in self.before)


def _makers(graph: Graph, size: Size) -> dict[str, Maker]:
    found: dict[str, Maker] = {name: partial(ours, graph, size, name) for name in OURS}
    return found | {name: partial(fsdp, size, name) for name in (FSDP, CHECKPOINTED)}


def _race(graph: Graph, size: Size, num_rounds: int) -> dict[str, Samples]:
    trainers = [make() for make in _makers(graph, size).values()]
    reference = model(size)
    loss = plain_backward(reference, make_batch(size))().detach()
    for trainer in trainers:
        check_agreement(trainer, loss, whole_gradients(reference))
    return run_rounds(trainers, num_rounds)


def _peak(graph: Graph, size: Size, name: str) -> int:
    before = live_storages()
    resident = Resident(_makers(graph, size)[name](), before)
    resident.step()
    resident.step()
    return peak_bytes(resident, STEPS_FOR_MEMORY)


# ---- the page ----

INTRODUCTION = """\
# What it costs and saves to make values again

Written by `python -m bench.recompute` on {date}: {cpus}-core CPU, torch {torch}, two gloo ranks with one thread each,
{rounds} interleaved rounds. A GPT ({layers} blocks of width {hidden}, {heads} heads, attention written out as products
and a softmax, no dropout, fp32) on {batch} × {seq} tokens, stored in slices on both sides (ZeRO-3), AdamW. *selective*:
attention is made again in backward; *full*: every block is, from its input. A round's ratio is to FSDP2 that keeps all,
each as slow as its slowest rank; reported are the median and the quartiles, of whole steps. Memory is the peak of a
step on rank 0, with parameters, gradients and optimizer states; *predicted* is what the timeline says of it. Every
contender's loss and gradients were seen to equal the single process's.

| | step, to FSDP2's | memory at the peak | predicted |
|---|---|--:|--:|
"""
NOTES = """\

## How it works

`lower(graph, model, execution=Execution(recompute=…))` takes "none", "selective", "full" or a mapping from blocks of
the model, or patterns of them, to these: `{"model.layers.[0-7]": "full", "model.layers.*": "selective"}`. The first
pattern that fits decides; one that names no block, or for which there is nothing to make again, is an error.

* *full*: a block is run again from its input, up to the last value that backward needs.
* *selective*: attention is, as one operator or written out: two products of activations around a softmax, with all that
  lies between them and the copies of keys and values that only they read.
* Under both, an activation that is gathered for a product (sequence parallelism) is gathered again: its slices are
  kept.
* A list says it value by value, by *places* in the block: `{"model.layers.0-15": ["mlp.act_fn:silu", "self_attn"]}`. A
  place is a module, seen from the block, and an operator of it; a module alone means all that is inside. `0-15` is
  any of these numbers. A module inside of blocks may be named directly, too: `{"model.layers.*.mlp": "full"}`. `""`
  stands for what lies in no block, such as a model's head.

That is also how the search says what it chose (`search/exact/keeping.py`). Layouts being known, each value is *kept*
(its bytes), made *again* (the seconds of what makes it) or *not needed*, which it may not be where a backward reads it
or what reads it is made again. These are statements about one value or two, so elimination finds the least of seconds +
price × bytes exactly, and along a few prices the timeline judges. Of two neighbours on that way, of which the one that
keeps more does not fit, the last blocks take the one and the first the other. Gathered weights take part: each group
stays for as long as is worth its bytes. What one block gives to the next is not made again.

In the program, what is made again is a function: `saved.checkpoint(layers_0, …)` keeps what the function returns,
`saved.remade(attention, …)` makes that again, too. Gathered parameters are gathered again once, dropout draws the same
masks. The timeline prices the same list of actions. A region takes less time than `torch.utils.checkpoint` around the
same function: 31.2 ms a step instead of 33.6 for a GPT of 12 small blocks on one rank, 18.7 where nothing is made again
(2026-11-23, the same machine).
"""


def page(num_rounds: int, times: Mapping[str, Samples], peaks: Mapping[str, int], predicted: Mapping[str, int]) -> str:
    """The results as Markdown."""
    head = INTRODUCTION.format(
        date=date.today().isoformat(), cpus=os.cpu_count(), torch=torch.__version__, rounds=num_rounds,
        **{name: getattr(SIZE, name) for name in SIZE.__dataclass_fields__},
    )  # fmt: skip
    rows = [
        f"| {name} | {ratio(times[name], times[FSDP], STEP)} | {peaks[name] / 1e6:.1f} MB | "
        f"{f'{predicted[name] / 1e6:.1f} MB' if name in predicted else ''} |"
        for name in times
    ]
    again = ratio(times["ours, full"], times[CHECKPOINTED], STEP)
    return head + "\n".join(rows) + f"\n\nOurs in full to FSDP2 with a checkpoint per block: {again}.\n" + NOTES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.recompute", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="print the page, do not write it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    case = next(case for case in forced(2) if case.name == "zero")
    graph = case.plan(capture(model(), make_batch(SIZE)).graph, "GPT").graph
    times = slowest_rank(run_ranks(_race, 2, 600.0, args=(graph, SIZE, options.rounds)))
    peaks = {name: run_ranks(_peak, 2, 300.0, args=(graph, SIZE, name))[0] for name in times}
    runs = {name: simulate(program(graph, case.cluster, Execution(recompute=mode))) for name, mode in OURS.items()}
    predicted = {name: run.fullest.memory.total_bytes for name, run in runs.items()}
    text = page(options.rounds, times, peaks, predicted)
    print(text)
    if not options.dry:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
