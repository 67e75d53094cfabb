"""What a new operator takes: a row and a handler in the public tables. Every part of the product knows it then."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.cost.predict import predict
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.aten import HANDLERS
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Node
from shardwright.pcg.interpret import denote, run_devices, run_serial
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS, Row
from shardwright.pcg.text import parse_graph, print_graph
from shardwright.search.check import check_plan
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.substitutions.terms import parse_term
from shardwright.verifier.choices import Certified
from tests.lowering.runs import Case
from tests.search.graphs import cluster

ROW = Row(
    "hypot",
    "..., ... -> ...",
    np.hypot,
    "torch.hypot({0}, {1})",
    commutative=True,
    rounds=True,
    saves=(0, 1, "result"),
    flops_per_element=4,
)


def handler(b: GraphBuilder, x: str, y: str) -> str:
    return b.op("hypot", x, y)


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.across, self.along, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.hypot(self.across(x), self.along(x))).square().sum()


BATCH = {"x": torch.linspace(-1, 1, 32).reshape(4, 8)}


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setitem(ROWS, ROW.name, ROW)
    monkeypatch.setitem(HANDLERS, ROW.name, handler)
    torch.manual_seed(0)
    return Case(Lengths(), BATCH)


def planned(case: Case) -> tuple[Plan, Node]:
    """A plan that splits the operator along its features, and the operator in it."""
    plan = Planner(cluster(2), Certified()).plan(case.captured.graph, mesh=Mesh.of(x=2), roles=("tensor",))
    return plan, next(plan.graph.leaves(ROW.name))


def test_without_its_row_it_is_opaque() -> None:
    assert [n.attr("target") for n in capture(Lengths(), BATCH).graph.leaves("opaque")] == ["aten.hypot.default"]


def test_it_is_imported_typed_printed_and_a_term_of_rules(case: Case) -> None:
    graph = case.captured.graph
    (node,) = graph.leaves(ROW.name)
    assert graph.types[node.name].grad
    assert parse_graph(print_graph(graph)) == graph
    assert str(parse_term("hypot(x, y)")) == "hypot(x, y)"


def test_its_splits_are_proven_planned_and_priced(case: Case) -> None:
    plan, node = planned(case)
    assert Certified().of(case.captured.graph, next(case.captured.graph.leaves(ROW.name))) == {"R", "C", "_0", "_1"}
    assert node.split == ("_1",)
    check_plan(plan, case.captured.graph, Certified())
    assert predict(plan.graph, plan.cluster).step_s == plan.prediction.step_s


def test_every_device_computes_its_part(case: Case) -> None:
    plan, node = planned(case)
    tensors = {**dict(case.model.named_parameters()), **BATCH}
    leaves = {n.name: tensors[str(n.attr("target"))].detach().numpy() for n in plan.graph.nodes if n.is_leaf}
    held, graph = run_devices(plan.graph, leaves)[node.name], plan.graph
    np.testing.assert_allclose(denote(held, graph.types[node.name], graph.mesh), run_serial(graph, leaves)[node.name])


def test_its_program_trains_on_ranks(case: Case) -> None:
    plan, _ = planned(case)
    ((loss, gradient),) = run_ranks(lambda: step(case.model), 1, 30)
    for source, *found in case.on_ranks(plan.graph, lambda parallel: (parallel.source, *step(parallel))):
        assert "torch.hypot(" in source
        assert found == pytest.approx([loss, gradient], rel=1e-5)


def step(model: nn.Module) -> tuple[float, float]:
    """The loss of one step, and the norm of one gradient."""
    loss = model.forward_backward(**BATCH) if isinstance(model, ParallelModule) else model(**BATCH)
    if not isinstance(model, ParallelModule):
        loss.backward()
    gradient = model.get_parameter("across.weight").grad
    assert gradient is not None
    return loss.item(), (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).norm().item()
