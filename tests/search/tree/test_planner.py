"""Plans: never worse than the baselines, within memory, equal to what the prediction says."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product

import pytest

from bench.decoders import Decoder, captured
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import node_costs, predict
from shardwright.cost.timeline.memory import SAFE_SHARE
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.analysis import constant_nodes
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import GraphError, PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT
from shardwright.planning import certified_choices
from shardwright.reports.facts import PlanFacts, fits
from shardwright.reports.plan import PlanReport
from shardwright.reports.wording import quality
from shardwright.search.check import check_plan
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.within import within_memory
from shardwright.search.plan import Plan
from shardwright.search.request.spaces import meshes
from shardwright.search.rewrites.leaves import LeafSearch, Rewritten
from shardwright.search.rewrites.splits import LeafPart
from shardwright.search.tree.planner import Planner
from shardwright.substitutions.rules.catalogue import CATALOGUE
from tests.each import each
from tests.search.graphs import blocks, cluster, every_choice, mlp

FAST, SLOW = 1e12, 1e7


def planner(num_devices: int = 4, **options: float) -> Planner:
    return Planner(cluster(num_devices, **options), every_choice)  # type: ignore[arg-type]


def test_meshes_are_all_factorizations() -> None:
    assert [m.sizes for m in meshes(8)] == [(8,), (2, 4), (4, 2)]
    assert [m.sizes for m in meshes(8, max_axes=3)] == [(8,), (2, 4), (2, 2, 2), (4, 2)]
    assert [m.sizes for m in meshes(1)] == [(1,)]
    assert [m.sizes for m in meshes(7)] == [(7,)]


@each("num_devices", range(1, 200))
def test_meshes_of_two_axes_come_in_the_order_of_the_first(num_devices: int) -> None:
    pairs = [(a, num_devices // a) for a in range(2, num_devices) if num_devices % a == 0]
    assert [m.sizes for m in meshes(num_devices)] == [(num_devices,), *pairs]


def test_meshes_of_very_many_devices() -> None:
    """At once: trying every number up to this one would take years."""
    prime = 10**18 + 9
    assert [m.sizes for m in meshes(2 * prime)] == [(2 * prime,), (2, prime), (prime, 2)]


@each("link", [FAST, 1e9, SLOW])
@each("num_devices", [1, 2, 4])
def test_a_plan_is_never_worse_than_a_baseline(num_devices: int, link: float) -> None:
    plan = planner(num_devices, link_bytes_per_s=link).plan(mlp(64, 64, 256, layers=3))
    assert all(plan.prediction.step_s <= a.prediction.step_s * (1 + 1e-9) for a in plan.alternatives if a.fits)
    assert plan.report.bound_s <= plan.prediction.step_s * (1 + 1e-9)


def test_a_report_of_what_the_search_has_costed_is_that_of_the_plan_alone() -> None:
    """A plan for other devices is costed anew."""
    own = planner()
    for plan in (own.plan(mlp()), planner(2).plan(mlp())):
        facts = PlanFacts(plan, own.programs_of(plan))
        assert facts.programs.cluster == plan.cluster
        assert facts.prediction == plan.prediction
        assert str(PlanReport(plan, facts=facts)) == str(PlanReport(plan))


def test_fast_links_split_and_slow_links_do_not() -> None:
    graph = mlp(64, 64, 256, layers=3)
    fast = planner(4, link_bytes_per_s=FAST, latency_s=0).plan(graph)
    slow = planner(4, link_bytes_per_s=SLOW).plan(graph)
    assert any(choice not in ("R", "C") for n in fast.graph.nodes for choice in n.split)
    assert not any(n.is_parallel for n in slow.graph.nodes)
    assert fast.prediction.step_s < slow.prediction.step_s


@each("mesh", [Mesh.of(x=4), Mesh.of(x=2, y=2)], ids=str)
@each("roles", ["data", "zero", "tensor", "free"])
def test_the_prediction_is_the_objective(mesh: Mesh, roles: str) -> None:
    """What walking the finished graph gives is what was minimized, plus the nodes that are not variables."""
    graph = mlp(64, 64, 256, layers=2, residual=True)
    candidate = planner(4, link_bytes_per_s=1e10).solve(graph, mesh, (roles,) * len(mesh), "test")
    constants = constant_nodes(candidate.graph)
    fixed = sum(
        c.compute_s + c.communication_s
        for n, c in node_costs(Steps(candidate.graph, planner(4).cluster, DEFAULT)).items()
        if n in constants
    )
    assert candidate.prediction.serial_s - fixed == pytest.approx(candidate.bound_s, rel=0.02)


def test_memory_is_a_hard_limit_and_costs_time() -> None:
    graph = mlp(64, 64, 256, layers=4)
    unlimited = planner(4, link_bytes_per_s=SLOW).plan(graph)
    needed = unlimited.prediction.memory.total_bytes
    steps = []
    for fraction in (2.0, 0.9, 0.6):
        plan = planner(4, link_bytes_per_s=SLOW, memory_bytes=int(needed * fraction)).plan(graph)
        assert plan.prediction.memory.total_bytes <= plan.report.limit_bytes < needed * fraction
        assert plan.report.bound_s <= plan.prediction.step_s * (1 + 1e-9)
        steps.append(plan.prediction.step_s)
    assert all(a <= b for a, b in pairwise(steps))
    assert steps[0] < steps[-1]


@pytest.mark.parametrize("memory_bytes", [1, 2, 100_000])
def test_where_nothing_fits_the_smallest_plan_is_returned_and_says_so(memory_bytes: int) -> None:
    graph = mlp(64, 64, 256, layers=4)
    plan = planner(2, memory_bytes=memory_bytes).plan(graph)
    assert plan.prediction.memory.total_bytes > plan.report.limit_bytes
    assert plan.prediction.memory.total_bytes <= planner(2).plan(graph).prediction.memory.total_bytes
    assert not any(a.fits for a in plan.alternatives)
    assert not fits(plan)
    assert "DOES NOT FIT" in str(PlanReport(plan))


@pytest.mark.parametrize("left", [-1, 0, 1])
def test_what_the_context_takes_is_no_room_for_a_plan(left: int) -> None:
    """`left`: bytes more than a plan needs that the context leaves of the memory."""
    graph, free = mlp(64, 64, 256, layers=4), cluster(1)
    needed = planner(1).plan(graph).prediction.memory.total_bytes
    context_bytes = int(free.device.memory_bytes * SAFE_SHARE) - needed - left
    device = replace(free.device, context_bytes=context_bytes)
    plan = Planner(replace(free, device=device), every_choice).plan(graph, microbatches=1)
    assert plan.prediction.memory.total_bytes == needed + context_bytes
    assert fits(plan) == (left >= 0)


@pytest.mark.parametrize("sizes", [(7, 11, 13), (1, 3, 5), (8, 9, 15)])
def test_odd_sizes_give_a_plan_that_works(sizes: tuple[int, int, int]) -> None:
    graph = mlp(*sizes, layers=2)
    for roles in ("data", "zero", "tensor", "free"):
        candidate = planner(4, link_bytes_per_s=FAST).solve(graph, Mesh.of(x=4), (roles,), roles)
        candidate.graph.validate()


def with_buffer(num_elements: int) -> Graph:
    """An MLP whose input is scaled by the sum of a buffer, which the solver does not count: only the graph shows it."""
    b = GraphBuilder()
    x, table = b.leaf("x", "input", (64, 64), "float32", "x"), b.leaf("t", "buffer", (num_elements,), "float32", "t")
    x = b.op("mul", x, b.op("sum", table, dims=(0,), keepdim=False))
    for i in range(3):
        x = b.op("relu", b.op("linear", x, b.leaf(f"w{i}", "parameter", (64, 64), "float32", f"w{i}", grad=True)))
    return b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False))])


def test_what_only_the_finished_graph_shows_is_made_room_for() -> None:
    """And the bound stays that of the true limit."""
    graph = with_buffer(20_000)
    needed = planner(4, link_bytes_per_s=SLOW).plan(graph).prediction.memory.total_bytes
    tight = planner(4, link_bytes_per_s=SLOW, memory_bytes=int(needed * 0.95))
    candidate = tight.solve(graph, Mesh.of(x=4), ("free",), "test")
    assert candidate.fits
    problem, _, _ = candidate.solved
    _, eliminator = tight.solver.builder(Mesh.of(x=4))
    limit = tight.limit_bytes
    assert candidate.bound_s == within_memory(problem, eliminator, limit, float("inf"))[1]


def test_where_buffers_alone_are_too_large_the_smallest_plan_is_returned() -> None:
    graph = with_buffer(10**6)
    small = planner(4, link_bytes_per_s=SLOW, memory_bytes=10**6).plan(graph)
    free = planner(4, link_bytes_per_s=SLOW).plan(graph)
    assert small.prediction.memory.total_bytes > small.report.limit_bytes
    assert small.prediction.memory.total_bytes <= free.prediction.memory.total_bytes
    assert small.report.bound_s <= small.prediction.step_s
    assert quality(small).startswith("no plan within memory was found; this is the smallest")


@each("roles", [("data", "data"), ("zero", "zero"), ("data", "zero"), ("tensor", "data")])
@each("sizes", [(2, 2, 2), (2, 6, 6), (6, 2, 6)])
def test_axes_that_do_not_divide_a_size_together_leave_it_to_the_first(
    sizes: tuple[int, int, int], roles: tuple[str, str]
) -> None:
    graph = mlp(*sizes)
    plan = planner(4).plan(graph, mesh=Mesh.of(x=2, y=2), roles=roles)
    check_plan(plan, graph, every_choice)
    if roles[0] == "data" and sizes[0] == 2:
        assert {n.split for n in plan.graph.nodes if n.op == "linear"} == {("_0", "R")}


@pytest.mark.parametrize("name", ["v", "w"])
def test_a_parameter_may_be_an_output(name: str) -> None:
    """A buffer that follows a weight; "v" is read by nobody else."""
    b = GraphBuilder()
    x = b.leaf("x", "input", (8, 4), "float32", "x")
    w, v = (b.leaf(n, "parameter", (4, 4), "float32", n, grad=True) for n in "wv")
    loss = b.op("sum", b.op("linear", x, w), dims=(0, 1), keepdim=False)
    graph = b.graph([("loss", loss), ("buffer", {"w": w, "v": v}[name])])
    for roles in ("zero", "tensor", "free"):
        plan = planner(2).plan(graph, mesh=Mesh.of(x=2), roles=(roles,))
        check_plan(plan, graph, every_choice)


def test_outputs_without_gradient_leave_whole() -> None:
    b = GraphBuilder()
    x, w = b.leaf("x", "input", (8, 4), "float32", "x"), b.leaf("w", "parameter", (4, 4), "float32", "w", grad=True)
    h = b.op("linear", x, w)
    mask, still = b.op("cast", b.op("gt", h, 0), dtype="float32"), b.op("detach", h)
    loss = b.op("sum", b.op("mul", b.op("mul", h, mask), still), dims=(0, 1), keepdim=False)
    graph = b.graph([("loss", loss), ("buffer", still), ("mask", mask)])
    for mesh in meshes(4):
        check_plan(planner(4, link_bytes_per_s=FAST).plan(graph, mesh=mesh), graph, every_choice)


def test_a_loss_that_no_parameter_reaches_has_a_plan() -> None:
    b = GraphBuilder()
    x, w = b.leaf("x", "input", (8, 4), "float32", "x"), b.leaf("w", "parameter", (4, 4), "float32", "w", grad=True)
    graph = b.graph([("loss", b.op("sum", x, dims=(0, 1), keepdim=False)), ("buffer", b.op("linear", x, w))])
    check_plan(planner(4, link_bytes_per_s=FAST).plan(graph), graph, every_choice)


def test_data_parallel_splits_the_batch_and_reduces_every_gradient() -> None:
    candidate = planner(2).solve(mlp(8, 16, 32), Mesh.of(dp=2), ("data",), "dp")
    graph = candidate.graph
    assert {n.split for n in graph.nodes if n.op == "linear"} == {("_0",)}
    replicated = {n.inputs[0] for n in graph.nodes if n.op == "replicate"}
    assert replicated == {n.name for n in graph.leaves("parameter")}


def test_zero_stores_every_parameter_sharded() -> None:
    candidate = planner(2).solve(mlp(8, 16, 32), Mesh.of(dp=2), ("zero",), "zero")
    assert all(candidate.graph.types[n.name].layouts[0].is_shard for n in candidate.graph.leaves("parameter"))


def test_tensor_parallel_is_megatrons() -> None:
    """Columns of the first weight, rows of the second, one all-reduce a layer."""
    candidate = planner(2, link_bytes_per_s=1e9).solve(mlp(8, 16, 64, layers=1), Mesh.of(tp=2), ("tensor",), "tp")
    layouts = {
        n.attr("target"): str(candidate.graph.types[n.name].layouts[0]) for n in candidate.graph.leaves("parameter")
    }
    assert layouts == {"layers.0.up": "S(0)", "layers.0.down": "S(1)"}
    assert sum(n.op == "reduce" for n in candidate.graph.nodes) == 1


def test_predictions_are_of_positive_parts() -> None:
    plan = planner(4, link_bytes_per_s=1e10).plan(mlp(64, 64, 256))
    again = predict(plan.graph, plan.cluster)
    assert again == plan.prediction
    assert again.compute_s > 0
    assert again.optimizer_s > 0
    assert again.memory.parameters_bytes > 0


def test_a_larger_mesh_is_refused() -> None:
    with pytest.raises(PlanError, match=r"mesh \[x=5\] has 5 devices, cluster test has 4"):
        planner(4).plan(mlp(), mesh=Mesh.of(x=5))


def test_the_search_lets_keys_travel_where_a_step_is_faster_so() -> None:
    """Beside compute of GPUs, with every fourth position on each, whether heads divide or not."""
    machine, mesh = Cluster.preset("a10-box", 1, 4), Mesh.of(x=4)
    for heads in ((2, 1), (4, 4)):
        graph = captured(Decoder("llama", 1, 256, *heads, 512, 1000), 1, 16384)
        found = Planner(machine, certified_choices()).plan(graph, mesh=mesh, compared=False, recompute="none")
        (attention,) = found.graph.leaves("sdpa")
        assert attention.split[-1] == "q@k/4096", heads


def test_roles_must_match_the_mesh() -> None:
    with pytest.raises(PlanError, match=r"2 axis roles for mesh \[x=4\]; give one role per axis of devices"):
        planner(4).plan(mlp(), mesh=Mesh.of(x=4), roles=("data", "tensor"))
    with pytest.raises(
        PlanError,
        match=r"unknown axis role 'pipeline'; choose one of \['data', 'zero', 'expert', 'context', 'ulysses', 'ring', ",
    ):
        planner(4).plan(mlp(), mesh=Mesh.of(x=4), roles=("pipeline",))


def test_a_graph_without_a_loss_is_told() -> None:
    graph = replace(mlp(), outputs=(("mean", mlp().outputs[0][1]),))
    for made in (graph, GraphBuilder().graph([])):
        with pytest.raises(
            GraphError, match=r"the graph has no output 'loss', only \[.*\]; a graph to plan gives a loss"
        ):
            Planner(cluster(2), every_choice).plan(made)
    with pytest.raises(GraphError, match="output 'loss' names %gone, which no node defines"):
        Planner(cluster(2), every_choice).plan(replace(mlp(), outputs=(("loss", "gone"),)))
    b = GraphBuilder()
    alone = b.graph([("loss", b.leaf("p", "parameter", (), "float32", "scale", grad=True))])
    with pytest.raises(GraphError, match="the loss is parameter 'scale' itself: there is nothing to run; compute it"):
        Planner(cluster(2), every_choice).plan(alone)


def test_odd_sizes_are_planned() -> None:
    """Of the batch and of widths, none included; then nothing that trains, and nothing but what trains."""
    for num_devices, (batch, width) in product((1, 2, 3, 8), ((0, 7), (1, 1), (1, 7), (5, 0), (5, 7))):
        plan = Planner(cluster(num_devices), every_choice).plan(mlp(batch, width, 3, 1), compared=False)
        assert plan.mesh.num_devices == plan.cluster.num_devices
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    for leaf in ("input", "parameter"):
        b = GraphBuilder()
        x = b.leaf("x", leaf, (8, 8), "float32", "x", grad=leaf == "parameter")
        graph = b.graph([("loss", b.op("sum", b.op("mul", x, x), dims=(0, 1), keepdim=False))])
        for num_devices in (1, 2, 7):
            assert Planner(cluster(num_devices), every_choice).plan(graph).prediction.step_s > 0
    with pytest.raises(PlanError, match="microbatches=2: no input has examples, so there is no batch to cut; leave it"):
        Planner(cluster(2), every_choice).plan(mlp(0), microbatches=2)


def test_no_plan_that_people_choose_takes_the_place_of_the_one_that_is_asked_for() -> None:
    """Data parallelism is faster here than slices that are gathered."""
    graph = blocks(layers=2)
    for roles, mesh in ((("zero",), Mesh.of(x=2)), (("tensor",), Mesh.of(y=2))):
        assert planner(2).plan(graph, mesh=mesh, roles=roles).mesh == mesh


def test_rewrites_that_leave_nothing_to_make_again_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is written out may be another thing after a rewrite; what is asked for goes first."""
    graph = GraphBuilder()
    x, target = (graph.leaf(name, "input", (8, 4, 16), "float32", name) for name in "xy")
    q, k, v = (graph.op("linear", x, graph.leaf(name, "parameter", (16, 16), "float32", name, True)) for name in "qkv")
    scores = graph.op("softmax", graph.op("matmul", q, graph.op("permute", k, dims=(0, 2, 1))), dim=2)
    loss = graph.op("sum", graph.op("mul", graph.op("matmul", scores, v), target), dims=(0, 1, 2), keepdim=False)
    found = planner(2)
    found.rules = CATALOGUE
    leaf = Rewritten(LeafPart(("x",), ("y",), mlp()), (("any", 0),), mlp(), 1.0)
    monkeypatch.setattr(LeafSearch, "improve", lambda *solved: [leaf])
    monkeypatch.setattr("shardwright.search.rewrites.rewriting.applied", lambda *rewrites: Folded(mlp()))
    plan = found.plan(graph.graph([("loss", loss)]), mesh=Mesh.of(x=2), recompute="selective", microbatches=1)
    assert plan.execution.recompute == "selective"
    assert plan.report.rewrites == ()
