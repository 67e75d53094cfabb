"""Steps of several microbatches, and lifetimes of gathered parameters: what one process does, as the list says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.zoo import GPT
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.local import default_cluster
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import BatchError, DistributedError, PlanError, ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.time import check_time
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.each import some
from tests.lowering.runs import (
    SEED,
    Case,
    Step,
    assert_same_step,
    doubled,
    entry_of,
    outcome,
    parallel_step,
    peak_on_rank,
    serial_step,
    whole,
)
from tests.lowering.test_actions import Events, Spy, lowered, num_bytes, pooled, priced


def planned(found: Case, roles: tuple[str, ...], zero: Zero = "zero-1", many: int = 1) -> Graph:
    """The plan on two ranks along each axis, with one lifetime of all parameters that are gathered."""
    sizes = dict.fromkeys("xyz"[: len(roles)], 2)
    planner = Planner(Cluster.local(2 ** len(roles)), certified_choices())
    graph = planner.solve(found.captured.graph, Mesh.of(mb=many, **sizes), roles, "test").graph
    return with_lifetimes(graph, {leaf.name: zero for leaf in graph.leaves("parameter")})


def case(name: str) -> Case:
    found = doubled(name)
    batch = {key: tensor.clone() for key, tensor in found.batch.items()}
    if "labels" in batch:  # targets that count lie unevenly in the microbatches
        batch["labels"][:3] = -100
        batch["labels"][5, 2:] = -100
    return Case(found.model, batch, found.captured)


Run = Callable[[ParallelModule], Tensor]
"""A step that leaves gradients; its loss."""


def steps_of(parallel: ParallelModule, run: Run, many: int) -> tuple[Step, list[Tensor]]:
    """The first step's outcome, and all parameters after so many steps."""
    optimizer = torch.optim.AdamW(list(parallel.parameters()), lr=1e-2, fused=True)
    found = outcome(parallel, run(parallel))
    found.gradients = {name: None if g is None else g.clone() for name, g in found.gradients.items()}
    for _ in range(many - 1):
        optimizer.step()
        optimizer.zero_grad()
        run(parallel)
    optimizer.step()
    return found, [whole(p.detach()) for p in parallel.parameters()]


def serial_steps(found: Case, many: int) -> list[Tensor]:
    model = copy.deepcopy(found.model)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=1e-2, fused=True)
    for _ in range(many):
        torch.manual_seed(SEED)
        result = model(**found.batch)
        (result["loss"] if not isinstance(result, Tensor) else result).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def plainly(batch: dict[str, Tensor]) -> Run:
    def run(parallel: ParallelModule) -> Tensor:
        torch.manual_seed(SEED)
        return parallel.forward_backward(**batch)

    return run


def by_loss(batch: dict[str, Tensor]) -> Run:
    """A step by way of the loss, scaled by a half and by two."""

    def run(parallel: ParallelModule) -> Tensor:
        torch.manual_seed(SEED)
        loss = parallel(**batch)
        (0.5 * loss).backward()
        for p in parallel.parameters():
            if p.grad is not None:
                p.grad.mul_(2)
        return loss

    return run


PLANS: list[tuple[tuple[str, ...], Zero, int]] = [
    (("data",), "zero-1", 2), (("data",), "zero-1", 4), (("tensor",), "zero-3", 4), (("tensor",), "zero-1", 2),
    (("zero",), "zero-2", 1), (("zero",), "kept", 1),
    *((("zero",), zero, 2 + n % 2 * 2) for n, zero in enumerate(ZEROS)),
]  # fmt: skip


@pytest.mark.parametrize("name", some(["gpt", "llama"], 1))
def test_steps_are_those_of_one_process(name: str) -> None:
    """Dropout on; a loss over targets that count, unevenly in the microbatches; three steps of AdamW.

    Llama computes its loss in float32, whatever the model is in.
    """
    found, tolerance = case(name), 1e-10 if name == "gpt" else 1e-6
    plans = [planned(found, *plan) for plan in PLANS if name == "gpt" or (plan[0] == ("zero",) and plan[2] > 1)]

    def body() -> list[tuple[Step, list[Tensor]]]:
        runs = [plainly(found.batch), by_loss(found.batch)]
        return [steps_of(found.lower(graph), runs[n % 2], 3) for n, graph in enumerate(plans)]

    expected, parameters = serial_step(found), serial_steps(found, 3)
    for steps in run_ranks(body, 2, 120):
        for step, after in steps:
            assert_same_step(step, expected, tolerance)
            for own, other in zip(after, parameters, strict=True):
                assert float((own - other).abs().max()) < 100 * tolerance * float(other.abs().max() + 1)


def test_sharded_along_one_axis_and_copied_along_the_other() -> None:
    """Hybrid sharding; and weights that lie in slices along both axes."""
    found = case("gpt")
    plans = [planned(found, ("data", "zero"), zero, 2) for zero in ZEROS]
    plans += [planned(found, ("zero", "tensor"), "zero-3", 2), planned(found, ("zero", "zero"), "zero-2", 2)]

    def body() -> list[Step]:
        return [parallel_step(found.lower(graph), found.batch) for graph in plans]

    expected = serial_step(found)
    for steps in run_ranks(body, 4, 120):
        for step in steps:
            assert_same_step(step, expected, 1e-10)


@pytest.mark.slow
def test_ranks_do_what_the_list_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two steps, with the gathered memory of the list."""
    found = case("gpt")
    plans = [planned(found, ("zero",), zero, many) for zero in ZEROS for many in (1, 2, 4)]
    leaves = [leaf.name for leaf in plans[0].leaves("parameter")]
    by_block: dict[str, Zero] = {"blocks_0": "zero-1", "blocks_1": "zero-3"}
    mixed: dict[str, Zero] = {leaf: by_block.get(leaf[:8], "zero-2") for leaf in leaves}
    plans += [with_lifetimes(planned(found, ("zero",), many=many), mixed) for many in (1, 4)]

    def body() -> list[tuple[list[Events], float]]:
        seen = list[tuple[list[Events], float]]()
        for graph in plans:
            parallel = found.lower(graph)
            steps = Spy(parallel, DEFAULT, monkeypatch).steps(parallel, found.batch)
            monkeypatch.undo()
            seen.append((steps, sum(map(num_bytes, chain(*entry_of(parallel).runner.blocks.pool.free.values())))))
        return seen

    for graph in plans:
        assert priced(graph) == lowered(graph)
    expected = [([lowered(graph)] * 2, pooled(graph, DEFAULT)) for graph in plans]
    for number, found_ in enumerate(zip(*run_ranks(body, 2, 120), expected, strict=True)):
        assert found_[0] == found_[1] == found_[2], plans[number].mesh


def test_a_rank_may_pass_its_part_of_all_microbatches() -> None:
    torch.manual_seed(0)
    found = Case(Regression().double(), {"x": torch.randn(16, 8).double(), "y": torch.randn(16, 8).double()})
    graph = planned(found, ("data",), many=4)

    def body(parallel: ParallelModule) -> Step:
        assert parallel.input_layouts == {"x": (R, S(0, 4)), "y": (R, S(0, 4))}
        rank = torch.distributed.get_rank()
        own = {key: value.view(4, 2, 2, 8)[:, rank].reshape(8, 8) for key, value in found.batch.items()}
        with pytest.raises(BatchError, match=r"this rank's shard \[8, 8\] \(mb: R, x: S\(0,4\)\)"):
            parallel.forward_backward(**{key: value[:4] for key, value in own.items()})
        return parallel_step(parallel, own)

    for step in found.on_ranks(graph, body):
        assert_same_step(step, serial_step(found), 1e-12)


class Regression(nn.Module):
    """With a frozen layer in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


class Losses(nn.Module):
    """Unevenly many targets that count; class weights; a penalty on weights, and on one of the terms' own scale.

    The first term of all, within the sum of the others, is the same for every microbatch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(8, 8), nn.Linear(8, 6), nn.Parameter(torch.ones(()))
        self.register_buffer("weight", torch.linspace(0.5, 2, 6))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y, weight = self.last(self.first(x).tanh()), self.get_buffer("weight")
        hot = F.one_hot(target.clamp(min=0), 6).to(x.dtype)
        loss = x.new_ones(()) + F.cross_entropy(y, target, weight=weight) + 0.1 * y.logsumexp(1).square().mean()
        loss = loss + 0.1 * F.cross_entropy(-y, target, weight=weight, label_smoothing=0.1, reduction="sum")
        loss = loss + F.binary_cross_entropy_with_logits(y, hot, weight=weight, pos_weight=2 * weight)
        return loss - 1e-2 * self.scale + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())


def test_losses_with_weights_and_penalties() -> None:
    """A term that is the same for all microbatches counts once, whatever is sliced or gathered."""
    torch.manual_seed(0)
    target = torch.randint(6, (8,))
    target[:3] = -100
    found = Case(Losses().double(), {"x": torch.randn(8, 8).double(), "target": target})
    plans = [planned(found, ("data",), many=4), planned(found, ("free",), many=2), planned(found, ("tensor",), many=2)]
    plans += [planned(found, ("zero",), zero, 2) for zero in ZEROS]
    zero = plans[-1]
    penalised = {n.inputs[0] for n in zero.nodes if n.op == "pow" and zero.types[n.name].layouts[1] != R}
    assert {"first_weight", "last_bias"} <= penalised  # where the slices lie: nothing is gathered for a penalty

    def body() -> list[Step]:
        return [parallel_step(found.lower(graph), found.batch) for graph in plans]

    for steps in run_ranks(body, 2, 60):
        for step in steps:
            assert_same_step(step, serial_step(found), 1e-11)


def failing_once(run: Callable[..., Any]) -> Callable[..., Any]:
    calls = list[int]()

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no")
        return run(*args)

    return failing


def test_frozen_parameters_and_steps_that_fail() -> None:
    """A step that fails in its second microbatch leaves no gradients; nothing is kept of one without gradients."""
    torch.manual_seed(0)
    found = Case(Regression().double(), {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 8).double()})
    plans = [planned(found, ("zero",), zero, 2) for zero in ZEROS] + [planned(found, ("data",), many=4)]
    expected = serial_step(found)

    def body() -> list[Step]:
        steps = list[Step]()
        for graph in plans:
            parallel = found.lower(graph)
            entry_of(parallel).runner.run = failing_once(entry_of(parallel).runner.run)
            with pytest.raises(ValueError, match="no"):
                parallel.forward_backward(**found.batch)
            assert all(p.grad is None for p in parallel.parameters())
            with torch.no_grad():
                torch.testing.assert_close(parallel(**found.batch), expected.loss, rtol=1e-12, atol=0)
            steps.append(parallel_step(parallel, found.batch))
        return steps

    for steps in run_ranks(body, 2, 60):
        for step in steps:
            assert_same_step(step, expected, 1e-12)


def test_gradients_of_a_loss_are_handed_over_once() -> None:
    torch.manual_seed(0)
    found = Case(Regression(), {"x": torch.randn(8, 8), "y": torch.randn(8, 8)})

    def body(parallel: ParallelModule) -> None:
        loss = parallel(**found.batch)
        assert all(p.grad is None for p in parallel.parameters())
        other = parallel(**found.batch)
        (loss + other).backward()
        first = [whole(p.grad).clone() for p in parallel.parameters() if p.grad is not None]
        with pytest.raises(ShardwrightError, match="handed over already"):
            loss.backward()
        parallel.zero_grad()
        parallel.forward_backward(**found.batch)
        parallel.forward_backward(**found.batch)
        second = [whole(p.grad) for p in parallel.parameters() if p.grad is not None]
        torch.testing.assert_close(first, second)

    found.on_ranks(planned(found, ("data",), many=2), body)
    found.on_ranks(planned(found, ("zero",), many=2), body)


def test_a_program_shows_its_loop() -> None:
    torch.manual_seed(0)
    found = Case(Regression(), {"x": torch.randn(8, 8), "y": torch.randn(8, 8)})
    sources = found.on_ranks(planned(found, ("data",), many=2), lambda parallel: parallel.source)
    assert "for mb.rank, batch in enumerate(microbatches):\n        summand = forward(batch)" in sources[0]


def test_what_no_microbatch_cuts_is_refused() -> None:
    torch.manual_seed(0)
    found = Case(Regression(), {"x": torch.randn(8, 8), "y": torch.randn(8, 8)})
    graph = found.graph(Mesh.of(mb=2, x=2), {})
    with pytest.raises(PlanError, match=r"2 microbatches .* all compute the same"):
        check_time(graph)
    with pytest.raises(DistributedError, match="all compute the same"):
        found.on_ranks(graph, lambda parallel: None)


def test_memory_is_as_predicted() -> None:
    """With microbatches, for the longest and the shortest lifetime, within a tenth; `make sweep` has every way."""
    torch.manual_seed(0)
    ids = torch.randint(64, (2, 8, 64))
    found = Case(GPT(64, 64, 64, 4, 3), {"ids": ids[0], "targets": ids[1]})
    plans = [planned(found, ("zero",), zero, 4) for zero in ("zero-1", "zero-3")]

    measured = run_ranks(lambda: [peak_on_rank(found, graph) for graph in plans], 2, 120)[0]
    steps = [simulate(program(graph, default_cluster(2))) for graph in plans]
    assert measured == pytest.approx([step.fullest.memory.total_bytes for step in steps], rel=0.1)
