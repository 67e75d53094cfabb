"""Rewritten plans on real ranks: leaves of several results, and a mesh that wins by a rewrite."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.plans import CERTIFIED, fast_links
from examples.zoo import GPT
from shardwright.cost.clusters.cluster import Cluster, Level
from shardwright.pcg.mesh import Mesh
from shardwright.search.check import check_plan
from shardwright.search.plan import Plan
from shardwright.search.request.restrict import DATA, TENSOR
from shardwright.search.request.spaces import Space
from shardwright.search.tree.planner import Planner
from tests.lowering.runs import Case, assert_trains_as_serial

RULES = CERTIFIED.by_name()


def steps(plan: Plan) -> list[str]:
    return [step for rewrite in plan.report.rewrites for step, _ in rewrite.steps]


def gpt(num_layers: int) -> tuple[Case, Cluster]:
    """One with many words, on two ranks with slow links: what its logits and their gradients send decides."""
    torch.manual_seed(0)
    ids, targets = torch.randint(2048, (2, 8, 16))
    model = GPT(vocab=2048, max_seq=16, hidden=32, num_heads=4, num_layers=num_layers).double()
    links = (Level("rank", 2, 1e6, 0.0),)
    cluster = Cluster("slow links", fast_links(2).device, links, "gloo", "made up")
    return Case(model, {"ids": ids, "targets": targets}), cluster


class Branches(nn.Module):
    """Two ways from the batch to the loss, each with a norm whose running statistics are results of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.norms[0](self.left(x)), self.norms[1](self.right(x).tanh())
        return (left.relu() * right).square().sum()


def test_a_leaf_of_several_results_trains_as_the_model_does() -> None:
    torch.manual_seed(0)
    case = Case(Branches().double(), {"x": torch.randn(8, 6, dtype=torch.float64)})
    graph = case.captured.graph
    plan = Planner(fast_links(2), CERTIFIED, rules=RULES).plan(graph, "branches", mesh=Mesh.of(x=2))
    assert set(steps(plan)) == {"scale_of_scaled"}
    assert max(len(rewrite.end.split()) for rewrite in plan.report.rewrites) > 2
    check_plan(Plan.from_json(plan.to_json()), graph, CERTIFIED, RULES)
    assert_trains_as_serial(case, plan.graph, 1e-10)


def test_a_mesh_wins_by_what_rewrites_gain_on_it() -> None:
    """Where logits stay sharded by the vocabulary up to the loss, tensor parallelism sends less than gradients are."""
    case, cluster = gpt(1)
    graph = case.captured.graph
    spaces = [Space("data", Mesh.of(dp=2), (DATA,)), Space("tensor", Mesh.of(tp=2), (TENSOR,))]
    without, plan = (
        Planner(cluster, CERTIFIED, rules=rules).plan(graph, "gpt", spaces=spaces, compared=False)
        for rules in ({}, RULES)
    )
    assert (without.mesh, plan.mesh) == (Mesh.of(dp=2), Mesh.of(tp=2))
    assert plan.prediction.step_s < 0.8 * without.prediction.step_s
    assert "cross_entropy_in_parts" in steps(plan)
    check_plan(Plan.from_json(plan.to_json()), graph, CERTIFIED, RULES)
    assert_trains_as_serial(case, plan.graph, 1e-9)


def test_blocks_and_what_follows_them_are_rewritten_together() -> None:
    """Of a folded model, what follows a run reads its last block."""
    case, cluster = gpt(5)
    graph = case.captured.graph
    spaces = [Space("tensor", Mesh.of(tp=2), (TENSOR,))]
    plan = Planner(cluster, CERTIFIED, rules=RULES).plan(graph, "gpt", spaces=spaces, compared=False)
    assert {"unfuse_three_affine", "cross_entropy_in_parts"} <= set(steps(plan))
    assert not any(rewrite.start == rewrite.end for rewrite in plan.report.rewrites)
    check_plan(Plan.from_json(plan.to_json()), graph, CERTIFIED, RULES)


class Masked(nn.Module):
    """Blocks that read a mask which is made of the batch before them, by operators that nothing else is among."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = (1 - keep[:, None, :]) * -1e4
        for layer in self.layers:
            x = x + ((layer(x) @ x.transpose(-1, -2)) + mask).softmax(-1) @ x
        return x.square().sum()


def test_a_part_that_gives_nothing_with_a_gradient_is_no_leaf() -> None:
    torch.manual_seed(0)
    case = Case(Masked(), {"x": torch.randn(4, 8, 16), "keep": (torch.rand(4, 8) < 0.9).float()})
    plan = Planner(fast_links(2), CERTIFIED, rules=RULES).plan(case.captured.graph, "masked")
    check_plan(plan, case.captured.graph, CERTIFIED, RULES)
