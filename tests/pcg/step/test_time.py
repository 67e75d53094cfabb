"""What can be run one microbatch after the other, and what keeps a model from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import C, P, R, S
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.moves import fused_moves
from shardwright.pcg.step.additive import find_additive
from shardwright.pcg.step.time import check_time
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.each import each


class Net(nn.Module):
    """A product, and what is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)


class MeanOfSquares(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.product(x).pow(2).mean()


class TwoMeans(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y.pow(2).mean() + 0.1 * (y - 1).abs().mean()


class OfEach(Net):
    """Of each example what its own index names, joined with what is empty."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        chosen = y[torch.arange(8), x.argmax(-1)]
        return (torch.cat([y.sin(), y[:, 8:]], 1).sum(1) * chosen).mean()


class Empty(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return (y + y[:, 8:].sum()).pow(2).mean()


class BatchNorm(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.product(x)).pow(2).mean()


class ProductOfMeans(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return (y.mean(0) * y.pow(2).mean(0)).sum()


class Exponential(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.product(x).pow(2).mean().exp()


class WithoutRow(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.polygamma(1, self.product(x).abs() + 1).mean()


class OfNoExample(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.product.weight.pow(2).sum() + 0 * x.sum()


class Counting(Net):
    """Its loss is a mean, and buffers change with sums over the batch."""

    load: Tensor
    last: Tensor
    tokens: Tensor
    num: Tensor
    table: Tensor

    def __init__(self, count: Callable[[Counting, Tensor], None]) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("load", torch.zeros(8))
        self.register_buffer("last", torch.zeros(8))
        self.register_buffer("tokens", torch.zeros(8, dtype=torch.int64))
        self.register_buffer("num", torch.tensor(0))
        self.register_buffer("table", torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        self.count(self, y.detach())
        return y.pow(2).mean()


def one_hot(net: Counting, y: Tensor) -> None:
    net.tokens += functional.one_hot(y.argmax(-1), 8).sum(0)
    net.num.add_(y.shape[0])


def histogram(net: Counting, y: Tensor) -> None:
    net.load.add_(torch.histc(y.argmax(-1).float(), bins=8, min=0, max=7), alpha=0.5)


def shared(net: Counting, y: Tensor) -> None:
    tokens = (y > 0).sum(0)
    net.tokens, net.load, net.num = net.tokens + tokens, tokens + net.load, net.num - tokens.sum()


def twice(net: Counting, y: Tensor) -> None:
    net.load.copy_((net.load + y.mean(0)).detach() - y.pow(2).sum(0) / y.shape[0])


def average(net: Counting, y: Tensor) -> None:
    net.load = 0.9 * net.load + 0.1 * y.mean(0)


def one_more(net: Counting, y: Tensor) -> None:
    net.load = net.load + y.sum(0) + 1


def row_of_table(net: Counting, y: Tensor) -> None:
    net.table[1] += y.sum(0)


def read_before(net: Counting, y: Tensor) -> None:
    net.table = net.table + net.load
    net.load = net.load + y.sum(0)


def read_after(net: Counting, y: Tensor) -> None:
    net.load = net.load + y.sum(0)
    net.table = net.table + net.load


def left_before(net: Counting, y: Tensor) -> None:
    net.last, net.load = net.load, net.load + y.sum(0)


def left_after(net: Counting, y: Tensor) -> None:
    net.last = net.load = net.load + y.sum(0)


def maximum(net: Counting, y: Tensor) -> None:
    net.load = torch.maximum(net.load, y.sum(0))


def rounded(net: Counting, y: Tensor) -> None:
    net.tokens = net.tokens + y.sum(0).long()


def subtracted(net: Counting, y: Tensor) -> None:
    net.load = y.sum(0) - net.load


def in_microbatches(model: nn.Module, many: int = 4) -> Graph:
    graph = capture(model, {"x": torch.randn(8, 8)}, ()).graph
    return Planner(Cluster.local(2), certified_choices()).solve(
        graph, Mesh.of(mb=many, x=2), ("data",), "test"
    ).graph  # fmt: skip


def test_a_mean_over_the_batch_is_a_sum_over_microbatches() -> None:
    graph = in_microbatches(MeanOfSquares())
    check_time(graph)
    moves = {(n.op, n.inputs[0]) for n in graph.nodes if n.is_parallel and n.attr("axis") == TIME}
    assert {op for op, _ in moves} == {"partition", "replicate", "reduce"}
    layouts = {n.name: graph.types[n.name].layouts[0] for n in graph.nodes}
    assert layouts["x"] == R
    assert {layouts[n.name] for n in graph.nodes if n.op == "linear"} == {S(0)}
    assert {layouts[start] for op, start in moves if op == "reduce"} == {P}
    assert {layouts[n.name] for n in graph.nodes if n.op == "replicate" and n.attr("axis") == TIME} == {C}
    assert all(graph.mesh.names[move.axis] != TIME for _, _, move in fused_moves(graph))


@each("model", [TwoMeans, OfEach])
def test_what_is_of_each_example_is_cut(model: type[Net]) -> None:
    check_time(in_microbatches(model()))


def test_one_microbatch_is_always_possible() -> None:
    check_time(in_microbatches(BatchNorm(), 1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (BatchNorm(), r"\w+ at norm \(test_time.py:\d+\): the batch cannot be cut into 4 microbatches .*statistics"),
        (ProductOfMeans(), r"mul.*: the batch cannot be cut into 4 microbatches exactly here: .*; plan with"),
        (Empty(), r"add.*: the batch cannot be cut .*: nothing certifies that it may be split along the batch; plan"),
        (WithoutRow(), r"opaque.*: the batch cannot be cut .*aten.\S+ has no row in the op table, so that it runs on"),
        (OfNoExample(), r"mesh .*: the 4 microbatches would all compute the same, as nothing of the batch is cut"),
        (Exponential(), r"exp.*: the batch cannot be cut into 4 microbatches .* the loss is not a sum or mean over"),
    ],
)
def test_what_needs_the_whole_batch_is_named(model: nn.Module, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_time(in_microbatches(model))


@each(
    "count, expected",
    [
        (one_hot, {"tokens"}),  # the number of examples is known from the beginning
        (histogram, {"load"}),
        (shared, {"tokens", "load", "num"}),
        (twice, {"load"}),
    ],
)
def test_buffers_add_up_over_microbatches(count: Callable[[Counting, Tensor], None], expected: set[str]) -> None:
    graph = in_microbatches(Counting(count))
    check_time(graph)
    assert find_additive(graph).buffers == expected
    assert not find_additive(in_microbatches(Counting(count), 1)).buffers


@each(
    "count, name",
    [
        (average, "load"),
        (one_more, "load"),
        (row_of_table, "table"),
        (read_before, "load"),
        (read_after, "load"),
        (left_before, "load"),
        (left_after, "(load|last)"),  # both are in the way
        (maximum, "load"),
        (rounded, "tokens"),
        (subtracted, "load"),
    ],
)
def test_buffers_that_need_the_whole_batch_are_named(count: Callable[[Counting, Tensor], None], name: str) -> None:
    told = rf"\w+ at .*test_time.py:\d+\): the batch cannot .* exactly here: the buffer '{name}' reads a sum over"
    with pytest.raises(PlanError, match=told):
        check_time(in_microbatches(Counting(count)))
