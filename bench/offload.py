"""Measure the cost and gain of values that wait on the host: a step with half of its blocks offloaded, and with all.

Two gloo ranks with one thread each train the GPT of `bench.recompute` under ZeRO-3, with the same weights on the same
batch. A link to the host is simulated: a thread copies, at most at a rate at which the copies of half of the blocks
take a given share of a step in which all is kept. In every round each contender takes one step; ratios are taken within
a round, and their median is reported. Peaks are those of `bench.allocations`, without the host's buffers.

    python -m bench.offload               writes docs/offload.md
    python -m bench.offload --rounds 2 --dry
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from bench.allocations import live_storages, peak_bytes
from bench.gpt import Size, make_batch
from bench.plans import forced
from bench.recompute import Resident, model
from bench.rounds import CPU, STEP, Samples, quartiles, ratio, run_rounds, slowest_rank
from bench.speed import check_agreement
from bench.trainers import Trainer, adamw, plain_backward, whole_gradients
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime.host import Host, ThreadLink
from shardwright.lowering.runtime.host_states import on_host
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.chunk import whole_chunk
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.operations import Operations

PAGE = Path(__file__).parents[1] / "docs" / "offload.md"
SIZE = Size(seq=256)
STEPS_FOR_MEMORY = 3
SHARE = 0.6
"""The time of the copies of half of the blocks, there and back, as a share of a step that keeps all."""
KEPT, HALF = "all kept", "half of the blocks offloaded"
ON_HOST = "all kept, optimizer states on the host"
RUNS: Mapping[str, Execution] = {
    KEPT: Execution(),
    HALF: Execution(offload={"blocks.0-1": "full"}),
    "all blocks offloaded": Execution(offload={"blocks.*": "full"}),
    ON_HOST: Execution.of(optimizer="adam@host"),
    "every block made again": Execution(recompute="full"),
    "every block made again, what they hand on offloaded": Execution(recompute="full", offload={"blocks.*": "full"}),
}


def copied_bytes(graph: Graph, name: str) -> float:
    """Return the bytes that a step of this contender copies, there and back."""
    if name == ON_HOST:
        types = (graph.types[leaf.name] for leaf in graph.leaves("parameter"))
        return 2 * sum(2 * kind.local_bytes(graph.mesh) for kind in types)
    chunk = whole_chunk(Operations(graph, RUNS[name]))
    return 2 * sum(memory.num_bytes for memory in chunk.allocations if memory.fate is Fate.HOST)


def ours(graph: Graph, size: Size, name: str) -> Trainer:
    parallel, batch = lower(graph, model(size), execution=RUNS[name]), make_batch(size)
    step, optimizer = partial(parallel.forward_backward, **batch), adamw(list(parallel.parameters()))
    optimizer = on_host(optimizer) if name == ON_HOST else optimizer
    return Trainer(name, step, optimizer, lambda: whole_gradients(parallel))


def kept_s(graph: Graph, size: Size, num_rounds: int) -> float:
    """The median of steps that keep all, in seconds."""
    return quartiles(run_rounds([ours(graph, size, KEPT)], num_rounds)[KEPT][:, STEP]).median


@contextmanager
def limited(bytes_per_s: float | None) -> Generator[None]:
    with mock.patch.object(ThreadLink, "bytes_per_s", bytes_per_s):
        yield


def _race(graph: Graph, size: Size, num_rounds: int, bytes_per_s: float | None) -> dict[str, Samples]:
    with limited(bytes_per_s):
        trainers = [ours(graph, size, name) for name in RUNS]
        reference = model(size)
        loss = plain_backward(reference, make_batch(size))().detach()
        for trainer in trainers:
            check_agreement(trainer, loss, whole_gradients(reference))
        return run_rounds(trainers, num_rounds)


def _peak(graph: Graph, size: Size, name: str) -> int:
    """The most that a step has at once, without the host's buffers, which the steps before it have made."""
    hosts, real, before = list[Host](), Host.__init__, live_storages()

    def noted(own: Host, *given: object) -> None:
        hosts.append(own)
        real(own, *given)  # type: ignore[arg-type]

    with mock.patch.object(Host, "__init__", noted):
        resident = Resident(ours(graph, size, name), before)
        resident.step()
        resident.step()
    return peak_bytes(resident, STEPS_FOR_MEMORY) - sum(own.num_bytes for own in hosts)


# ---- the page ----

INTRODUCTION = """\
# Offload: values that wait in the host's memory

What forward keeps for backward may wait in the host's memory. It is copied there beside compute, its memory on the
device is given back, and it is copied back before backward needs it.

| | in Python | on the command line |
|---|---|---|
| all that is kept | `plan(..., offload="full")` | `--offload full` |
| by block, module or value | `offload={{"layers.0-7": "full", "*": ["mlp"]}}` | `--offload '*.0-7=full'`, or JSON |
| none | `offload="none"` | `--offload none` |

Patterns and places are those of [recomputation](recompute.md), and the two go together. What is made again does not
wait, so `recompute="full", offload="full"` keeps the inputs of blocks on the host. `explain` says what waits and how
long its copies take; `explain --offload` prints it in the form of the option. The plan file has it in `execution`,
and `shardwright timeline --offload` prices other plans with it.

By default nothing waits, unless no plan fits without. Then the search chooses by value among kept, made again and on
the host, in one elimination (`search/exact/keeping.py`): a copy counts its seconds as far as compute does not hide
them, and the bytes of two blocks that are on their way. The last blocks keep what fits. The timeline judges each plan.

The link is the device's `host_bytes_per_s`: three quarters of PCIe's datasheet rate for the GPUs of the presets. A
CPU has none, as its memory is the host's. Steps with offload equal the same steps without it to the bit: with
recomputation, microbatches, stages and ZeRO.

* **Order.** Copies go block by block. What a block keeps leaves as soon as it is made, and is given back when the
  next block has run. In backward, the values of a block are fetched while the block before it runs. So memory does
  not depend on the speed of the link; a slow link makes compute wait.
* **Memory.** Buffers of the host are used again in every step. On GPUs they are pinned. If the host has no memory
  left, a `MachineError` says how much was asked for.
* **Which values.** The last blocks gain least: backward needs them at once. What an operator keeps of its own stays
  on the device, such as a dropout's mask or the softmax inside of a loss.
* **Not there.** Schedule "zero-bubble" is refused with offload. Parameters do not move. Copies on GPUs (a stream of
  their own, `non_blocking`) are written and have not been run on one.

## Optimizer states

The states of an optimizer may lie on the host between updates. A plan counts on it, and the loop asks for it:

```python
plan = sw.plan(model, cluster, kwargs=batch, optimizer="adam@host")  # or --optimizer adam@host
parallel = sw.compile(model, cluster, kwargs=batch, plan=plan)
optimizer = sw.on_host(torch.optim.AdamW(parallel.parameters()))
```

* **Update.** It runs on the device, in lots of 64 MB of weights. States of two lots are there at a time: those that are
  updated, and those that arrive meanwhile. Where nothing fits, the plan says whether this would, and what a step takes.
* **Prices.** A step takes the time of the copies, there and back, beside that of the update: one after the other, which
  is a little too much. `"momentum@host"` is SGD's with momentum. A CPU's memory is the host's, so plans for CPUs refuse
  both; `sw.on_host` itself works there.
* **Equal to the bit.** Torch's Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop and SGD
  update each parameter by itself, so lots change nothing. Other optimizers are refused by name. Groups, hooks,
  closures, scalers, `state_dict` and checkpoints stay as they are. Schedulers of learning rates are made afterwards.

## What it costs and saves

Written by `python -m bench.offload` on {date}: {cpus}-core CPU, no GPU, torch {torch}, two gloo ranks with one thread
each, {rounds} interleaved rounds. The GPT of [recomputation](recompute.md) under ZeRO-3: {layers} blocks of width
{hidden}, attention written out, {batch} × {seq} tokens. The link is simulated: a thread copies at {rate:.2f} GB/s at
most, at which the copies of half of the blocks take {share:.0%} of a step that keeps all. A round's ratio is to the
step that keeps all, each as slow as its slowest rank; reported are the median and the quartiles. Memory is the peak
of a step on rank 0, without the host's buffers; *predicted* is what the timeline says of it. *CPU time* is that of
forward and backward, with the threads that copy; other work on the machine disturbs it less. Loss and gradients were
seen to equal the single process's.

| | copies, of a step | step, to all kept | CPU time | memory at the peak | predicted |
|---|--:|---|--:|--:|--:|
"""
TARGET = 1.10


def page(
    num_rounds: int, rate: float, copies: Mapping[str, float], times: Mapping[str, Samples],
    peaks: Mapping[str, int], predicted: Mapping[str, int],
) -> str:  # fmt: skip
    """Return the results as Markdown. `copies`: shares of a step, by contender."""
    head = INTRODUCTION.format(
        date=date.today().isoformat(), cpus=os.cpu_count(), torch=torch.__version__, rounds=num_rounds,
        rate=rate / 1e9, share=SHARE, **{name: getattr(SIZE, name) for name in SIZE.__dataclass_fields__},
    )  # fmt: skip
    rows = [
        f"| {name} | {copies[name]:.0%} | {ratio(times[name], times[KEPT], STEP)} | "
        f"{ratio(times[name], times[KEPT], CPU).median:.2f} | {peaks[name] / 1e6:.1f} MB | "
        f"{predicted[name] / 1e6:.1f} MB |"
        for name in RUNS
    ]
    reached = ratio(times[HALF], times[KEPT], STEP).median
    verdict = "is met" if reached <= TARGET else "is missed"
    return head + "\n".join(rows) + f"\n\nThe target of {TARGET:.2f} for half of the blocks {verdict}.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.offload", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry", action="store_true", help="print the page, do not write it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    case = next(case for case in forced(2) if case.name == "zero")
    graph = case.plan(capture(model(), make_batch(SIZE)).graph, "GPT").graph
    step_s = max(run_ranks(kept_s, 2, 300.0, args=(graph, SIZE, 8)))
    copied = {name: copied_bytes(graph, name) for name in RUNS}
    rate = copied[HALF] / (SHARE * step_s)
    times = slowest_rank(run_ranks(_race, 2, 900.0, args=(graph, SIZE, options.rounds, rate)))
    peaks = {name: run_ranks(_peak, 2, 300.0, args=(graph, SIZE, name))[0] for name in RUNS}
    cluster: Cluster = replace(case.cluster, device=replace(case.cluster.device, host_bytes_per_s=rate))
    runs = {name: simulate(program(graph, cluster, run)) for name, run in RUNS.items()}
    predicted = {name: run.fullest.memory.total_bytes for name, run in runs.items()}
    own_s = quartiles(times[KEPT][:, STEP]).median  # in the rounds: other work on the machine may have ended
    copies = {name: num_bytes / rate / own_s for name, num_bytes in copied.items()}
    text = page(options.rounds, rate, copies, times, peaks, predicted)
    print(text)
    if not options.dry:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
