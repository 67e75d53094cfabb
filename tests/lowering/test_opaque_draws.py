"""Operators that are in no row and draw from the generator: alike in every microbatch, and when made again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.lowering.runs import Case, assert_same_step, parallel_step, serial_step


class Noisy(nn.Module):
    """A block with noise on its activations, and no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) * torch.rand(8, 8, dtype=x.dtype)))


class Net(nn.Module):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Noisy(), Noisy()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.pow(2).mean()


@pytest.mark.parametrize("mesh", [Mesh.of(x=2), Mesh.of(mb=2, x=2)], ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_noise_is_that_of_the_single_process(mesh: Mesh, recompute: str) -> None:
    torch.manual_seed(0)
    case = Case(Net().double(), {"x": torch.randn(8, 8).double()})
    planner = Planner(Cluster.local(2), certified_choices())
    graph = planner.solve(case.captured.graph, mesh, ("data",), "test").graph
    expected, execution = serial_step(case), Execution(recompute=recompute)  # pyright: ignore[reportArgumentType]
    for step in case.on_ranks(graph, lambda parallel: parallel_step(parallel, case.batch), execution):
        assert_same_step(step, expected, 1e-11)
