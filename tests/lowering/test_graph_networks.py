"""Graph networks in plain torch on two gloo ranks: split along edges, nodes and features, as one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.types import TensorType
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.lowering.parallelize import follow
from tests.lowering.runs import Case, assert_all_train_as_serial

NODES, EDGES, SIZE = 12, 40, 8


class Convolution(nn.Module):
    """GCN: neighbours are added up, each by the degrees at both ends of its edge."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = x.new_zeros(NODES).index_add(0, target, x.new_ones(EDGES)) + 1
        weight = (degree[source] * degree[target]).rsqrt()
        messages = self.linear(x).index_select(0, source) * weight[:, None]
        return x.new_zeros(NODES, SIZE).index_add(0, target, messages)


class Sage(nn.Module):
    """GraphSAGE: the mean of the neighbours, and the largest of each feature of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.most, self.own = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        index, rows = target[:, None].expand(-1, SIZE), x[source]
        mean = torch.zeros_like(x).scatter_reduce(0, index, rows, "mean", include_self=False)
        most = torch.zeros_like(x).scatter_reduce(0, index, rows, "amax", include_self=False)
        return self.mean(mean) + self.most(most) + self.own(x)


class Attention(nn.Module):
    """GAT: a softmax over the edges that end in a node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.score = nn.Linear(SIZE, SIZE), nn.Linear(2 * SIZE, 2)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        h = self.linear(x)
        score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1)))
        index = target[:, None].expand(-1, 2)
        largest = score.new_zeros(NODES, 2).scatter_reduce(0, index, score, "amax", include_self=False)
        share = (score - largest[target].detach()).exp()
        total = score.new_zeros(NODES, 2).scatter_add(0, index, share)
        share = (share / total[target]).repeat_interleave(SIZE // 2, 1)
        return torch.zeros_like(h).scatter_add(0, target[:, None].expand(-1, SIZE), share * h[source])


class Network(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.last = kind(), kind(), nn.Linear(SIZE, 4)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x, edges[0], edges[1]).relu()
        return F.cross_entropy(self.last(self.second(x, edges[0], edges[1])), labels)


def network(kind: type[nn.Module]) -> Case:
    torch.manual_seed(0)
    x, labels = torch.randn(NODES, SIZE, dtype=torch.float64), torch.randint(0, 4, (NODES,))
    edges = torch.randint(0, NODES - 1, (2, EDGES))  # no edge ends in the last node
    return Case(Network(kind).double(), {"x": x, "edges": edges, "labels": labels})


def forced(case: Case, factor: str) -> Graph:
    """What rows go to is split along this factor, wherever it may be."""
    serial, mesh = case.captured.graph, Mesh.of(x=2)
    others = follow(serial, mesh)

    def choose(node: Node, axis: int, operands: list[TensorType]) -> str:
        if node.op.startswith("scatter"):
            signature = serial.signature(node)
            index = signature.index(factor)
            if (
                index is not None
                and signature.factors[index].role != "fixed"
                and signature.factors[index].size % 2 == 0
            ):
                return factor
        return others(node, axis, operands)

    return case.graph(mesh, {}, choose)


def split_by(graph: Graph) -> set[str]:
    return {str(node.split[0]) for node in graph.nodes if node.op.startswith("scatter")}


@pytest.mark.parametrize("kind", [Convolution, Sage, Attention])
def test_edges_nodes_and_features_are_split(kind: type[nn.Module]) -> None:
    case = network(kind)
    assert not list(case.captured.graph.leaves("opaque"))
    graphs = {factor: forced(case, factor) for factor in ("e", "n", "d1")}
    assert all(factor in split_by(graph) for factor, graph in graphs.items())
    plan = Planner(Cluster.local(2), certified_choices()).solve(case.captured.graph, Mesh.of(x=2), ("free",), "test")
    assert_all_train_as_serial(case, {**graphs, "free": plan.graph})
