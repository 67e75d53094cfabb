"""Runs of a lowered program on forked ranks, compared with the single process."""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.accuracy import prepare
from bench.allocations import live_storages, peak_bytes
from bench.zoo_times import Stepper
from examples.zoo import ZOO
from shardwright.lowering.module import ParallelModule, lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime.entry import Entry
from shardwright.pcg.capture.capture import Captured, capture, find_loss
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layouts
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.meshes import num_devices
from tests.lowering.parallelize import Choose, follow, parallelize

Batch = dict[str, Tensor]
SEED = 7


def hang(done: Path, most_s: float) -> None:
    """Until another process has made this file, or for so long: a rank that is stuck for as long as it takes to see."""
    end = time.monotonic() + most_s
    while not done.exists() and time.monotonic() < end:
        time.sleep(0.05)


@dataclass
class Case:
    """A model and a batch with their capture, to be run under several parallel graphs."""

    model: nn.Module
    batch: Batch
    known: InitVar[Captured | None] = None
    captured: Captured = field(init=False)

    def __post_init__(self, known: Captured | None) -> None:
        self.captured = known or capture(self.model, self.batch)

    def graph(
        self, mesh: Mesh, storage: Mapping[str, Layouts], choose: Choose | None = None, data_axes: tuple[int, ...] = ()
    ) -> Graph:
        serial = self.captured.graph
        return parallelize(serial, mesh, choose or follow(serial, mesh, data_axes), storage)

    def lower(self, graph: Graph, execution: Execution = DEFAULT) -> ParallelModule:
        known: dict[str, Any] = {"constants": self.captured.constants, "options": self.captured.options}
        return lower(graph, self.model, **known, timeout_s=30, execution=execution)

    def on_ranks(
        self, graph: Graph, body: Callable[[ParallelModule], Any], execution: Execution = DEFAULT, **options: Any
    ) -> list[Any]:
        """`body(parallel)` on every rank of the graph's mesh."""
        return run_ranks(lambda: body(self.lower(graph, execution)), graph.mesh.num_devices, 30, **options)

    def on_ranks_of(
        self, plans: Sequence[tuple[Graph, Execution]], body: Callable[[ParallelModule], Any]
    ) -> list[list[Any]]:
        """Of each plan, `body(parallel)` on every rank."""
        return run_all([(num_devices(g.mesh, run), partial(self._run, g, run, body)) for g, run in plans])

    def _run(self, graph: Graph, execution: Execution, body: Callable[[ParallelModule], Any]) -> Any:
        return body(self.lower(graph, execution))


def run_all(jobs: Sequence[tuple[int, Callable[[], Any]]]) -> list[list[Any]]:
    """Of each job, what it gives on every one of so many ranks. Those of equally many run in turn in the same ones."""
    results = dict[int, list[Any]]()
    for world in sorted({world for world, _ in jobs}):
        own = {number: body for number, (num_ranks, body) in enumerate(jobs) if num_ranks == world}
        ranks = run_ranks(lambda bodies: [body() for body in bodies], world, 120, args=(list(own.values()),))
        results |= dict(zip(own, map(list, zip(*ranks, strict=True)), strict=True))
    return [results[number] for number in range(len(jobs))]


def beside_each_other(runs: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What they give, each in a fork, from which it may fork ranks: of what mostly waits."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def run(name: str) -> None:
        try:
            queue.put((name, True, runs[name]()))
        except BaseException:  # noqa: BLE001 - the parent tells it
            queue.put((name, False, traceback.format_exc()))

    forks = [context.Process(target=run, args=(name,)) for name in runs]
    for fork in forks:
        fork.start()
    found = [queue.get() for _ in runs]
    for fork in forks:
        fork.join()
    assert [f"{name}: {told}" for name, is_good, told in found if not is_good] == []
    return {name: given for name, _, given in found}


def entry_of(parallel: ParallelModule) -> Entry:
    """What runs the steps of a module that was compiled for one batch."""
    (entry,) = parallel.entries
    return entry


def of_zoo(name: str) -> Case:
    """A model of the zoo, captured once in this process. Nothing may change it."""
    prepared = prepare(name)
    return Case(prepared.model, prepared.batch, prepared.captured)


@cache
def doubled(name: str) -> Case:
    """The same in float64, but for what the model computes in float32 by itself."""
    torch.manual_seed(0)
    model, batch = ZOO[name]()
    return Case(model.double(), batch)


@dataclass
class Step:
    """What one step leaves: loss, gradients and buffers as whole tensors, and the generator's state."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    generator: Tensor


def peak_on_rank(case: Case, graph: Graph, execution: Execution = DEFAULT, *, steps: int = 2) -> int:
    """The most bytes that this rank holds, after two steps: constants, buckets and optimizer states are there."""
    before = live_storages()
    stepper = Stepper(case.lower(graph, execution), case.batch, before)
    stepper.step()
    stepper.step()
    return peak_bytes(stepper, steps)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def outcome(module: nn.Module, loss: Tensor) -> Step:
    return Step(
        loss.detach(),
        {name: None if p.grad is None else whole(p.grad) for name, p in module.named_parameters()},
        {name: whole(b) for name, b in module.named_buffers()},
        torch.get_rng_state(),
    )


def serial_step(case: Case) -> Step:
    model = copy.deepcopy(case.model)
    torch.manual_seed(SEED)
    loss = find_loss(model(**case.batch))
    assert loss is not None
    loss.backward()
    return outcome(model, loss)


def parallel_step(parallel: ParallelModule, batch: Batch) -> Step:
    torch.manual_seed(SEED)
    return outcome(parallel, parallel.forward_backward(**batch))


def load_backends() -> None:
    """Load here, once, what every rank that compiles would load by itself: two seconds each."""
    from torch._dynamo import lookup_backend

    lookup_backend("aot_eager")
    importlib.import_module("torch._inductor.lowering")


def assert_same_step(found: Step, expected: Step, tolerance: float, case: str = "") -> None:
    """Losses, gradients and buffers agree.

    A gradient's error is its largest deviation relative to its own largest element, or, for gradients that are zero but
    for rounding, to a thousandth of the largest element of all gradients. `case`: what failed, of several.
    """
    told = f"{case}: " if case else ""
    torch.testing.assert_close(found.loss, expected.loss, rtol=tolerance, atol=0, msg=lambda m: f"{told}loss: {m}")
    assert found.gradients.keys() == expected.gradients.keys(), case
    largest = max(float(g.abs().max()) for g in expected.gradients.values() if g is not None)
    for name, gradient in expected.gradients.items():
        got = found.gradients[name]
        if gradient is None:
            assert got is None or not got.any(), told + name
            continue
        assert got is not None, told + name
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((got - gradient).abs().max()) <= 10 * tolerance * scale, told + name
    for name, buffer in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=tolerance, atol=tolerance, msg=told + name)
    assert torch.equal(found.generator, expected.generator), case


def assert_trains_as_serial(case: Case, graph: Graph, tolerance: float = 1e-11) -> None:
    assert_all_train_as_serial(case, {"": graph}, tolerance)


def assert_all_train_as_serial(case: Case, graphs: Mapping[str, Graph], tolerance: float = 1e-11) -> None:
    """`graphs`: by the names that failures have."""
    expected = serial_step(case)
    plans = [(graph, DEFAULT) for graph in graphs.values()]
    by_plan = case.on_ranks_of(plans, lambda parallel: parallel_step(parallel, case.batch))
    for name, steps in zip(graphs, by_plan, strict=True):
        for step in steps:
            assert_same_step(step, expected, tolerance, name)
