"""Special functions and `logcumsumexp` on two ranks: split along the batch and along features, equal to one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.graph import OPAQUE
from shardwright.pcg.mesh import Mesh
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.lowering.runs import Case, assert_all_train_as_serial


class Special(nn.Module):
    """All of them, each on values where it is smooth."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        positive = nn.functional.softplus(y) + 0.5
        y = torch.lgamma(positive) + torch.digamma(positive) + torch.erfinv(0.9 * y.tanh()) + torch.special.i0e(y)
        return self.down(y).logcumsumexp(1).square().mean()


def test_special_functions_are_split() -> None:
    torch.manual_seed(0)
    one = Case(Special().double(), {"x": torch.randn(8, 8).double()})
    assert not [node for node in one.captured.graph.nodes if node.op == OPAQUE]
    planner = Planner(Cluster.local(2), certified_choices())
    ways = {"data": Mesh.of(x=2), "tensor": Mesh.of(x=2), "zero": Mesh.of(mb=2, x=2)}
    graphs = {role: planner.solve(one.captured.graph, mesh, (role,), "test").graph for role, mesh in ways.items()}
    for role, graph in graphs.items():
        rows = [n for n in graph.nodes if n.op in ("lgamma", "digamma", "erfinv", "i0e")]
        assert all(set(map(str, node.split)) != {"R"} for node in rows), role
    assert_all_train_as_serial(one, graphs)
