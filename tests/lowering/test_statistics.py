"""Statistics of each microbatch by itself: what one process does that runs one microbatch after the other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.zoo import ZOO, resnext
from shardwright.api import plan
from shardwright.cli.models import Loaded
from shardwright.cli.numeric import measure
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import capture, find_loss
from shardwright.pcg.checks import FieldError
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.time import check_time, estimated
from shardwright.planning import certified_choices
from shardwright.reports.plan import PlanReport
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from tests.lowering.runs import SEED, Case, Step, assert_same_step, outcome, parallel_step

EVERYWHERE = ("*",)


class Statistics(nn.Module):
    """Batch norm, an unbiased variance over the batch, one over features, a product of means, and their exponential.

    What it counts, all microbatches count together.
    """

    num_positive: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.product, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("num_positive", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.product(x)).tanh()
        self.num_positive += (y > 0).sum(0)
        spread = (0.1 + y.var(0)).sqrt()
        importance = F.softmax(y, -1).mean(0)
        balance = importance.var() / importance.mean().square() + (importance * (y > 0).double().mean(0)).sum()
        return y.pow(2).mean() + 0.1 * F.relu(1 - spread).mean() + 0.01 * balance.exp() + 1.0


class Loads(nn.Module):
    """Buffers that add up, and are read elsewhere: before they are written, after, and the sum itself."""

    load: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)
        self.register_buffer("load", torch.ones(8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x + 0.01 * self.seen).tanh()
        counts = (y > 0).double().sum(0)
        self.seen.add_(0.5 * counts)
        self.load = self.load + counts
        balance = (counts / counts.sum()).square().sum() + (self.load / self.load.sum()).square().sum()
        return y.pow(2).mean() + balance * y.mean()


def in_turn(model: nn.Module, batch: dict[str, Tensor], many: int) -> Step:
    """One process: forward and backward of one microbatch after the other; the loss is the mean of theirs."""
    model, total = copy.deepcopy(model), torch.zeros(())
    torch.manual_seed(SEED)
    for part in zip(*(value.chunk(many) for value in batch.values()), strict=True):
        loss = find_loss(model(**dict(zip(batch, part, strict=True))))
        assert loss is not None
        (loss / many).backward()
        total = total + loss.detach() / many
    return outcome(model, total)


def planned(found: Case, execution: Execution, many: int, roles: Sequence[str]) -> Graph:
    planner = Planner(Cluster.local(2), certified_choices(), per_microbatch=execution.per_microbatch)
    graph = planner.solve(found.captured.graph, Mesh.of(mb=many, x=2), tuple(roles), "test").graph
    check_time(graph, execution)
    return graph


def case(model: nn.Module, batch: dict[str, Tensor], many: int, execution: Execution) -> Case:
    options: dict[str, Any] = {"num_microbatches": many, "per_microbatch": execution.per_microbatch}
    return Case(model, batch, capture(model, batch, **options))


def mixture_of_experts() -> tuple[nn.Module, dict[str, Tensor]]:
    """With a balancing loss; its experts work on each token by itself."""
    model, batch = ZOO["mixtral"]()
    model.config.output_router_logits = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    model.set_experts_implementation("batched_mm")  # pyright: ignore[reportCallIssue]
    return model, batch


def in_double(model: nn.Module, batch: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    return model.double(), {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}


def test_steps_are_those_of_microbatches_in_turn() -> None:
    """Loss, gradients and running statistics. transformers computes losses in float32, whatever the model is in."""
    torch.manual_seed(0)
    execution = Execution(per_microbatch=EVERYWHERE)
    several = ("data",), ("zero",), ("free",)
    cases = [
        (case(*in_double(*resnext(image_size=32, stem=8, width=8)), 2, execution), 2, several[:1], 1e-10),
        (case(Statistics().double(), {"x": torch.randn(16, 8).double()}, 4, execution), 4, several, 1e-10),
        (case(Loads().double(), {"x": torch.randn(16, 8).double()}, 4, execution), 4, several, 1e-10),
        (case(*in_double(*mixture_of_experts()), 2, execution), 2, several[1:2], 1e-6),
    ]
    plans = [(c, planned(c, execution, many, roles)) for c, many, all_roles, _ in cases for roles in all_roles]
    expected = [(in_turn(c.model, c.batch, many), error) for c, many, all_roles, error in cases for _ in all_roles]

    def body() -> list[Step]:
        return [parallel_step(c.lower(graph, execution), c.batch) for c, graph in plans]

    for steps in run_ranks(body, 2, 120):
        for step, (wanted, tolerance) in zip(steps, expected, strict=True):
            assert_same_step(step, wanted, tolerance)


def test_only_the_modules_that_are_named() -> None:
    """Others keep the model from being cut; patterns name modules with all that is inside."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 8)}
    only_norm = Execution(per_microbatch=("nor*",))
    found = case(Statistics(), batch, 2, only_norm)
    with pytest.raises(PlanError, match=r"statistics.*; per_microbatch=True takes the statistics of each"):
        planned(found, only_norm, 2, ("data",))
    alone = case(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Mean()), {"input": batch["x"]}, 2, Execution())
    with pytest.raises(PlanError, match=r"per_microbatch=\['1'\] takes the statistics of each microbatch by itself"):
        planned(alone, Execution(), 2, ("data",))
    inside = Execution(per_microbatch=("1",))
    alone = case(alone.model, alone.batch, 2, inside)
    graph = planned(alone, inside, 2, ("data",))
    assert {node.source.module for node in estimated(graph, inside)} == {"1"}
    assert not estimated(planned(alone, inside, 1, ("data",)), inside)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.pow(2).mean()


def test_a_plan_says_what_is_not_exact(tmp_path: Path) -> None:
    """From the search to the file, its explanation and its check against the model."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Mean()), {"input": torch.randn(16, 8)}
    found = plan(model, Cluster.local(2), kwargs=batch, microbatches=4, per_microbatch="1")
    found.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.execution == found.execution == Execution(per_microbatch=("1",))
    told = str(PlanReport(again))
    assert "not exact" in told
    assert " at 1): the step" in told
    assert "not exact" not in str(PlanReport(plan(model, Cluster.local(2), kwargs=batch)))
    assert measure(again, Loaded(model, (), batch), certified_choices(), 60).loss_error < 1e-5
    with pytest.raises(PlanError, match=r"per_microbatch=True without microbatches=: what a step computes depends"):
        plan(model, Cluster.local(2), kwargs=batch, per_microbatch=True)
    with pytest.raises(PlanError, match=r"per_microbatch='norm' names no module of Sequential; .* such as '0', '1'"):
        plan(model, Cluster.local(2), kwargs=batch, microbatches=2, per_microbatch="norm")
    with pytest.raises(FieldError, match=r"per_microbatch: expected names of modules"):
        Execution(per_microbatch="norm")  # pyright: ignore[reportArgumentType]
