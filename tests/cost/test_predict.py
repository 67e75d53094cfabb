"""What operators cost and keep, from parallel graphs written by hand; what is paid for in all against the timeline."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from bench.accuracy import prepare
from bench.plans import CERTIFIED
from shardwright.cost.clusters.local import default_cluster
from shardwright.cost.predict import collective_bytes, node_costs, predict
from shardwright.cost.prediction import Prediction
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.text import parse_graph
from shardwright.search.request.restrict import DATA, TENSOR, ZERO
from shardwright.search.tree.planner import Planner
from tests.cost.programs import planned
from tests.models import WHOLE_GRIDS, zoo
from tests.search.graphs import cluster, every_choice


def test_reshaping_what_was_transposed_copies_wherever_it_was_in_between() -> None:
    graph = parse_graph("""
    mesh [x=2]
    %w = parameter() {dtype='float32', grad=True, layouts=('S(0)',), shape=(8, 4, 6), target='w'}
    %t = permute(%w) split(x=d0) {dims=(1, 0, 2)}
    %m = combine(%t) {axis='x'}
    %r = reshape(%m) split(x=R) {shape=(32, 6)}
    %s = sum(%r) split(x=R) {dims=(0, 1), keepdim=False}
    outputs loss=%s
    """).validate()
    device = cluster(2).device
    copied_s = 2 * 8 * 4 * 6 * 4 / device.memory_bytes_per_s + device.op_overhead_s  # its gradient is a view
    assert node_costs(Steps(graph, cluster(2), DEFAULT))["r"].compute_s == pytest.approx(
        copied_s + device.op_overhead_s
    )


def with_opaque() -> Graph:
    b = GraphBuilder()
    x, w = b.leaf("x", "input", (8, 4), "float32", "x"), b.leaf("w", "parameter", (4, 4), "float32", "w", grad=True)
    odd = b.op("opaque", b.op("linear", x, w), target="my.op", shape=(8, 4), dtype="float32")
    return b.graph([("loss", b.op("sum", odd, dims=(0, 1), keepdim=False))])


def test_an_unknown_operator_keeps_what_it_reads_and_gives() -> None:
    candidate = Planner(cluster(1), every_choice).solve(with_opaque(), Mesh.of(x=1), ("free",), "test")
    problem, solution, _ = candidate.solved
    kept = problem.kept_bytes[problem.index["node", next(n.name for n in problem.graph.nodes if n.op == "opaque")]]
    assert kept.value[solution.choices[0]] == 2 * 8 * 4 * 4
    assert predict(candidate.graph, cluster(1)).memory.activations_bytes == 2 * 8 * 4 * 4


def test_a_lookup_reads_what_it_returns_and_writes_the_whole_gradient_of_its_table() -> None:
    b = GraphBuilder()
    ids = b.leaf("ids", "input", (8, 4), "int64", "ids")
    table = b.leaf("table", "parameter", (1024, 64), "float32", "table", grad=True)
    h = b.op("embedding", table, ids, padding_idx=-1)
    graph = b.graph([("loss", b.op("sum", h, dims=(0, 1, 2), keepdim=False))])
    name = next(n.name for n in graph.nodes if n.op == "embedding")
    for size in (1, 4):
        search = Planner(cluster(size), every_choice)
        planned = search.solve(graph, Mesh.of(dp=size), ("data",), "test").graph
        device, returned, ids_bytes = search.cluster.device, 8 * 4 * 64 * 4 / size, 8 * 4 * 8 / size
        forward_bytes, table_bytes = 2 * returned + ids_bytes, 1024 * 64 * 4
        backward_bytes = table_bytes + 3 * returned + ids_bytes  # zeros, and rows added to them
        expected_s = (forward_bytes + backward_bytes) / device.memory_bytes_per_s + 2 * device.op_overhead_s
        assert node_costs(Steps(planned, search.cluster, DEFAULT))[name].compute_s == pytest.approx(expected_s)


def test_what_is_computed_once_takes_no_time_of_a_step_and_stays() -> None:
    """A table of positions, and what is added to the batch of it on each of two devices."""
    graph = parse_graph("""
    mesh [x=2]
    %x = input() {dtype='float32', grad=False, layouts=('S(0)',), shape=(8, 4), target='x'}
    %w = parameter() {dtype='float32', grad=True, layouts=('R',), shape=(4,), target='w'}
    %a = arange() split(x=R) {dtype='int64', start=0, step=1, stop=32}
    %f = cast(%a) split(x=R) {dtype='float32'}
    %t = reshape(%f) split(x=R) {shape=(8, 4)}
    %p = partition(%t) {axis='x', dim=0}
    %y = add(%x, %p) split(x=_0)
    %c = replicate(%w) {axis='x'}
    %z = mul(%y, %c) split(x=_0)
    %s = sum(%z) split(x=d0) {dims=(0, 1), keepdim=False}
    %r = reduce(%s) {axis='x'}
    outputs loss=%r
    """).validate()
    table, once = node_costs(Steps(graph, cluster(2), DEFAULT)), ("a", "f", "t", "p")
    assert set(table) >= {node.name for node in graph.nodes}
    assert [table[name].compute_s + table[name].communication_s for name in once] == [0.0] * 4
    assert table["y"].compute_s > 0
    steps = Steps(graph, cluster(2), Execution())
    assert not {operation.name for operation in steps.listed} & set(once)
    assert predict(graph, cluster(2)).memory.buffers_bytes == 2 * (4 * 4 * 4)  # this rank's batch, and its part


@pytest.mark.parametrize("name", zoo("gpt", "t5"))
def test_what_the_search_pays_for_is_what_a_step_sends(name: str) -> None:
    """In all microbatches, what is the same for all of them too: positions and the biases of attention."""
    captured, local = prepare(name).captured.graph, default_cluster(2)
    cells = list(product((DATA, ZERO, TENSOR), (1, 4)))
    some = [0, 3, 4] if name == "gpt" else [1, 2, 5]
    for role, many in cells if WHOLE_GRIDS else (cells[n] for n in some):
        plan = Planner(local, CERTIFIED).plan(captured, mesh=Mesh.of(mb=many, x=2), roles=(role,), compared=False)
        paid = sum(cost.communication_bytes for cost in node_costs(Steps(plan.graph, local, plan.execution)).values())
        messages = program(plan.graph, local, plan.execution).messages()
        sent = sum(collective_bytes(kind.collective, kind.num_bytes, 2) * n for kind, n in messages.items())
        assert paid == pytest.approx(sent, rel=0.05), (role, many)


def test_of_a_plan_with_stages_the_busiest_one_is_told() -> None:
    """The parts fit into the step, bubbles included, as those of a plan without stages do."""
    graph = planned("tensor", 6)
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        run = Execution.of(num_stages=2, num_microbatches=4, schedule=schedule)
        found, alone = (
            predict(graph, cluster(4 * e.schedule.num_stages), e) for e in (run, Execution.of(num_microbatches=4))
        )
        made = program(graph, cluster(8), run)
        kernels_s = [made.compute_s(stage) for stage in range(2)]
        assert sum(passes_s for passes_s, _ in kernels_s) / 4 == pytest.approx(alone.compute_s, rel=0.05)
        assert (4 * found.compute_s, found.optimizer_s) in kernels_s
        assert found.communication_bytes == pytest.approx(alone.communication_bytes / 2)
        assert 0 < found.bubble_s < found.step_s
        busy_s = 4 * found.compute_s + found.optimizer_s + found.exposed_s + found.bubble_s
        assert busy_s <= found.step_s * (1 + 1e-9)
        assert Prediction.from_json(found.to_json()) == found


def test_a_parameter_without_elements_takes_part_in_a_bucket() -> None:
    """MobileBERT has one where its embeddings are as wide as its blocks."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.inner = nn.Parameter(torch.zeros(4, 0)), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(torch.cat([x, self.empty], dim=1)).square().mean()

    plan = sw.plan(Model(), default_cluster(2), kwargs={"x": torch.randn(4, 4)}, mesh={"x": 2}, roles="data")
    assert plan.prediction.step_s > 0
