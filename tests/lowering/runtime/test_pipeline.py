"""Steps in pipeline stages: what one process does, under every schedule, with and without axes inside of a stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.cli.dryrun import DryRunReport
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.cost.timeline.program import program
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks import channels
from shardwright.lowering.ranks.channels import Incoming, Outgoing
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.runtime import pipeline
from shardwright.lowering.runtime.reducer import Reducer
from shardwright.lowering.runtime.runner import Runner
from shardwright.lowering.text.outside import find_outside
from shardwright.lowering.trial.dryrun import dry_run
from shardwright.pcg.graph import Graph
from shardwright.pcg.stages import cut
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.pipelining import ScheduleName
from shardwright.pcg.step.time import as_run
from shardwright.search import check
from shardwright.search.plan import Plan, SearchReport
from shardwright.search.tree.spreading import in_pieces
from tests.each import some
from tests.lowering.pipelines import Outcome, evenly, in_one_process, in_stages, of_one_stage, step, worst_error
from tests.lowering.runs import Case, entry_of
from tests.lowering.test_microbatches import case

SENT_IN_PIECES: dict[ScheduleName, int] = {"1f1b": 1, "interleaved": 2}
Exchange = Callable[[Tensor, int, dist.ProcessGroup], dist.Work | None]
Cell = tuple[int, ScheduleName, int, tuple[str, ...], int, Zero]
CELLS: list[Cell] = [
    (2, "1f1b", 1, (), 1, "kept"), (4, "1f1b", 1, (), 4, "kept"), (2, "gpipe", 1, ("zero",), 4, "zero-3"),
    (2, "interleaved", 2, ("data",), 4, "kept"), (2, "zero-bubble", 1, ("tensor",), 2, "kept"),
    (4, "zero-bubble", 1, (), 4, "kept"), (2, "zero-bubble", 1, ("zero",), 4, "zero-3"),
    (2, "eager-1f1b", 1, ("zero",), 4, "zero-1"), (2, "1f1b", 1, ("zero",), 2, "zero-2"),
]  # fmt: skip
"""Stages, schedule, chunks, roles of the axes of a stage, microbatches, lifetime of what is gathered."""


@pytest.mark.parametrize(("name", "cells"), [("gpt", some(CELLS, 4)), ("t5", some(CELLS[1:6:2], 1))], ids=["gpt", "t5"])
def test_steps_in_stages_are_those_of_one_process(name: str, cells: list[Cell]) -> None:
    """Dropout on; a tied head, and in T5 an encoder that all decoder blocks read."""
    found = case(name)
    expected = in_one_process(found)
    plans = list[tuple[Graph, Execution]]()
    for stages, schedule, chunks, roles, many, zero in cells:
        graph = of_one_stage(found, roles, many, zero)
        plans.append((graph, evenly(graph, stages, schedule, chunks)))
    for cell, by_rank in zip(cells, in_stages(found, plans), strict=True):
        assert worst_error(by_rank, expected) < 1e-11, cell


def test_pieces_of_what_all_ranks_have_are_sent_and_gathered() -> None:
    """In equal steps, with half of the bytes over boundaries where both ranks have all of a value."""
    found, plans = case("gpt"), list[tuple[Graph, Execution]]()
    for schedule, chunks in SENT_IN_PIECES.items():
        graph = of_one_stage(found, ("tensor",), 2)
        run = evenly(graph, 2, schedule, chunks)
        pieces = pieced(graph, run)
        assert check.difference(pieces.erased(), graph.erased()) is None
        wholes = {node.name.partition(".whole_")[::2] for node in pieces.nodes if ".whole_" in node.name}
        stages = cut(as_run(graph, run), run)
        assert all(int(stage.partition("_")[0]) > stages.where[name] for name, stage in wholes)
        whole, halves = (
            program(as_run(own, run).validate(), Cluster.local(4), run).hops_bytes for own in (graph, pieces)
        )
        assert {own / all_of_it for own, all_of_it in zip(halves, whole, strict=True)} in ({0.5}, {0.5, 1.0})
        plans.append((pieces, run))
    expected = in_one_process(found)
    assert all(worst_error(by_rank, expected) < 1e-11 for by_rank in in_stages(found, plans))


def pieced(graph: Graph, run: Execution) -> Graph:
    return in_pieces(graph, cut(as_run(graph, run), run))


@contextmanager
def connected_like_nccl() -> Generator[None]:
    """Two ranks that first exchange something in a group wait for each other, as its communicator is made then."""
    store, known = dist.distributed_c10d._get_default_store(), set[tuple[str, int]]()

    def connecting(exchange: Exchange) -> Exchange:
        def run(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> dist.Work | None:
            name, me = group.group_name, dist.get_rank()
            if (name, peer) not in known:
                known.add((name, peer))
                store.set(f"{name}: {me} to {peer}", "")
                store.wait([f"{name}: {peer} to {me}"], timedelta(seconds=5))
            return exchange(tensor, peer, group)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for side in (Outgoing, Incoming):
            patch.setattr(side, "exchange", staticmethod(connecting(side.exchange)))
        yield


class WaitedForOnce:
    """What is waited for twice, of which gloo takes only the first."""

    def __init__(self, work: dist.Work) -> None:
        self.work: dist.Work | None = work

    def wait(self, timeout: timedelta) -> None:
        work, self.work = self.work, None
        if work is not None:
            work.wait(timeout)


@contextmanager
def loading_kernels() -> Generator[None]:
    """Whatever is computed waits until all is done that was sent and posted before, as it may on a GPU."""
    running = list[WaitedForOnce]()

    def noted(exchange: Callable[..., Any]) -> Callable[..., WaitedForOnce]:
        def run(*args: Any) -> WaitedForOnce:
            running.append(WaitedForOnce(exchange(*args)))
            return running[-1]

        return run

    def waiting(compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            for work in running:
                work.wait(timedelta(seconds=5))
            running.clear()
            return compute(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for side in (Outgoing, Incoming):
            patch.setattr(side, "exchange", staticmethod(noted(side.exchange)))
        patch.setattr(Runner, "run", waiting(Runner.run))
        patch.setattr(Reducer, "watch", waiting(Reducer.watch))
        yield


@pytest.fixture(scope="module")
def as_on_gpus() -> list[tuple[Graph, Execution]]:
    """Neighbours, chunks that go round, backward in two parts, stages of unlike sizes."""
    found = case("gpt")
    graph, cut_in_two = of_one_stage(found, (), 4), of_one_stage(found, ("data",), 2)
    names: list[tuple[int, ScheduleName, int]] = [
        (3, "1f1b", 1), (2, "eager-1f1b", 1), (2, "interleaved", 2), (3, "zero-bubble", 1)
    ]  # fmt: skip
    plans = [(graph, evenly(graph, stages, schedule, chunks)) for stages, schedule, chunks in names]
    return [*plans, (cut_in_two, evenly(cut_in_two, 2, sizes=(2, 1)))]


def test_first_steps_on_gpus_end(as_on_gpus: list[tuple[Graph, Execution]]) -> None:
    """Where ranks wait for each other to connect, and kernels that are loaded for those that run; then a usual step."""
    found = case("gpt")

    def two_steps(parallel: ParallelModule) -> list[Outcome]:
        with pytest.MonkeyPatch.context() as patch:
            for module in (channels, pipeline):
                patch.setattr(module, "waits_in_kernels", lambda _: True)
            with connected_like_nccl(), loading_kernels():
                first = step(parallel, found.batch)
            parallel.zero_grad()
            return [first, step(parallel, found.batch)]

    expected = in_one_process(found)
    for (_, execution), by_rank in zip(as_on_gpus, found.on_ranks_of(as_on_gpus, two_steps), strict=True):
        for outcomes in zip(*by_rank, strict=True):
            assert worst_error(list(outcomes), expected) < 1e-11, execution


def test_gradients_of_weights_are_put_off() -> None:
    """Under zero-bubble, backward gives them to none of the weights of products; the second part does.

    In the first stage, for whose backward nobody waits, it has one part.
    """
    found = case("gpt")
    graph = of_one_stage(found, (), 2)
    execution = evenly(graph, 2, "zero-bubble")

    def body() -> tuple[set[str], set[str]]:
        parallel = found.lower(graph, execution)
        pipeline, runner = entry_of(parallel).pipeline, entry_of(parallel).runner
        assert pipeline is not None
        early, late = set[str](), set[str]()

        def seen(names: set[str]) -> None:
            names.update(name for name, one in runner.held.items() if one.inside.grad is not None)

        first, second = pipeline.backward, pipeline.weights
        pipeline.backward = lambda item, scale: (first(item, scale), seen(early) if item.microbatch == 0 else None)  # pyright: ignore[reportAttributeAccessIssue]
        pipeline.weights = lambda item: (second(item), seen(late) if item.microbatch == 0 else None)  # pyright: ignore[reportAttributeAccessIssue]
        parallel.forward_backward(**found.batch)
        return early, late

    for stage, (early, late) in enumerate(run_ranks(body, 2, 60)):
        products = {name for name in late if any(part in name for part in ("qkv.", "proj.", "up.", "down."))}
        assert len(products) == 8
        assert early & products == (set() if stage else products)
        assert any("ln_attn" in name for name in early)


class Late(nn.Module):
    """Blocks of which some are frozen from the first one on, and the last one reads the batch too."""

    def __init__(self, num_frozen: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.blocks[:num_frozen].requires_grad_(False)
        self.late = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = block(h)
        return (h * self.late[0](x)).square().mean()


@pytest.mark.parametrize(
    ("num_frozen", "split", "in_two"),
    [
        (0, (4, 3), [False, True]), (0, (3, 1, 3), [False, True, True]),
        (3, (4, 3), [False, False]), (2, (3, 1, 3), [False, False, True]), (1, (4, 3), [False, True]),
    ],
)  # fmt: skip
def test_ranks_have_backward_in_two_parts_where_it_is_priced_so(
    num_frozen: int, split: tuple[int, ...], in_two: list[bool]
) -> None:
    """Where another stage waits for gradients. Of the operators in these, those that give gradients to activations."""
    torch.manual_seed(0)
    found = Case(Late(num_frozen).double(), {"x": torch.randn(4, 8, dtype=torch.float64)})
    graph = of_one_stage(found, (), 2)
    execution = Execution.of(num_stages=len(split), schedule="zero-bubble", split=split)
    stages = [stage.pieces[0] for stage in program(graph, Cluster.local(len(split)), execution).stages]
    outsides = [find_outside(stage, execution, graph) for stage in cut(graph, execution).graphs]
    assert [bool(stage.weights.tasks) for stage in stages] == [outside.in_two for outside in outsides] == in_two
    for priced, outside in zip(stages, outsides, strict=True):
        names = {task.name.removesuffix(" weights") for task in priced.weights.tasks}
        assert names == outside.apart
    assert worst_error(in_stages(found, [(graph, execution)])[0], in_one_process(found)) < 1e-11


def test_dry_runs_of_stages_are_as_predicted() -> None:
    """What a stage sends is what the next one receives, and what was predicted; so is the peak of memory."""
    found = case("gpt")
    cells: list[tuple[int, ScheduleName, int]] = [(2, "interleaved", 2), (2, "zero-bubble", 1)]
    for stages, schedule, chunks in cells:
        cluster = Cluster.local(2 * stages)
        graph = of_one_stage(found, ("tensor",), 4)
        execution = evenly(graph, stages, schedule, chunks)
        graph = pieced(graph, execution) if schedule in SENT_IN_PIECES else graph
        prediction = predict(graph, cluster, execution)
        plan = Plan(graph, cluster, "GPT", "", prediction, (), SearchReport(0.0, 1, 0.0, 1 << 60), execution)
        sent, received = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for stage in range(stages):
            report = DryRunReport(plan, dry_run(graph, 2 * stage, execution))
            assert not [f for f in report.findings if not f.startswith("memory in all")], (schedule, stage)
            for message, times in report.run.messages.items():
                both = {"send": sent, "receive": received}.get(message.collective, Counter[tuple[str, int]]())
                both[message.axis, message.num_bytes] += times
        assert sent
        assert sent == received
