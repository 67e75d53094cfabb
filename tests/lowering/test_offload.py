"""Programs whose values wait for backward on the host: the same steps to the bit, copies in the order of the list."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from examples.zoo import GPT
from shardwright.cost.clusters.local import default_cluster
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime import host
from shardwright.lowering.runtime.host import ThreadLink
from shardwright.pcg.errors import MachineError, PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.places import places
from tests.each import RANDOM_CASES, WHOLE_GRIDS, each, in_whole_grids, some
from tests.lowering.pipelines import evenly, of_one_stage, step
from tests.lowering.runs import (
    Case,
    Step,
    assert_same_step,
    doubled,
    entry_of,
    load_backends,
    parallel_step,
    peak_on_rank,
    serial_step,
    whole,
)
from tests.lowering.test_zoo import graphs

NAMES = ["gpt", "llama", "t5"] if RANDOM_CASES else ["gpt"]
NUM_RANDOM = -(-RANDOM_CASES // len(NAMES)) or 1
"""Random plans of each model."""


def twice(found: Case, graph: Graph, run: Execution) -> Step:
    """The second of two steps, in which memory and buffers are used again."""
    parallel = found.lower(graph, run)
    parallel_step(parallel, found.batch)
    parallel.zero_grad()
    return parallel_step(parallel, found.batch)


def assert_equal(found: Step, expected: Step, case: str) -> None:
    assert torch.equal(found.loss, expected.loss), case
    for name, gradient in expected.gradients.items():
        got = found.gradients[name]
        assert gradient is got or (gradient is not None and got is not None and torch.equal(got, gradient)), case + name


def some_places(graph: Graph, rng: random.Random) -> dict[str, tuple[str, ...]]:
    """Any operations of every block and of what lies in none."""
    operations, share = Operations(graph).listed, rng.choice((0.2, 0.5, 0.9))
    where, chosen = places(graph, {o.name: o.block for o in operations}), dict[str, dict[str, None]]()
    for o in operations:
        if rng.random() < share:
            chosen.setdefault(o.block, {})[where[o.name]] = None
    return {block: tuple(own) for block, own in chosen.items()}


class Plan(NamedTuple):
    """A graph, how it is run, and how the same is run that keeps all that is not made again."""

    graph: Graph
    run: Execution

    @property
    def kept(self) -> Execution:
        return Execution(recompute=self.run.recompute, pieces=self.run.pieces, schedule=self.run.schedule)


def plans(name: str) -> list[Plan]:
    """Data parallelism, ZeRO-3 and split weights, with and without values made again, and with random places."""
    found, rng = doubled(name), random.Random(name)
    runs = [Execution(offload="full"), Execution(offload="full", recompute="full")]
    own = [Plan(graph, run) for graph, run in product(graphs(found), runs)]
    laid_out = graphs(found)
    for number in range(max(NUM_RANDOM, len(laid_out))):
        graph = laid_out[number % len(laid_out)]
        again: Any = some_places(graph, rng) if number % 2 == 0 else rng.choice(("none", "selective", "full"))
        own.append(Plan(graph, Execution(recompute=again, offload=some_places(graph, rng))))
    return own if RANDOM_CASES else some(own, 5)


@each("name", NAMES)
def test_steps_are_those_of_one_process_to_the_bit(name: str) -> None:
    """Dropout on."""
    found, todo = doubled(name), plans(name)

    def body() -> list[tuple[Step, Step]]:
        return [(twice(found, plan.graph, plan.run), twice(found, plan.graph, plan.kept)) for plan in todo]

    expected = serial_step(found)
    for steps in run_ranks(body, 2, 300):
        for plan, (away, kept) in zip(todo, steps, strict=True):
            assert_equal(away, kept, f"{plan.run}: ")
            assert_same_step(away, expected, 1e-9, str(plan.run))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"] if WHOLE_GRIDS else ["1f1b"])
def test_steps_in_microbatches_and_stages_are_the_same(schedule: Any) -> None:
    """Two ranks for each stage share the batch; blocks are stored in slices. Some of what waits is of another stage."""
    found, many = doubled("gpt"), 4
    graph = of_one_stage(found, ("data",), many, "zero-3")
    asked: list[Any] = some(["full", {"blocks.1": ["up", ":gelu", ":add"]}, {"blocks.0": "full"}], 2)
    modes: list[Any] = ["none", "full"] if WHOLE_GRIDS else ["full"]
    chunks = 2 if schedule == "interleaved" else 1
    runs = [evenly(graph, 2, schedule, chunks, recompute=mode) for mode in modes] if chunks == 1 or WHOLE_GRIDS else []
    in_time = [Execution(recompute=mode) for mode in modes]
    pairs = [(run, run.having(offload=away)) for run in (*runs, *in_time) for away in asked]
    jobs = [(graph, run) for pair in pairs for run in pair]
    steps = iter(found.on_ranks_of(jobs, lambda parallel: step(parallel, found.batch)))
    for (_, run), kept, away in zip(pairs, steps, steps, strict=True):
        for (loss, gradients), (own, expected) in zip(away, kept, strict=True):
            assert torch.equal(loss, own), run
            for name, gradient in expected.items():
                assert gradient is None or torch.equal(gradients[name], gradient), (run, name)


@in_whole_grids
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in dynamo
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # so too
def test_compiled_programs_give_the_same() -> None:
    found, run = doubled("gpt"), Execution(offload="full", recompute="selective")
    load_backends()

    def body(parallel: ParallelModule) -> Step:
        parallel.compile(backend="aot_eager")
        return parallel_step(parallel, found.batch)

    expected = serial_step(found)
    for one in found.on_ranks(graphs(found)[1], body, run):
        assert_same_step(one, expected, 1e-9)


def test_backward_twice_fetches_once() -> None:
    """With `retain_graph`, a value that has arrived stays."""
    found = doubled("gpt")

    def body(parallel: ParallelModule) -> bool:
        torch.manual_seed(0)
        loss = parallel(**found.batch)
        loss.backward(retain_graph=True)
        once = {name: whole(p.grad).clone() for name, p in parallel.named_parameters() if p.grad is not None}
        loss.backward()
        grads = {name: whole(p.grad) for name, p in parallel.named_parameters() if p.grad is not None}
        return all(torch.equal(grads[name], 2 * own) for name, own in once.items())

    assert found.on_ranks(graphs(found)[0], body, Execution(offload="full")) == [True, True]


# ---- order, overlap and memory ----


def events(parallel: ParallelModule, batch: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a step does with each value, by its place among those that leave; "late": it is not here when it is read."""
    found, places_of = list[str](), dict[host.Away, int]()

    def note(method: str) -> None:
        real = getattr(host.Away, method)

        def spied(item: host.Away, *args: Any) -> Any:
            if (does := method != "fetch" or item.here is None) and method == "__init__":
                places_of[item] = len(places_of)
            found.extend([f"{method} {places_of[item]}"] * does)
            return real(item, *args)

        monkeypatch.setattr(host.Away, method, spied)

    def opened(part: host.Part) -> Tensor:
        is_late = part.away.here is None or part.away._wait is not None
        found.append(f"{'late' if is_late else 'read'} {places_of[part.away]}")
        return real_tensor(part)

    real_tensor = host.Part.tensor
    monkeypatch.setattr(host.Part, "tensor", opened)
    for method in ("__init__", "release", "fetch"):
        note(method)
    parallel.forward_backward(**batch)
    monkeypatch.undo()
    return found


@each("name", ["gpt", "bert"] if WHOLE_GRIDS else ["gpt"])
@each("recompute", ["none", "full"])
def test_copies_are_made_in_the_order_of_the_list_ahead_of_their_need(
    name: str, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each value that leaves is one that autograd needs. The loss keeps a value of its own, not the logits."""
    found, run = doubled(name), Execution(offload={"": "none", "*": "full"}, recompute=recompute)

    def body() -> list[tuple[list[str], list[str]]]:
        taken = list[tuple[list[str], list[str]]]()
        for graph in graphs(found):
            parallel = found.lower(graph, run)
            todo = entry_of(parallel).runner._outside.actions
            place = {number: place for place, number in enumerate(todo.of("offload"))}
            words = {"offload": "__init__", "release": "release", "fetch": "fetch"}
            listed = [a for side in (todo.forward, todo.backward) for own in side for a in own if a.verb in words]
            wanted = [f"{words[a.verb]} {place[a.number]}" for a in listed]
            taken.append((events(parallel, found.batch, monkeypatch), wanted))
        return taken

    for taken in run_ranks(body, 2, 120):
        for done, wanted in taken:
            reads = {event for event in done if event.startswith(("read", "late"))}
            assert [event for event in done if event not in reads] == wanted
            assert reads == {f"read {number}" for number in range(len(wanted) // 3)}
            assert wanted


def test_memory_falls_as_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPT with attention written out and dropout, by data parallelism; within 2 % of what the timeline says."""
    torch.manual_seed(0)
    ids = torch.randint(64, (2, 8, 64))
    found = Case(GPT(64, 64, 64, 4, 6), {"ids": ids[0], "targets": ids[1]})
    asked: list[Any] = ["none", {"blocks.0-2": "full"}, {"blocks.0-3": "full", "blocks.*": ["up", ":gelu"]}]
    runs = [*(Execution(offload=away) for away in asked), Execution(recompute="full", offload="full")]
    graph = graphs(found)[0]

    def peak(run: Execution) -> int:
        """Without the host's buffers, which the steps before the measured one have made."""
        hosts, real = list[host.Host](), host.Host.__init__
        monkeypatch.setattr(host.Host, "__init__", lambda own, *args: (hosts.append(own), real(own, *args))[1])
        try:
            return peak_on_rank(found, graph, run, steps=1) - sum(own.num_bytes for own in hosts)
        finally:
            monkeypatch.undo()

    measured = run_ranks(lambda: [peak(run) for run in runs], 2, 120)[0]
    local = default_cluster(2)
    cluster = replace(local, device=replace(local.device, host_bytes_per_s=1e12))
    steps = [simulate(program(graph, cluster, run)) for run in runs]
    assert measured == pytest.approx([step.fullest.memory.total_bytes for step in steps], rel=0.02)
    assert measured == sorted(measured, reverse=True)


def test_what_the_host_cannot_do_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    link = ThreadLink(0.01)
    monkeypatch.setattr(ThreadLink, "bytes_per_s", 1e3)
    wait = link.copy(torch.empty(100), torch.empty(100))
    with pytest.raises(MachineError, match=r"offload: a copy .* takes longer than 0\.01 s; offload less, or"):
        wait()
    with pytest.raises(MachineError, match=r"offload: the host has no 9\d* bytes of memory beside the 0 that"):
        host.Host(torch.device("cpu"), 1.0).take(9 * 10**17)


def test_two_parts_of_backward_are_refused() -> None:
    graph = graphs(doubled("gpt"))[0]
    run = Execution.of(offload="full", num_stages=2, schedule="zero-bubble", num_microbatches=2)
    with pytest.raises(PlanError, match="offload: with schedule 'zero-bubble' backward runs in two parts"):
        Operations(graph, run)
