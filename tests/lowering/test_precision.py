"""Mixed precision on two ranks: as far from fp64 as `torch.autocast` on one process is, under every kind of plan."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from examples.zoo import ZOO
from shardwright.api import certified_choices
from shardwright.pcg.capture import capture, find_loss
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.planner import Planner
from tests.lowering.runs import Batch, Case, Step, outcome, parallel_step
from tests.search.graphs import cluster

NUM_RANKS = 2
ROLES = ("data", "zero", "tensor", "free")


class Pictures(nn.Module):
    """Convolutions, batch normalization and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.norms[0](self.first(x)).relu()
        x = (x + self.norms[1](self.second(x))).relu().mean((2, 3))
        return nn.functional.cross_entropy(self.head(x), labels)


def example(name: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(1)
    if name == "pictures":
        return Pictures(), {"x": torch.randn(8, 4, 8, 8), "labels": torch.randint(0, 10, (8,))}
    model, batch = ZOO[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, batch


@cache
def case(name: str) -> Case:
    model, batch = example(name)
    return Case(model, batch, capture(model, batch, precision="amp_bf16"))


@cache
def solved(name: str, role: str) -> Graph:
    planner = Planner(cluster(NUM_RANKS), certified_choices())
    return planner.solve(case(name).captured.graph, Mesh(("x",), (NUM_RANKS,)), (role,), role).graph


def alone(name: str, *, exact: bool) -> Step:
    """The single process in fp64, or under autocast."""
    model, batch = copy.deepcopy(case(name).model), case(name).batch
    if exact:
        model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
        loss = find_loss(model(**batch))
    assert loss is not None
    loss.backward()
    return outcome(model, loss)


def error(step: Step, exact: Step) -> tuple[float, float]:
    """Of the loss, relative; and of all gradients as one vector, relative to its length."""
    pairs = [(step.gradients[name], g) for name, g in exact.gradients.items() if g is not None]
    off = sum(float(((0 if mine is None else mine.double()) - g).square().sum()) for mine, g in pairs)
    size = sum(float(g.square().sum()) for _, g in pairs)
    return abs(float(step.loss) / float(exact.loss) - 1), (off / size) ** 0.5


@pytest.mark.parametrize("name", ["gpt", "llama", "pictures"])
def test_rounds_no_more_than_autocast_does(name: str) -> None:
    exact = alone(name, exact=True)
    loss, gradients = error(alone(name, exact=False), exact)
    for role in ROLES:
        for step in case(name).on_ranks(solved(name, role), lambda p: parallel_step(p, case(name).batch)):
            found = error(step, exact)
            print(name, role, found, (loss, gradients))
            assert found[0] <= max(2 * loss, 2**-9), role
            assert found[1] <= 2 * gradients, role
            assert {g.dtype for g in step.gradients.values() if g is not None} == {torch.float32}
