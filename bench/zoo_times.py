"""Predicted against measured: step time and peak memory of every model of the zoo, on one and on two local ranks.

The machine is calibrated as by `shardwright calibrate`, with operators, kernels and collectives, never a model. Steps
are measured in two ways, and a step's time is its slowest rank's:

alone       Every plan takes steps in processes of its own, as a user's does, in several rounds. They are predicted by
            two calibrations together: one before, which plans are searched by, and one after.
between     Plans take turns between the points of another calibration, all in the same processes. A turn is a few
            steps, of which the first warms the caches that other work used.

A processor that shares its core with other work of its host can be half as fast for seconds, and a rank may have such a
one while another has not; and a shared machine drifts, by more than predictions err. So turns are many and short, and
what predicts them comes from the same minutes; of those that ran alone, a loop of plain Python tells how far their
minutes were slower or faster than those of their calibrations.

Memory is the most that a step allocates (`bench/allocations.py`), on top of what is there before it: every storage that
a tensor of the plan keeps alive, be it a parameter, an optimizer's state, a gathering buffer or a bucket.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.allocations import live_storages, peak_bytes
from bench.plans import CERTIFIED
from bench.zoo_page import Calibration, Row, page
from examples.zoo import ZOO
from shardwright.cost.calibration.calibrate import measured_cluster
from shardwright.cost.calibration.measure import Rank
from shardwright.cost.calibration.workload import Visit, Workload, points_of, read_visits, trimmed_mean
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import Timeline, simulate
from shardwright.lowering.module import ParallelModule, lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import Captured, capture
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.search.plan import Plan
from shardwright.search.request.restrict import DATA, TENSOR, ZERO
from shardwright.search.tree.planner import Planner

PAGE = Path(__file__).parents[1] / "docs" / "local.md"
FORCED = {"data": DATA, "zero": ZERO, "tensor": TENSOR}
WORKLOAD = Workload(num_ranks=1, num_threads=1, timeout_s=300.0)  # ranks of one thread, as `run_ranks` has them
NUM_WARMUP = 4
STEPS_PER_TURN = 3
VISITS_PER_TURN = 6
STEPS_FOR_MEMORY = 15
LOOP = 60_000  # additions: some milliseconds, as long as a step
ROUNDS_ALONE = 3
STEPS_ALONE = 30  # of a round
LOOPS_ALONE = 5
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Subject:
    """A model with one of its plans; `predicted_bytes` is the peak of its memory."""

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


# ---- running ----


class Stepper:
    """One plan on this rank, ready to take steps."""

    def __init__(
        self,
        module: ParallelModule,
        batch: Mapping[str, Tensor],
        before: Mapping[int, int],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """`before`: the storages that were alive before `module` was made and still are; `optimizer`: default AdamW."""
        self.module, self.batch, self.before = module, batch, before
        self.optimizer = optimizer or torch.optim.AdamW(list(module.parameters()), lr=1e-4, fused=True)

    def step(self) -> None:
        self.module.forward_backward(**self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def resident_bytes(self) -> int:
        """Return this rank's bytes between two steps: all storages of this plan, and the batch as passed."""
        own = {address: size for address, size in live_storages().items() if address not in self.before}
        return sum(own.values()) + sum(tensor.nbytes for tensor in self.batch.values())


class Measured(NamedTuple):
    """The measurements of a rank.

    steps    by subject's name, every turn's wall and CPU seconds of the steps that count
    memory   by subject's name, the peak in bytes
    loops    CPU seconds of the loop at every turn
    """

    steps: dict[str, list[list[tuple[float, float]]]]
    memory: dict[str, int]
    loops: list[float]


def run(subjects: Sequence[Subject], workload: Workload, visits: Path) -> Measured:
    """A calibration on this rank with the subjects' turns in between; what it measures is added to `visits`."""
    steppers: dict[str, Stepper] = {}
    measured = Measured({subject.name: [] for subject in subjects}, {}, [])
    for subject in subjects:
        steppers[subject.name], model = _lowered(subject)
        # While the model is there, so that its storages' addresses are taken.
        measured.memory[subject.name] = peak_bytes(steppers[subject.name], STEPS_FOR_MEMORY)
        del model
    rank, turns = Rank(dist.get_rank(), workload, visits), cycle(steppers)
    gc.disable()
    for number in range(workload.num_passes):
        gc.collect()
        with redirect_stdout(sys.stderr):
            for visit, _ in enumerate(rank.visits(number)):
                if visit % VISITS_PER_TURN == 0:
                    measured.loops.append(_together_s(_loop)[1])
                    if name := next(turns, None):
                        measured.steps[name].append(_turn(steppers[name]))
    gc.enable()
    return measured


def run_alone(subject: Subject) -> tuple[list[float], list[float]]:
    """Return a plan's times alone on this rank: wall seconds of its steps, and CPU seconds of some loops after them."""
    stepper, _ = _lowered(subject)
    gc.disable()
    steps = [_together_s(stepper.step)[0] for _ in range(STEPS_ALONE)]
    return steps, [_together_s(_loop)[1] for _ in range(LOOPS_ALONE)]


def _lowered(subject: Subject) -> tuple[Stepper, nn.Module]:
    """A plan that has taken its first steps, and the model that it is of."""
    torch.manual_seed(0)
    model, batch = ZOO[subject.model]()
    captured, before = subject.captured, live_storages()
    module = lower(subject.plan.graph, model, constants=captured.constants, options=captured.options)
    stepper = Stepper(module, batch, before)
    for _ in range(NUM_WARMUP):
        stepper.step()
    return stepper, model


def _turn(stepper: Stepper) -> list[tuple[float, float]]:
    """The first step is left out."""
    return [_together_s(stepper.step) for _ in range(STEPS_PER_TURN)][1:]


def _together_s(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call that all ranks begin at once.

    Wall time, and the CPU time of this thread: what the wall time were, but for waiting, on an idle machine.
    """
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - start, time.thread_time() - start_cpu


def _loop() -> int:
    """Work for a processor alone."""
    total = 0
    for number in range(LOOP):
        total += number
    return total


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


def _workload(num_ranks: int, num_passes: int) -> Workload:
    """Passes as long as those of `shardwright calibrate`."""
    times = num_passes / WORKLOAD.num_passes
    seconds, timeout_s = WORKLOAD.seconds_per_point * times, WORKLOAD.timeout_s * max(1.0, times)
    return replace(WORKLOAD, num_ranks=num_ranks, num_passes=num_passes, seconds_per_point=seconds, timeout_s=timeout_s)


class Passes(NamedTuple):
    """Passes of a calibration, and what every rank measured in between."""

    workload: Workload
    visits: dict[str, list[Visit]]
    ranks: list[Measured]

    def cluster(self, part: slice = slice(None)) -> Cluster:
        """Return the cluster as measured by all passes, or by a part of them."""
        return measured_cluster(points_of({key: passes[part] for key, passes in self.visits.items()}), self.workload)

    def joined(self, other: Passes) -> Passes:
        """Join the passes with others of the same workload to one calibration."""
        visits = {key: [*found, *other.visits[key]] for key, found in self.visits.items()}
        pairs = zip(self.ranks, other.ranks, strict=True)
        ranks = [Measured({}, {}, earlier.loops + later.loops) for earlier, later in pairs]
        return Passes(self.workload, visits, ranks)

    def loop_s(self) -> float:
        """Return the trimmed mean over turns of the slowest rank's loop, as for steps."""
        return trimmed_mean(np.max([rank.loops for rank in self.ranks], axis=0).tolist())


def passes(found: Sequence[Subject], num_ranks: int, num_passes: int) -> Passes:
    """Calibrate with turns of `found` in between."""
    workload = _workload(num_ranks, num_passes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "visits.jsonl"
        ranks = run_ranks(run, num_ranks, TIMEOUT_S, args=(found, workload, path))
        return Passes(workload, read_visits(path), ranks)


class Alone(NamedTuple):
    """Seconds of every step of plans in processes of their own, by subject's name, and of loops: the slowest rank's."""

    steps: dict[str, list[float]]
    loops: list[float]


def alone(found: Sequence[Subject], num_ranks: int) -> Alone:
    """Each of `found` in processes of its own, in rounds."""
    measured = Alone({subject.name: [] for subject in found}, [])
    for subject in list(found) * ROUNDS_ALONE:
        steps, loops = zip(*run_ranks(run_alone, num_ranks, TIMEOUT_S, args=(subject,)), strict=True)
        measured.steps[subject.name].extend(np.max(steps, axis=0).tolist())
        measured.loops.extend(np.max(loops, axis=0).tolist())
    return measured


def rows(found: Sequence[Subject], between: Passes, around: Passes, by_itself: Alone) -> list[Row]:
    """Return a row for every subject: predictions of the passes, measurements between them, and those of it alone."""
    parts = (slice(None), slice(0, None, 2), slice(1, None, 2))
    clusters = [*(between.cluster(part) for part in parts), around.cluster()]
    return [_row(subject, clusters, between.ranks, by_itself.steps[subject.name]) for subject in found]


def _row(subject: Subject, clusters: Sequence[Cluster], ranks: Sequence[Measured], alone_s: Sequence[float]) -> Row:
    """A step is as slow as its slowest rank, and the fullest rank's memory counts."""
    predicted_s, odd_s, even_s, around_s = (subject.predicted_s(cluster) for cluster in clusters)
    slowest = np.max([rank.steps[subject.name] for rank in ranks], axis=0)  # [turn, step, wall or CPU]
    measured_s, cpu_s, odd, even = (
        trimmed_mean(seconds.ravel().tolist())
        for seconds in (slowest[..., 0], slowest[..., 1], slowest[::2, :, 0], slowest[1::2, :, 0])
    )
    return Row(
        model=subject.model,
        plan_name=subject.plan_name,
        num_ranks=subject.num_ranks,
        predicted_alone_s=around_s,
        alone_s=trimmed_mean(alone_s),
        predicted_s=predicted_s,
        predicted_noise=abs(odd_s / even_s - 1),
        measured_s=measured_s,
        measured_noise=abs(odd / even - 1),
        cpu_s=cpu_s,
        predicted_bytes=subject.predicted_bytes,
        measured_bytes=max(rank.memory[subject.name] for rank in ranks),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, measure and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.zoo_times", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(ZOO), help="of examples/zoo.py; default: all")
    parser.add_argument("--passes", type=int, default=16, help="at least 2; default: %(default)s")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="default: 1 2")
    parser.add_argument("--dry", action="store_true", help="print the page, do not write it")
    options = parser.parse_args(arguments)
    if options.passes < 2:
        parser.error(
            f"argument --passes: expected at least 2, got {options.passes}; noise is how far odd and even ones differ"
        )
    torch.set_num_threads(1)
    load, table, calibrations = os.getloadavg()[0], list[Row](), list[Calibration]()
    for num_ranks in sorted(options.ranks):
        before = passes([], num_ranks, WORKLOAD.num_passes)
        found = subjects(before.cluster(), options.models)
        by_itself = alone(found, num_ranks)
        around = before.joined(passes([], num_ranks, WORKLOAD.num_passes))
        between = passes(found, num_ranks, options.passes)
        table += rows(found, between, around, by_itself)
        drift = trimmed_mean(by_itself.loops) / around.loop_s() - 1
        calibrations.append(Calibration(num_ranks, around.cluster().provenance, drift))
    facts = {
        "passes": options.passes,
        "visits": VISITS_PER_TURN,
        "steps": STEPS_PER_TURN,
        "rounds": ROUNDS_ALONE,
        "alone": STEPS_ALONE,
        "memory": STEPS_FOR_MEMORY,
    }
    text = page(table, calibrations, load, facts)
    print(text)
    if not options.dry:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
