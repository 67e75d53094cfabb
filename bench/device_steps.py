"""Predicted against measured on one GPU: whole training steps of GPT-2 medium, Llama 1B and ResNeXt-50, and operators.

The GPU is calibrated first, as by `shardwright calibrate`: with operators and kernels, never a model. A model is then
planned for that one device, and run as its authors wrote it, in eager mode and under torch.compile, under autocast to
bf16 on a GPU and in fp32 on a CPU, with AdamW (`fused=True`). A step's time is that of many steps one after the other,
by CUDA events; reported is the mean of the rounds but for the slowest tenth.

Memory is the most that torch's allocator had handed out at once (`torch.cuda.max_memory_allocated`). The prediction's
counterpart is all of its categories but `context` and `communication`, which lie beside the allocator, and `slack`,
what the allocator keeps beyond that; with `slack` it stands beside `max_memory_reserved` in the measurements. cuBLAS's
workspaces, tens of megabytes, are handed out by the allocator though the prediction counts them in `context`.

What the prediction does not know of these runs is part of the error: autocast keeps norms, losses and the sum of
residuals in fp32 where all values count as 16 bits, and batch norms are one kernel where they are captured as several;
what a lowered program computes once, a model does in every step, which is one `arange` of Llama's.

    python -m bench.device_steps                        with a GPU: writes docs/device.md and bench/data/device-*.json
    python -m bench.device_steps --device cpu --small   tries the command, writes nothing
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.allocations import live_storages, peak_bytes
from bench.device_models import MODELS
from bench.device_operators import Measured, Operator
from bench.device_page import Result, Row, data_name, page
from bench.plans import CERTIFIED
from bench.zoo_times import NUM_WARMUP, WORKLOAD
from examples.zoo import Example
from shardwright.cost.calibration.calibrate import calibrate
from shardwright.cost.calibration.measure import Clock
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.program import Programs
from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.capture.capture import capture, find_loss
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.precisions import Precision
from shardwright.search.tree.planner import Planner

ROOT = Path(__file__).parents[1]
PAGE, DATA = ROOT / "docs" / "device.md", ROOT / "bench" / "data"
PRECISIONS: Mapping[str, Precision] = {"cuda": "amp_bf16", "cpu": "fp32"}
MODES = {"eager": False, "compiled": True}
SMALL_BATCH = 4
BACKEND = "inductor"
"""Of torch.compile."""
NO_GPU = (
    "torch sees no GPU; run this on a machine that has one, with a build of torch for it, or try the command by "
    "--device cpu --small"
)


@dataclass(frozen=True)
class Setup:
    """The way to measure steps: on "cuda" or "cpu", with `batch` samples (None: the number of each model's row)."""

    device: str
    batch: int | None
    rounds: int
    small: bool

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.device]

    def build(self, name: str) -> Example:
        """The model in train mode with a batch, on torch's default device or the active mode's fake tensors."""
        model = MODELS[name]
        return model.small(self.batch or SMALL_BATCH) if self.small else model.whole(self.batch or model.batch)


class Stepper:
    """A model on the device, ready to take steps."""

    def __init__(self, name: str, setup: Setup, *, compiled: bool) -> None:
        self.device, self.before = setup.device, live_storages()
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model, self.batch = setup.build(name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.call = torch.compile(self.model, backend=BACKEND) if compiled else self.model

    def step(self) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = find_loss(self.call(**self.batch))
        assert loss is not None
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def resident_bytes(self) -> int:
        """Return the bytes that live between two steps, on a CPU."""
        return sum(size for address, size in live_storages().items() if address not in self.before)


def measure(
    name: str, setup: Setup, *, compiled: bool, ready: type[Stepper] = Stepper
) -> tuple[tuple[float, ...], int, int | None]:
    """Seconds of every round, and the peak of what is allocated and, on a GPU, of what is reserved."""
    stepper, clock = ready(name, setup, compiled=compiled), Clock(setup.device, torch.get_num_threads())
    on_gpu = setup.device == "cuda"
    for _ in range(NUM_WARMUP):  # the first compiles
        stepper.step()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = tuple(clock.kernel_s(stepper.step) for _ in range(setup.rounds))
    if on_gpu:
        return seconds, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return seconds, peak_bytes(stepper, 1), None


def free() -> None:
    """Leave nothing of a model on the device."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def planned(name: str, setup: Setup, cluster: Cluster) -> Graph:
    """The plan of a model for one device; captured on fake tensors, so that no model waits in memory."""
    with FakeTensorMode():
        model, batch = setup.build(name)
        graph = capture(model, batch).graph
    return Planner(cluster, CERTIFIED).plan(graph, name).graph


def calibrated(device: str) -> Cluster:
    """One rank on the device; of one thread, if it is a CPU."""
    workload = WORKLOAD if device == "cpu" else None
    return calibrate(1, device=device, timeout_s=600.0, save=False, workload=workload)


def run(setup: Setup, models: Sequence[str], modes: Sequence[str], num_operators: int) -> Result:
    """Calibrate, predict and measure; of each model the `num_operators` heaviest operators."""
    cluster = calibrated(setup.device)
    rows, operators, left_out = list[Row](), list[Operator](), list[str]()
    for name in models:
        title, graph = MODELS[name].title, planned(name, setup, cluster)
        programs = Programs(graph, cluster)
        for mode in modes:
            print(f"measuring: {title}, {mode}", file=sys.stderr, flush=True)
            timeline = simulate(programs.program(Execution.of(setup.precision, compiled=MODES[mode])))
            try:
                found = measure(name, setup, compiled=MODES[mode])
                rows.append(Row(title, mode, timeline.step_s, timeline.stages[0].memory, *found))
            except torch.OutOfMemoryError:
                left_out.append(f"{title}, {mode}")
            free()
        print(f"measuring: operators of {title}", file=sys.stderr, flush=True)
        try:
            operators += Measured(title, graph, cluster, Execution(setup.precision)).heaviest(num_operators)
        except torch.OutOfMemoryError:
            left_out.append(f"{title}, operators")
        free()
    device = torch.cuda.get_device_name() if setup.device == "cuda" else "CPU, one thread"
    return Result(device, setup.precision, cluster, rows, operators, left_out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, measure, and write the page and the data; those only of whole models on a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.device_steps", description=__doc__)
    parser.add_argument("--device", choices=list(PRECISIONS), default="cuda", help="default: cuda")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: both")
    parser.add_argument("--batch", type=int, help="samples of a batch; default: each model's own")
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    parser.add_argument("--operators", type=int, default=40, help="of each model, the heaviest; default: 40")
    parser.add_argument("--small", action="store_true", help="a few small layers of each model")
    parser.add_argument("--dry", action="store_true", help="print the page, write nothing")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error(NO_GPU)
    if options.rounds < 2:
        parser.error(f"--rounds: expected at least 2, got {options.rounds}; noise is how far odd and even ones differ")
    for name in ("batch", "operators"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    if not on_gpu:
        torch.set_num_threads(1)
    setup = Setup(options.device, options.batch, options.rounds, options.small)
    result = run(setup, options.models, options.modes, options.operators)
    text = page(result)
    print(text)
    if on_gpu and not options.small and not options.dry:
        PAGE.write_text(text)
        (DATA / data_name(result.device)).write_text(json.dumps(result.to_json(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
