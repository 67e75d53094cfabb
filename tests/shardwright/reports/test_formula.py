"""Closed forms against the prediction of the same layout at other sizes, and what is said of where they hold."""

from __future__ import annotations

import json

import pytest
from sympy import Symbol, sympify

from bench.plans import CERTIFIED, fast_links
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.planning import certified_choices
from shardwright.reports.facts import PlanFacts
from shardwright.reports.forms import ONE, Formulas, interpolated
from shardwright.reports.formula import FormulaReport
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from tests.lowering.test_sequence import grouped
from tests.search.graphs import blocks, cluster, every_choice, mixture
from tests.shardwright.command import Run

WIDTH, BATCH = 128, 64


def planned(role: str, nodes: int = 2, batch: int = BATCH, width: int = WIDTH) -> Plan:
    """On a cluster of which each device is a node, with fast links, so that nothing depends on them."""
    planner = Planner(cluster(nodes, link_bytes_per_s=1e9), every_choice)
    return planner.plan(blocks(batch, width, seq=16), "Net", mesh=Mesh.of(x=nodes), roles=(role,), compared=False)


def layouts(plan: Plan) -> list[object]:
    return [(node.op, node.split) for node in plan.graph.nodes]


def values(formulas: Formulas, **at: float) -> dict[str, float]:
    return {name: formulas.at(form, **at) for name, form in formulas.all.items()}


def predicted(plan: Plan) -> dict[str, float]:
    p = PlanFacts(plan).prediction
    stored_bytes = p.memory.parameters_bytes + p.memory.optimizer_bytes
    return {"compute_s": p.compute_s, "optimizer_s": p.optimizer_s, "communication_s": p.communication_s,
            "sent_bytes": p.communication_bytes, "stored_bytes": stored_bytes}  # fmt: skip


@pytest.fixture(scope="module", params=["data", "zero", "tensor"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return planned(request.param)


def test_forms_are_the_prediction_at_the_plan_and_at_other_sizes(plan: Plan) -> None:
    formulas, role = Formulas(PlanFacts(plan)), str(plan.asked.roles and plan.asked.roles[0])
    assert (formulas.batch, formulas.hidden, formulas.num_nodes) == (BATCH, WIDTH, 2)
    assert values(formulas) == pytest.approx(predicted(plan), rel=1e-9)
    compared = 0
    for batch, hidden in ((2 * BATCH, WIDTH), (BATCH, 2 * WIDTH), (4 * BATCH, 4 * WIDTH), (BATCH // 2, WIDTH)):
        other = planned(role, 2, batch, hidden)
        if layouts(other) == layouts(plan):
            assert values(formulas, batch=batch, hidden=hidden) == pytest.approx(predicted(other), rel=1e-6), (
                batch,
                hidden,
            )
            compared += 1
    assert compared >= 3


def test_more_nodes_share_the_batch_and_what_they_store(plan: Plan) -> None:
    """Of what is sent along their own axis there is no form in nodes, which is said."""
    formulas, role = Formulas(PlanFacts(plan)), str(plan.asked.roles and plan.asked.roles[0])
    other = planned(role, 4)
    assert layouts(other) == layouts(plan)
    wanted = predicted(other)
    for name in ("compute_s", "optimizer_s", "stored_bytes"):
        assert formulas.at(formulas.all[name], nodes=4) == pytest.approx(wanted[name], rel=1e-6), name
    assert "along the axis of nodes for this number of nodes only" in str(FormulaReport(formulas.facts))


def test_expressions_are_the_forms(plan: Plan) -> None:
    formulas = Formulas(PlanFacts(plan))
    n, b, h = (Symbol(name, positive=True) for name in "nbh")
    at = [(n, 6), (b, 100), (h, 300)]
    for form in formulas.all.values():
        told = float(sympify(formulas.expression(form)).subs(at))
        assert told == pytest.approx(formulas.at(form, nodes=6, batch=100, hidden=300), rel=1e-3)


def test_stages_have_none() -> None:
    found = Planner(cluster(4), every_choice).plan(blocks(), "Net", mesh=Mesh.of(x=2), stages=2, compared=False)
    with pytest.raises(PlanError, match="plans without pipeline stages"):
        FormulaReport(PlanFacts(found))


def test_a_ring_of_nodes_has_none() -> None:
    """It runs a kernel per device, so their number grows; a ring inside of nodes does not."""
    graph = capture(*grouped(2, 12)).graph
    for mesh, roles in ((Mesh.of(cp=2), ("ring",)), (Mesh.of(dp=2, cp=2), ("data", "ring"))):
        planner = Planner(fast_links(mesh.num_devices), CERTIFIED)
        found = PlanFacts(planner.plan(graph, mesh=mesh, roles=roles, microbatches=1, compared=False))
        assert {node.split[-1].partition("/")[0] for node in found.graph.leaves("sdpa")} == {"q@k"}
        if len(mesh) == 1:
            with pytest.raises(PlanError, match="a ring along cp runs a kernel per device; `explain --what-if`"):
                FormulaReport(found)
        else:
            assert values(Formulas(found)) == pytest.approx(predicted(found.plan), rel=1e-6)


def test_polynomials_are_found_exactly() -> None:
    def value(b: float, h: float, n: float) -> float:
        return 3 + 5 * b * h**2 * n + 7 * h - 2 * n

    points = {(b, h, n): value(b, h, n) for b in (1, 2) for h in (1, 2, 3) for n in (1, 2)}
    assert interpolated(points) == pytest.approx({ONE: 3, (1, 2, 1): 5, (0, 1, 0): 7, (0, 0, 1): -2})


def test_explain_shows_them(run: Run) -> None:
    assert run("plan", "models.py:net", "--mesh", "dp=2", "--roles", "data", "-o", "plan.json")[0] == 0
    status, out, _ = run("explain", "plan.json", "--formula")
    assert status == 0
    assert "Where they hold" in out
    found = json.loads(run("explain", "plan.json", "--formula", "--format", "json")[1])
    assert found["forms"]["stored_bytes"]["value"] > 0
    assert run("explain", "plan.json", "--formula", "--find", "up.weight")[0] == 2


def test_experts_have_the_rows_that_all_nodes_send() -> None:
    """Of twice as many nodes each has half of the experts, and rows from twice as many others."""

    def routed(nodes: int) -> Plan:
        graph = mixture(tokens=4096, hidden=1024, experts=16, used=1)
        planner = Planner(cluster(nodes, link_bytes_per_s=1e9), certified_choices())
        return planner.plan(graph, "Net", mesh=Mesh.of(x=nodes), roles=("expert",), compared=False)

    four, eight = routed(4), routed(8)
    assert {node.split for plan in (four, eight) for node in plan.graph.leaves("experts")} == {("e>_0",)}
    formulas = Formulas(PlanFacts(four))
    assert values(formulas)["compute_s"] == pytest.approx(predicted(four)["compute_s"], rel=1e-9)
    assert formulas.at(formulas.compute_s, nodes=8) == pytest.approx(predicted(eight)["compute_s"], rel=1e-6)
