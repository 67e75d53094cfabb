"""Predicted against measured: step time and peak memory of every model of the zoo, on one and on two local ranks.

The machine is calibrated as by `shardwright calibrate`, with operators, kernels and collectives, never a model, and in
the same processes every plan takes turns between the points: a few steps, of which the first warms the caches that
other work used; a step's time is its slowest rank's. A processor that shares its core with other work of its host can
be half as fast for seconds, and a rank may have such a one while another has not; and a shared machine drifts, by more
than predictions err. So turns are many and short, and what is predicted comes from the minutes that are measured.

Memory is the profiler's record of every allocation and release of torch's CPU allocator in one step, on top of what is
there before it: every storage that a tensor of the plan keeps alive, be it a parameter, an optimizer's state, a
gathering buffer or a bucket. The record lacks what gloo's threads release: a collective's tensor, where such a thread
lets go of it last, seems to stay. That an address is handed out again shows that it was free; and what is still
missing can only make a step's peak too large, so that the least of several steps counts (which also leaves out what
such a thread held for a moment longer).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import date
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench.plans import CERTIFIED
from examples.zoo import ZOO
from shardwright.cost.calibration.calibrate import calibrate, measured_cluster
from shardwright.cost.calibration.measure import Rank
from shardwright.cost.calibration.workload import Workload, points_of, read_visits, trimmed_mean
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
WORKLOAD = Workload(num_ranks=1, num_threads=1, timeout_s=300.0)  # ranks of one thread, as `run_ranks` has them
NUM_WARMUP = 4
STEPS_PER_TURN = 3
VISITS_PER_TURN = 6
STEPS_FOR_MEMORY = 15


@dataclass(frozen=True)
class Subject:
    """A model with one of its plans.

    searched_s        a step by the calibration that the plan was searched with
    predicted_bytes   the peak of memory
    """

    model: str
    plan_name: str
    num_ranks: int
    captured: Captured
    plan: Plan
    searched_s: float
    predicted_bytes: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.plan_name}"

    def predicted_s(self, cluster: Cluster) -> float:
        return _simulated(self.plan, cluster).step_s


@dataclass(frozen=True)
class Row:
    """What was predicted and measured.

    predicted_noise   how far the prediction by odd passes is from that by even ones
    measured_noise    how far the measurements of odd turns are from those of even ones
    """

    subject: Subject
    predicted_s: float
    predicted_noise: float
    measured_s: float
    measured_noise: float
    cpu_s: float
    measured_bytes: int

    @property
    def error_before(self) -> float:
        return self.subject.searched_s / self.measured_s - 1

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


def peak_bytes(stepper: Stepping, num_steps: int) -> int:
    """The most that is allocated at once during a step, by the record of the step that shows the least."""
    return stepper.resident_bytes() + min(_most_allocated(stepper) for _ in range(num_steps))


def _most_allocated(stepper: Stepping) -> int:
    """During a step, on top of what there is before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        stepper.step()
    events, pending = [], list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag.name == "Allocation":
            details: Any = event.extra_fields
            events.append((event.start_time_ns, details.ptr, details.alloc_size))
    events.sort(key=lambda e: e[0])
    return most_allocated([(address, num_bytes) for _, address, num_bytes in events])


def most_allocated(events: Sequence[tuple[int, int]]) -> int:
    """The most that is there at once, by addresses and bytes (negative: given back) in the order of time.

    What is given back without having been taken was there before; what is handed out twice was free in between.
    """
    taken: dict[int, int] = {}
    now = most = 0
    for address, num_bytes in events:
        now += num_bytes
        if num_bytes > 0:
            now -= taken.get(address, 0)
            taken[address] = num_bytes
        else:
            taken.pop(address, None)
        most = max(most, now)
    return most


Times = list[list[tuple[float, float]]]
"""Wall and CPU seconds of every step that counts, by turn."""
Measured = tuple[dict[str, Times], dict[str, int]]
"""By a rank: times, and the peak of memory, by subject."""


def run(subjects: Sequence[Subject], workload: Workload, visits: Path) -> Measured:
    """A calibration on this rank with the subjects' turns in between; what it measures is added to `visits`."""
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
        # While `model` is there, so that its storages' addresses are taken.
        memory[subject.name] = peak_bytes(stepper, STEPS_FOR_MEMORY)
    times: dict[str, Times] = {name: [] for name in steppers}
    rank, turns = Rank(dist.get_rank(), workload, visits), cycle(steppers)
    gc.disable()
    for number in range(workload.num_passes):
        gc.collect()
        with redirect_stdout(sys.stderr):
            for visit, _ in enumerate(rank.visits(number)):
                if visit % VISITS_PER_TURN == 0:
                    name = next(turns)
                    times[name].append(_turn(steppers[name]))
    gc.enable()
    return times, memory


def _turn(stepper: Stepper) -> list[tuple[float, float]]:
    """Steps that all ranks begin at once; the first is left out."""
    seconds = []
    for _ in range(STEPS_PER_TURN):
        dist.barrier()
        seconds.append(_seconds(stepper.step))
    return seconds[1:]


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
            timeline = _simulated(plan, cluster)
            peak = timeline.stages[0].memory.total_bytes
            found.append(Subject(model, plan_name, cluster.num_devices, captured, plan, timeline.step_s, peak))
    return found


def _simulated(plan: Plan, cluster: Cluster) -> Timeline:
    return simulate(program(plan.graph, cluster, Execution()))


def _plans(num_ranks: int) -> dict[str, tuple[str, ...] | None]:
    return {"searched": None, **({name: (role,) for name, role in FORCED.items()} if num_ranks > 1 else {})}


def _workload(num_ranks: int, num_passes: int) -> Workload:
    """Passes as long as those of `shardwright calibrate`."""
    times = num_passes / WORKLOAD.num_passes
    seconds, timeout_s = WORKLOAD.seconds_per_point * times, WORKLOAD.timeout_s * max(1.0, times)
    return replace(WORKLOAD, num_ranks=num_ranks, num_passes=num_passes, seconds_per_point=seconds, timeout_s=timeout_s)


def rows(found: Sequence[Subject], num_passes: int) -> list[Row]:
    """Run every subject and predict it by the calibration in between."""
    workload = _workload(found[0].num_ranks, num_passes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "visits.jsonl"
        measured = run_ranks(run, workload.num_ranks, 3600.0, args=(found, workload, path))
        visits = read_visits(path)
    every, odd, even = (
        measured_cluster(points_of({key: passes[part] for key, passes in visits.items()}), workload)
        for part in (slice(None), slice(0, None, 2), slice(1, None, 2))
    )
    return [_row(subject, (every, odd, even), measured) for subject in found]


def _row(subject: Subject, clusters: tuple[Cluster, Cluster, Cluster], measured: Sequence[Measured]) -> Row:
    """A step is as slow as its slowest rank, and the fullest rank's memory counts."""
    predicted_s, odd_s, even_s = (subject.predicted_s(cluster) for cluster in clusters)
    slowest = np.max([times[subject.name] for times, _ in measured], axis=0)  # [turn, step, wall or CPU]
    measured_s, cpu_s, odd, even = (
        trimmed_mean(seconds.ravel().tolist())
        for seconds in (slowest[..., 0], slowest[..., 1], slowest[::2, :, 0], slowest[1::2, :, 0])
    )
    return Row(
        subject,
        predicted_s,
        abs(odd_s / even_s - 1),
        measured_s,
        abs(odd / even - 1),
        cpu_s,
        max(memory[subject.name] for _, memory in measured),
    )


INTRODUCTION = """\
# Predictions on the local machine

Written by `python -m bench.zoo_times` on {date}: {cpus}-core CPU, torch {torch}, ranks of one thread each under gloo;
{load:.0f} processes were running when it began. Every model of `examples/zoo.py` takes whole training steps in fp32
with AdamW (`fused=True`).

The machine is calibrated in {passes} passes over operators, kernels, collectives and a chain of parameters, never by a
model; after every {visits} points one of the plans takes {steps} steps, of which the first does not count: a processor
that shares its core with other work of its host can be half as fast for seconds, and machines drift. *Predicted*
is what all passes say, *measured* the wall time of the slowest rank; both are means but for the slowest tenth. *Noise*
is how far the prediction by odd passes is from that by even ones, and odd turns from even ones. *Before* is the error
by the calibration that the plans were searched with: it was made minutes earlier, when the machine may have been faster
or slower. A collective is timed from the moment at which the first rank comes to it, which counts part of a wait twice
where the slowest rank's work is counted too. *CPU time* leaves out waiting: for another rank, and for a processor that
other work has taken (but not that its core is shared). On an idle machine the wall time of a plan without communication
is its CPU time; on a loaded one only the latter can be compared, and plans that communicate cannot be judged at all.

*searched* is the search's plan; *data*, *zero* and *tensor* are forced. Memory is all that torch's CPU allocator has
handed out at the worst moment of a step, by the profiler's record, on top of every storage that is alive before it:
parameters, buffers, optimizer states, the pool of gathered weights, buckets of gradients, the rank's batch. The record
lacks what gloo's threads release, which can only make it too large: the least of {memory} steps counts.
"""
HEAD = """\
| model | plan | predicted | noise | measured | noise | error | before | CPU time | error | memory | measured | error |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def page(table: Sequence[Row], provenances: Sequence[str], num_passes: int, load: float) -> str:
    """The results as Markdown."""
    facts = {"date": date.today().isoformat(), "cpus": os.cpu_count(), "torch": torch.__version__, "load": load}
    facts |= {"passes": num_passes, "visits": VISITS_PER_TURN, "steps": STEPS_PER_TURN, "memory": STEPS_FOR_MEMORY}
    text = INTRODUCTION.format(**facts)
    for ranks, provenance in zip(sorted({row.subject.num_ranks for row in table}), provenances, strict=True):
        mine = [row for row in table if row.subject.num_ranks == ranks]
        text += f"\n{section(mine, ranks)}\nThe calibration that plans were searched with: {provenance}.\n"
    return text


def section(table: Sequence[Row], ranks: int) -> str:
    """The rows of one number of ranks, the worst first, and their medians."""
    head = f"## {ranks} {'rank' if ranks == 1 else 'ranks'}\n\n"
    for what, mine in (("searched plans", [r for r in table if r.subject.plan_name == "searched"]), ("all", table)):
        wall, cpu, before, memory = (
            statistics.median(abs(error(row)) for row in mine)
            for error in (
                lambda r: r.time_error,
                lambda r: r.cpu_error,
                lambda r: r.error_before,
                lambda r: r.memory_error,
            )
        )
        head += f"Median error, {what}: {wall:.1%} of a step's time ({cpu:.1%} of CPU time; {before:.1%} as calibrated "
        head += f"before), {memory:.1%} of memory.\n"
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
        f"{row.predicted_noise:.0%}",
        measured,
        f"{row.measured_noise:.0%}",
        f"{row.time_error:+.0%}",
        f"{row.error_before:+.0%}",
    ]
    cells += [cpu, f"{row.cpu_error:+.0%}", *memory, f"{row.memory_error:+.0%}"]
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.zoo_times", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(ZOO), help="of examples/zoo.py; default: all")
    parser.add_argument("--passes", type=int, default=16, help="at least 2; default: 16")
    parser.add_argument(
        "--before",
        type=int,
        default=WORKLOAD.num_passes,
        help="of the calibration that plans are searched with; default: %(default)s, as `shardwright calibrate`, "
        "whose `--thorough` makes five times as many",
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="default: 1 2")
    parser.add_argument("--dry", action="store_true", help="print the page, do not write it")
    options = parser.parse_args(arguments)
    if options.passes < 2:
        parser.error(
            f"argument --passes: expected at least 2, got {options.passes}; noise is how far odd and even ones differ"
        )
    if options.before < 1:
        parser.error(f"argument --before: expected at least 1, got {options.before}; plans need a calibration")
    torch.set_num_threads(1)
    load, table, provenances = os.getloadavg()[0], list[Row](), list[str]()
    for num_ranks in sorted(options.ranks):
        workload = _workload(num_ranks, options.before)
        cluster = calibrate(num_ranks, save=False, timeout_s=workload.timeout_s, workload=workload)
        provenances.append(cluster.provenance)
        table += rows(subjects(cluster, options.models), options.passes)
    text = page(table, provenances, options.passes, load)
    print(text)
    if not options.dry:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
