"""Rings that roles ask for: attention that cannot be in one is named, with what to do, and never gathered instead."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.plans import CERTIFIED, fast_links
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.ring import Ring
from shardwright.search.exact.building import ProblemBuilder
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.search.tree.reshaped import reshaped
from tests.each import each

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril())


def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


class Attending(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.embedding = attend, nn.Embedding(9, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).unflatten(2, (2, 4)).transpose(1, 2)
        return self.attend(x, x, x).sum()


def serial(attend: Attend, length: int) -> Graph:
    return capture(Attending(attend), {"ids": torch.zeros(1, length, dtype=torch.int64)}).graph


def planned(attend: Attend, length: int, **axes: int) -> Plan:
    mesh = Mesh.of(**axes)
    planner = Planner(fast_links(mesh.num_devices), CERTIFIED)
    return planner.plan(serial(attend, length), mesh=mesh, roles=("ring",) * len(mesh), compared=False, microbatches=1)


def test_attention_with_a_mask_is_in_a_ring() -> None:
    assert {node.split for node in planned(fused, 8, cp=4).graph.leaves("sdpa")} == {("q@k",)}


def test_an_axis_of_one_device_asks_for_no_ring() -> None:
    assert planned(written_out, 7, cp=1).graph.mesh.num_devices == 1


@each(
    "attend, length, axes, message",
    [
        (dropping, 8, {"cp": 2}, "drops probabilities, so it is no single operator; train without this dropout, or"),
        (written_out, 8, {"cp": 2}, "is written out as products and a softmax; call F.scaled_dot_product_attention"),
        (fused, 10, {"cp": 4}, "has a sequence of 10, which cp=4 does not divide; pad batches to a length that it div"),
        (fused, 8, {"a": 2, "b": 2}, "role 'ring' of axes a and b: keys travel around one ring; give the role to one"),
    ],
)
def test_other_attention_is_named_with_the_remedy(
    attend: Attend, length: int, axes: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        planned(attend, length, **axes)


@each(
    "attend, length, message",
    [
        (fused, 10, "has a sequence of 10, which cp=4 does not divide; pad batches to a length that it divides"),
        (dropping, 12, "drops probabilities, so it is no single operator; train without this dropout, or"),
        (fused, 12, ""),
    ],
)
def test_other_shapes_of_batch_are_in_a_ring_or_named_as_the_first(attend: Attend, length: int, message: str) -> None:
    first, graph = planned(fused, 8, cp=4), serial(attend, length)
    if message:
        with pytest.raises(PlanError, match=re.escape(message)):
            reshaped(first, graph, CERTIFIED, {})
        return
    plan = reshaped(first, graph, CERTIFIED, {})
    assert {node.split for node in plan.graph.leaves("sdpa")} == {("q@k",)}


def unlike(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention under a window, and twice without one, by masks of equal types."""
    places = torch.arange(q.shape[-2])
    masks = [places > places[:, None] - 9, places > places[:, None] - 3, places > places[:, None] - 9]
    for mask in masks:
        v = F.scaled_dot_product_attention(q, k, v, mask & (places <= places[:, None]))
    return v


def test_rings_under_unlike_masks_have_prices_of_their_own() -> None:
    """A window of 3 of 16 positions on 4 devices reaches one device before; one of 9, two."""
    plan = planned(unlike, 16, cp=4)
    steps = Steps(plan.graph, plan.cluster, plan.execution)
    costs = [steps.operator(node).cost for node in plan.graph.leaves("sdpa")]
    assert [len(cost.ways.listed) for cost in costs] == [2, 1, 2]
    assert costs[0].forward_s == costs[2].forward_s > costs[1].forward_s
    graph = serial(unlike, 16)
    problem = ProblemBuilder(plan.cluster, plan.mesh, CERTIFIED).build(graph)
    priced = [problem.domains[node.name] for node in graph.leaves("sdpa")]
    wide, near, again = (domain.time_s[domain.splits.index((Ring("q", "k"),))] for domain in priced)
    assert wide == again > near
