"""What is said about a plan: axes, weights, moves, reasons, modules, comparison; its sums are the prediction's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.plans import CERTIFIED, fast_links
from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.dispatch import Dispatch
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.mesh import Mesh
from shardwright.planning import certified_choices
from shardwright.reports import units
from shardwright.reports.comparison import ComparisonReport
from shardwright.reports.facts import PlanFacts
from shardwright.reports.modules import module_tree
from shardwright.reports.named import Names
from shardwright.reports.plan import PlanReport
from shardwright.reports.rounding import roundings
from shardwright.reports.tree import Module
from shardwright.reports.wording import faster_or_slower, links, quality
from shardwright.search.plan import Plan, Rewrite
from shardwright.search.tree.planner import Planner
from tests.each import each
from tests.lowering.test_sequence import grouped
from tests.search.graphs import blocks, cluster, every_choice, mixture

FAST = 1e12


def planned(graph: Graph, mesh: Mesh, *roles: str, link_bytes_per_s: float = FAST) -> Plan:
    planner = Planner(cluster(mesh.num_devices, link_bytes_per_s=link_bytes_per_s), every_choice)
    return planner.plan(graph, "Net", mesh=mesh, roles=roles)


@pytest.fixture(scope="module")
def data() -> Plan:
    return planned(blocks(), Mesh.of(dp=2), "data")


@pytest.fixture(scope="module")
def zero() -> Plan:
    return planned(blocks(), Mesh.of(dp=2), "zero")


@pytest.fixture(scope="module")
def tensor() -> Plan:
    return planned(blocks(), Mesh.of(tp=2), "tensor")


# ---- axes and weights ----


def test_data_parallel_is_called_so(data: Plan) -> None:
    (axis,) = PlanFacts(data).axes
    assert axis.num_operators["batch"] == sum(axis.num_operators.values())
    assert axis.share_of_compute["batch"] == pytest.approx(1)
    assert axis.num_weights == {"whole": 10, "sharded": 0, "gathered": 0}
    assert "dp (2)  data parallel, over rank: of 18 operators, splits the batch in 18 (100 % of compute)" in str(
        PlanReport(data)
    )


def test_zero_is_called_so(zero: Plan) -> None:
    (axis,) = PlanFacts(zero).axes
    assert axis.num_weights == {"whole": 0, "sharded": 0, "gathered": 10}
    text = str(PlanReport(zero))
    assert "data parallel with gathered weights (ZeRO-2)" in text
    assert "weights: 10 stored sharded and gathered for use (10 ZeRO-2)" in text
    assert "ZeRO-2: gathered once and kept for backward; gradients are reduce-scattered in backward" in text
    assert "all-gathered; gradients reduce-scattered" in text


def test_tensor_parallel_is_called_so(tensor: Plan) -> None:
    (axis,) = PlanFacts(tensor).axes
    assert axis.num_weights["sharded"] >= 6
    assert axis.num_operators["features"] >= 9
    assert "tp (2)  tensor parallel" in str(PlanReport(tensor))


def test_a_split_of_the_sequence_is_no_split_of_features() -> None:
    plan = planned(blocks(batch=1, width=64, seq=8192), Mesh.of(x=2), "free")
    (axis,) = PlanFacts(plan).axes
    assert axis.num_operators["sequence"] > 0
    assert "sequence parallel" in str(PlanReport(plan))


def test_a_ring_is_a_split_of_the_sequence() -> None:
    graph = capture(*grouped(2, 12)).graph
    plan = Planner(fast_links(2), CERTIFIED).plan(graph, mesh=Mesh.of(cp=2), roles=("ring",), compared=False)
    assert {node.split[-1].partition("/")[0] for node in plan.graph.leaves("sdpa")} == {"q@k"}
    (axis,) = (own for own in PlanFacts(plan).axes if not own.is_time)
    assert axis.num_operators["sequence"] > axis.num_operators.get("features", 0) == 0


def test_an_axis_names_the_links_that_it_crosses() -> None:
    dgx = Cluster.preset("dgx-h100", nodes=4)
    mesh = Mesh.of(x=4, y=8)
    assert links(dgx, mesh, "x") == "network"
    assert links(dgx, mesh, "y") == "nvlink"
    assert links(dgx, Mesh.of(x=32), "x") == "nvlink and network"
    assert links(dgx, Mesh.of(x=2, y=16), "y") == "nvlink and network"
    assert links(Cluster.local(1), Mesh.of(x=1), "x") == "one device"


# ---- sums ----


@pytest.mark.parametrize("name", ["data", "zero", "tensor"])
def test_the_parts_add_up(name: str, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(name)
    facts = PlanFacts(plan)
    assert sum(t.seconds for t in facts.traffic) == pytest.approx(plan.prediction.communication_s)
    assert sum(t.sent_bytes for t in facts.traffic) == pytest.approx(plan.prediction.communication_bytes)
    total = module_tree(facts).total
    assert total.communication_s == pytest.approx(plan.prediction.communication_s)
    assert total.compute_s == pytest.approx(plan.prediction.compute_s)
    assert total.stored_bytes == plan.prediction.memory.parameters_bytes


# ---- modules ----


def labels(module: Module) -> list[str]:
    return [m.label for _, _, m in module.walk()]


def test_equal_blocks_fold(data: Plan) -> None:
    tree = module_tree(PlanFacts(data))
    assert labels(tree) == ["Net", "embed", "layers.0–2", "norm", "mlp", "up", "down", "(constants)"]
    assert "layers.0–2 (3 alike)" in str(PlanReport(data))
    assert tree.children[1].total.num_operators == 3 * tree.children[1].each.num_operators == 15


def test_blocks_with_other_layouts_do_not_fold(data: Plan) -> None:
    changed = {"g1", "up1"}
    nodes = tuple(
        replace(n, attrs=tuple((k, ("S(0)",) if k == "layouts" else v) for k, v in n.attrs)) if n.name in changed else n
        for n in data.graph.nodes
    )
    gathered = Graph(tuple(_gathering(nodes, changed)), data.graph.outputs, data.mesh).validate()
    tree = module_tree(PlanFacts(replace(data, graph=gathered)))
    assert [m.label for m in tree.children] == ["embed", "layers.0, 2", "layers.1", "(constants)"]
    layouts = "other layouts (norm.weight: S(0), not R, and 1 more)"
    lifetimes = "other lifetimes (norm.weight: ZeRO-3, not none, and 1 more)"
    moves = "other communication (norm.weight: dp: S(0) → C, not dp: R → C, and 1 more)"
    assert [m.differs for m in tree.children] == ["", "", f"from layers.0, 2: {layouts}; {lifetimes}; {moves}", ""]


def _gathering(nodes: Iterable[Node], changed: set[str]) -> Iterator[Node]:
    """Gather these parameters before they are read."""
    for node in nodes:
        if node.is_parallel and node.inputs[0] in changed:
            whole = f"{node.inputs[0]}.whole"
            yield Node(whole, "combine", node.inputs, make_attrs(axis="dp"), (), node.source)
            node = replace(node, inputs=(whole,))
        yield node


def test_depth_limits_the_table(data: Plan) -> None:
    shallow = str(PlanReport(data, depth=1))
    assert "layers.0–2" in shallow
    assert "    norm" not in shallow
    assert "4 modules further inside: --depth 2" in shallow


# ---- what runs whole, and why ----


def test_reasons_for_running_whole() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (3, 5), "float32", "x")
    w = b.leaf("w", "parameter", (5, 5), "float32", "w", grad=True)
    y = b.op("softmax", b.op("linear", x, w), dim=1)
    hidden = b.op("reshape", b.op("sum", y, dims=(0,), keepdim=False), shape=(5,))
    z = b.op("cumsum", hidden, dim=0, dtype="float32")
    graph = b.graph([("loss", b.op("sum", z, dims=(0,), keepdim=False))])
    plan = planned(graph, Mesh.of(x=2), "free")
    reasons = {u.op: u.reason for u in PlanFacts(plan).unsplit}
    assert reasons["linear"] == "no splittable size (3, 5, 5) is divisible by 2"
    assert reasons["cumsum"] == "every dimension is needed whole"
    assert "Operators that run whole along an axis" in str(PlanReport(plan))
    assert "NOTHING IS SPLIT" in str(PlanReport(plan))


def test_a_role_that_finds_nothing_to_split_is_told_of() -> None:
    """7 positions on two devices; what has a batch of 8 as well."""
    plan = planned(blocks(8, 16, layers=1, seq=7), Mesh.of(cp=2), "context")
    reasons = {u.op: u.reason for u in PlanFacts(plan).unsplit}
    assert reasons["linear"] == "it has nothing that role 'context' splits and 2 divides"


def test_an_operator_without_a_row_says_so() -> None:
    b = GraphBuilder()
    x = b.leaf("x", "input", (4, 4), "float32", "x")
    w = b.leaf("w", "parameter", (4, 4), "float32", "w", grad=True)
    h = b.op("linear", x, w)
    odd = b.op("opaque", h, target="my.op", shape=(4, 4), dtype="float32")
    plan = planned(b.graph([("loss", b.op("sum", odd, dims=(0, 1), keepdim=False))]), Mesh.of(x=2), "free")
    reasons = {u.op: u.reason for u in PlanFacts(plan).unsplit}
    assert reasons["my.op"] == "it has no row in the op table, so nothing is known about splitting it"


def test_nothing_runs_whole_under_data_parallelism(data: Plan) -> None:
    assert "none: every operator shares its work along every axis" in str(PlanReport(data))


# ---- the headline and the comparison ----


def test_the_bound_is_told_as_proven(data: Plan) -> None:
    def told(bound_s: float) -> str:
        return quality(replace(data, report=replace(data.report, bound_s=bound_s)))

    step_s = data.prediction.step_s
    assert told(step_s).startswith(
        "proven optimal among the layouts searched in 1 microbatch with the same recomputation, whatever memory they "
        "take, by the cost model; 1 mesh searched in "
    )
    assert told(step_s / 1.0004).startswith("at most 0.1 % above the optimum of the layouts searched")
    assert told(step_s / 1.07).startswith("at most 7.0 % above the optimum")
    assert told(step_s * 1.07).startswith("proven better than every layout of the operators as they were written")
    assert told(0).startswith("no bound was proven")


def test_rewrites_are_counted(data: Plan) -> None:
    rewritten = replace(
        data.report, rewrites=(Rewrite("a", "b", (("fuse_qkv", 0),)), Rewrite("c", "d", (("fuse_qkv", 1),)))
    )
    assert "rewrites        2 × fuse_qkv" in str(PlanReport(replace(data, report=rewritten)))


def test_where_figures_come_from_is_told(data: Plan) -> None:
    guessed = replace(data, cluster=replace(data.cluster, provenance="default"))
    assert "built-in defaults, not of this machine; measure it with `shardwright calibrate 2`" in str(
        PlanReport(guessed)
    )
    assert "cost figures    test" in str(PlanReport(data))


def test_a_plan_that_does_not_fit_is_told(data: Plan) -> None:
    assert "DOES NOT FIT, the limit is 1.00 kB" in str(
        PlanReport(replace(data, report=replace(data.report, limit_bytes=1000)))
    )


@each("share", [0.5, 0.899, 0.9001, 0.95, 0.999, 1.0, 1.001, 2.0])
def test_the_last_tenth_of_the_memory_is_never_said_to_fit(data: Plan, share: float) -> None:
    """Whatever limit the search had."""
    used = data.prediction.memory.total_bytes
    own_bytes = round(used / share)
    tight = replace(
        data,
        cluster=replace(data.cluster, device=replace(data.cluster.device, memory_bytes=own_bytes)),
        prediction=replace(data.prediction, device_bytes=own_bytes),
        report=replace(data.report, limit_bytes=10 * used),
    )
    text, own = str(PlanReport(tight)), str(ComparisonReport({"own": tight, "again": tight}))
    assert ("WARNING, it MAY NOT FIT: the last tenth of the memory is in use" in text) is (0.9 < share <= 1)
    assert ("DOES NOT FIT" in text) is (share > 1)
    assert ("may not fit" in own) is (0.9 < share <= 1)
    assert ("does not fit" in own) is (share > 1)
    assert PlanReport(tight).data()["fits"] is (share <= 0.9)


def test_the_moment_of_the_peak_and_what_is_exposed_are_told(data: Plan) -> None:
    text = str(PlanReport(data))
    assert f"peak: {Names(data.graph).moment(data.prediction.peak_at)}" in text
    assert "microbatch 1 of 1" in data.prediction.peak_at
    assert f"exposed communication {units.seconds(data.prediction.exposed_s)}" in text
    assert f"bubble {units.seconds(1.0)}" in str(
        PlanReport(replace(data, prediction=replace(data.prediction, bubble_s=1.0)))
    )


def test_the_comparison_names_baselines_and_ratios() -> None:
    plan = Planner(cluster(2, link_bytes_per_s=1e7), every_choice).plan(blocks(), "Net")
    text = str(PlanReport(plan))
    for name in ("this plan", "data parallel", "ZeRO-3", "tensor parallel 2"):
        assert name in text
    assert faster_or_slower(1.2, 1.0) == "20 % slower"
    assert faster_or_slower(1.0, 1.1) == "10 % faster"
    assert faster_or_slower(3.14, 1.0) == "3.1 × slower"
    assert faster_or_slower(1.0, 1.0) == "the same"


def test_plans_stand_beside_each_other(data: Plan, zero: Plan) -> None:
    text = str(ComparisonReport({"a.json": data, "b.json": zero}))
    assert "a.json" in text
    assert "b.json" in text
    assert "different models" not in text
    assert "different models" in str(ComparisonReport({"a": data, "b": replace(zero, fingerprint="other")}))


# ---- forms ----


def test_the_description_is_json_and_small(tensor: Plan) -> None:
    text = json.dumps(PlanReport(tensor).data())
    assert json.loads(text)["tree"]["children"][1]["label"] == "layers.0–2"
    assert len(text) < 20_000


def test_explaining_needs_no_torch(tmp_path: Path, data: Plan) -> None:
    data.save(tmp_path / "plan.json")
    code = (
        "import sys; from shardwright.search.plan import Plan; from shardwright.reports.plan import PlanReport; "
        f"str(PlanReport(Plan.load({str(tmp_path / 'plan.json')!r}))); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# ---- mixtures of experts ----


def test_tokens_that_are_sent_to_experts_are_told_as_communication_of_the_operator() -> None:
    planner = Planner(cluster(4), certified_choices())
    plan = planner.plan(mixture(), "Net", mesh=Mesh.of(dp=2, ep=2), roles=("data", "expert"))
    facts = PlanFacts(plan)
    (sent,) = [t for t in facts.traffic if t.what == Dispatch.what]
    (network,) = plan.graph.leaves("experts")
    cost = facts.costs[network.name]
    assert (sent.axis, sent.count, sent.num_forward, sent.num_backward) == ("ep", 1, 1, 1)
    assert (sent.sent_bytes, sent.seconds) == (cost.communication_bytes, cost.communication_s)
    ways = plan.graph.exchanges(network)[0]
    num_bytes = sum(sum(ways.sent(backward=backward).listed) for backward in (False, True))
    assert sent.sent_bytes == pytest.approx(num_bytes / 2 / 2)  # of two ranks, half of what each has stays there
    assert sum(t.seconds for t in facts.traffic) == pytest.approx(plan.prediction.communication_s)
    assert module_tree(facts).total.communication_s == pytest.approx(plan.prediction.communication_s)
    rows = [row for _, _, module in module_tree(facts).walk() for row in module.rows if row.name == "experts"]
    steps = [(s.axis, s.before, s.after, s.forward, s.backward) for row in rows for s in row.steps]
    assert steps == [("ep", "tokens", "experts", "all_to_all", "all_to_all")]
    text = str(PlanReport(plan))
    assert "tokens sent to their experts and back, all-to-all; so are gradients" in text
    assert facts.uses[network.name] == ("batch", "experts")
    assert [r.count for r in roundings(facts) if r.what == "sums of activations over devices"] == [2]
