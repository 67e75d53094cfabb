"""Predicted against measured: step time and peak memory of every model of the zoo, on one and on two local ranks.

The machine is calibrated as by `shardwright calibrate`: with operators, kernels and collectives, never a model. Every
plan of every model takes a few steps in every round; the first of them warm the caches that the other models used, and
a step's time is its slowest rank's. Other work on the machine only adds to the time of a step, so the lower quartile is
reported, of every few rounds. A machine that is shared drifts too, by more than predictions err. So it is calibrated
before and after these rounds, and what is predicted and measured are means over all of them.

Memory is exact: the profiler's record of every allocation and release of torch's CPU allocator in one step, on top of
what is there before it: every storage that a tensor of the plan keeps alive, be it a parameter, an optimizer's state,
a gathering buffer or a bucket. The median of a few steps: gloo's threads give a tensor back when they come to it.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench.plans import CERTIFIED
from bench.rounds import noise
from examples.zoo import ZOO
from shardwright.cost.calibration.calibrate import calibrate
from shardwright.cost.calibration.workload import Workload
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.execution import Execution
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import Timeline, simulate
from shardwright.lowering.launch import run_ranks
from shardwright.lowering.module import ParallelModule, lower
from shardwright.pcg.capture import Captured, capture
from shardwright.pcg.mesh import Mesh
from shardwright.search.plan import Plan
from shardwright.search.planner import Planner
from shardwright.search.restrict import DATA, TENSOR, ZERO

PAGE = Path(__file__).parents[1] / "docs" / "local.md"
FORCED = {"data": DATA, "zero": ZERO, "tensor": TENSOR}
NUM_WARMUP = 4
STEPS_PER_ROUND = 6
ROUNDS_PER_BLOCK = 4


@dataclass(frozen=True)
class Subject:
    """A model with one of its plans."""

    model: str
    plan_name: str
    num_ranks: int
    captured: Captured
    plan: Plan
    predicted_bytes: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.plan_name}"

    def predicted_s(self, cluster: Cluster) -> float:
        return _simulated(self.plan, cluster).step_s


@dataclass(frozen=True)
class Row:
    """What was predicted and measured.

    drift   how far the predictions of the calibrations are apart
    noise   how far the measurements of odd steps are from those of even ones
    """

    subject: Subject
    predicted_s: float
    drift: float
    measured_s: float
    cpu_s: float
    measured_bytes: int
    noise: float

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def cpu_error(self) -> float:
        return self.predicted_s / self.cpu_s - 1

    @property
    def memory_error(self) -> float:
        return self.subject.predicted_bytes / self.measured_bytes - 1


# ---- running ----


class Stepper:
    """One plan on this rank, ready to take steps."""

    def __init__(self, module: ParallelModule, batch: Mapping[str, Tensor], before: Mapping[int, int]) -> None:
        """`before`: the storages that were alive before `module` was made and still are."""
        self.module, self.batch, self.before = module, batch, before
        self.optimizer = torch.optim.AdamW(list(module.parameters()), lr=1e-4, fused=True)

    def step(self) -> None:
        self.module.forward_backward(**self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def resident_bytes(self) -> int:
        """What this rank holds between two steps: all storages that this plan has brought, and its part of a batch."""
        own = {address: size for address, size in live_storages().items() if address not in self.before}
        batch = sum(t.numel() * t.element_size() for t in self.module._batch.local(self.batch).values())
        return sum(own.values()) + batch


def live_storages() -> dict[int, int]:
    """Bytes of every storage on the CPU that a tensor in Python refers to, by address."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    storages = [t.untyped_storage() for t in tensors if t.device.type == "cpu"]
    return {s.data_ptr(): s.nbytes() for s in storages}


def _seconds(call: Callable[[], object]) -> tuple[float, float]:
    """Wall time, and the CPU time of this thread: what the wall time were, but for waiting, on an idle machine."""
    start, start_cpu = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - start, time.thread_time() - start_cpu


class Stepping(Protocol):
    """What memory is measured of."""

    def step(self) -> None: ...

    def resident_bytes(self) -> int: ...


def peak_bytes(stepper: Stepping) -> int:
    """The most that is allocated at once during a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        stepper.step()
    events, pending = [], list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag.name == "Allocation":
            details: Any = event.extra_fields
            events.append((event.start_time_ns, details.alloc_size))
    events.sort(key=lambda e: e[0])
    return stepper.resident_bytes() + max(0, int(np.cumsum([size for _, size in events]).max()))


Block = tuple[dict[str, list[tuple[float, float]]], dict[str, int]]
"""What a rank measures: wall and CPU seconds of every step, and the peak of memory, by subject."""


def run(subjects: Sequence[Subject]) -> Block:
    """A block of rounds on this rank."""
    steppers: dict[str, Stepper] = {}
    memory: dict[str, int] = {}
    for subject in subjects:
        torch.manual_seed(0)
        model, batch = ZOO[subject.model]()
        captured, before = subject.captured, live_storages()
        module = lower(subject.plan.graph, model, constants=captured.constants, options=captured.options)
        stepper = steppers[subject.name] = Stepper(module, batch, before)
        for _ in range(NUM_WARMUP):
            stepper.step()
        memory[subject.name] = peak_bytes(stepper)  # while `model` is there, so that its storages' addresses are taken
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steppers}
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS_PER_BLOCK):
        for name, stepper in steppers.items():
            for number in range(STEPS_PER_ROUND):  # the first warm the caches that the other models used
                dist.barrier()
                seconds = _seconds(stepper.step)
                if number >= STEPS_PER_ROUND // 2:
                    times[name].append(seconds)
    gc.enable()
    return times, memory


def subjects(cluster: Cluster, models: Sequence[str]) -> list[Subject]:
    """Every model with the search's plan, and, on several ranks, with each forced layout that can hold it."""
    found = []
    for model in models:
        torch.manual_seed(0)
        module, batch = ZOO[model]()
        captured = capture(module, batch)
        for plan_name, roles in _plans(cluster.num_devices).items():
            mesh = Mesh(("x",), (cluster.num_devices,)) if roles else None
            plan = Planner(cluster, CERTIFIED).plan(captured.graph, model, mesh=mesh, roles=roles)
            peak = _simulated(plan, cluster).stages[0].memory.total_bytes
            found.append(Subject(model, plan_name, cluster.num_devices, captured, plan, peak))
    return found


def _simulated(plan: Plan, cluster: Cluster) -> Timeline:
    return simulate(program(plan.graph, cluster, Execution()))


def _plans(num_ranks: int) -> dict[str, tuple[str, ...] | None]:
    return {"searched": None, **({name: (role,) for name, role in FORCED.items()} if num_ranks > 1 else {})}


def rows(found: Sequence[Subject], num_blocks: int) -> list[Row]:
    """Run every subject, in blocks of rounds, with a calibration before and after each block."""
    num_ranks = found[0].num_ranks
    clusters, blocks = [calibrated(num_ranks)], list[list[Block]]()
    for _ in range(num_blocks):
        blocks.append(run_ranks(run, num_ranks, 1800.0, args=(found,)))
        clusters.append(calibrated(num_ranks))
    return [_row(subject, clusters, blocks) for subject in found]


def _row(subject: Subject, clusters: Sequence[Cluster], blocks: Sequence[Sequence[Block]]) -> Row:
    """A step is as slow as its slowest rank, and the fullest rank's memory counts."""
    predicted = [subject.predicted_s(cluster) for cluster in clusters]
    slowest = [np.max([times[subject.name] for times, _ in block], axis=0) for block in blocks]
    measured_s, cpu_s = (float(x) for x in np.mean([np.quantile(times, 0.25, axis=0) for times in slowest], axis=0))
    return Row(
        subject,
        predicted_s=statistics.mean(map(statistics.mean, pairwise(predicted))),
        drift=max(predicted) / min(predicted) - 1,
        measured_s=measured_s,
        cpu_s=cpu_s,
        measured_bytes=statistics.median_low(max(memory[subject.name] for _, memory in block) for block in blocks),
        noise=noise(np.concatenate(slowest)[:, 0]),
    )


INTRODUCTION = """\
# Predictions on the local machine

Written by `python -m bench.zoo_times` on {date}: {cpus}-core CPU, torch {torch}, ranks of one thread each under gloo;
{load:.0f} processes were running when it began. Every model of `examples/zoo.py` takes whole training steps in fp32
with AdamW (`fused=True`).

Every plan takes {steps} steps in each of {blocks} × {rounds} rounds, of which the second half counts. The machine's
speed drifts, so it is calibrated before and after every {rounds} rounds, by operators, kernels, collectives and a chain
of parameters, never by a model: *predicted* is the mean of what the calibrations before and after say, *drift* how far
all of them are apart. *Measured* is the wall time of the slowest rank, the lower quartile of {rounds} rounds; a
collective is predicted by its mean, so that steps that wait for few of them are predicted too slow. Shown is the mean
over the {blocks} times. *Noise* is how far the lower quartile of all odd steps is from that of the even ones. *CPU
time* leaves out waiting: for another rank, and for a processor that other work has taken. On an idle machine the wall
time of a plan without communication is its CPU time; on a loaded one only the latter can be compared, and plans that
communicate cannot be judged at all.

*searched* is the search's plan; *data*, *zero* and *tensor* are forced. Memory is exact: all that torch's CPU
allocator has handed out at the worst moment of a step, by the profiler's record, on top of every storage that is alive
before it: parameters, buffers, optimizer states, the pool of gathered weights, buckets of gradients, the rank's batch;
the median of {blocks} steps, as gloo's threads give a tensor back when they come to it.
"""
HEAD = """\
| model | plan | predicted | drift | measured | noise | error | CPU time | error | memory predicted | measured | error |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def page(table: Sequence[Row], provenances: Sequence[str], num_blocks: int, load: float) -> str:
    """The results as Markdown."""
    facts = {"date": date.today().isoformat(), "cpus": os.cpu_count(), "torch": torch.__version__, "load": load}
    text = INTRODUCTION.format(**facts, steps=STEPS_PER_ROUND, rounds=ROUNDS_PER_BLOCK, blocks=num_blocks)
    for ranks, provenance in zip(sorted({row.subject.num_ranks for row in table}), provenances, strict=True):
        mine = [row for row in table if row.subject.num_ranks == ranks]
        text += f"\n{section(mine, ranks)}\nThe calibration that plans were searched with: {provenance}.\n"
    return text


def section(table: Sequence[Row], ranks: int) -> str:
    """The rows of one number of ranks, the worst first, and their medians."""
    head = f"## {ranks} {'rank' if ranks == 1 else 'ranks'}\n\n"
    for what, mine in (("searched plans", [r for r in table if r.subject.plan_name == "searched"]), ("all", table)):
        wall, cpu, memory = (
            statistics.median(abs(error(row)) for row in mine)
            for error in (lambda r: r.time_error, lambda r: r.cpu_error, lambda r: r.memory_error)
        )
        head += f"Median error, {what}: {wall:.1%} of a step's time ({cpu:.1%} of CPU time), {memory:.1%} of memory.\n"
    lines = [_line(row) for row in sorted(table, key=lambda r: -abs(r.time_error))]
    return head + "\n" + HEAD + "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    s = row.subject
    predicted, measured, cpu = (f"{x * 1e3:.2f} ms" for x in (row.predicted_s, row.measured_s, row.cpu_s))
    memory = [f"{x / 1e6:.2f} MB" for x in (s.predicted_bytes, row.measured_bytes)]
    cells = [
        s.model,
        s.plan_name,
        predicted,
        f"{row.drift:.0%}",
        measured,
        f"{row.noise:.0%}",
        f"{row.time_error:+.0%}",
    ]
    cells += [cpu, f"{row.cpu_error:+.0%}", *memory, f"{row.memory_error:+.0%}"]
    return "| " + " | ".join(cells) + " |"


def calibrated(num_ranks: int) -> Cluster:
    """This machine as `num_ranks` ranks of one thread each, as `run_ranks` has them."""
    return calibrate(num_ranks, save=False, timeout_s=300.0, workload=Workload(num_ranks, 1, 300.0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.zoo_times", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(ZOO), help="of examples/zoo.py; default: all")
    parser.add_argument("--blocks", type=int, default=3, help=f"of {ROUNDS_PER_BLOCK} rounds; default: 3")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="default: 1 2")
    parser.add_argument("--dry", action="store_true", help="print the page, do not write it")
    options = parser.parse_args(arguments)
    if options.blocks < 1:
        parser.error(f"argument --blocks: expected a positive integer, got {options.blocks}")
    torch.set_num_threads(1)
    load, table, provenances = os.getloadavg()[0], list[Row](), list[str]()
    for num_ranks in sorted(options.ranks):
        cluster = calibrated(num_ranks)
        provenances.append(cluster.provenance)
        table += rows(subjects(cluster, options.models), options.blocks)
    text = page(table, provenances, options.blocks, load)
    print(text)
    if not options.dry:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
