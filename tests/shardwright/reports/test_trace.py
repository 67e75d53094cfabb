"""The rewrite trace: rules, places and certificates, in `explain` and on the page; that there is none is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.pcg.mesh import Mesh
from shardwright.reports.facts import PlanFacts
from shardwright.reports.plan import PlanReport
from shardwright.reports.trace import NO_REWRITE, Applied, applied, proven
from shardwright.search.plan import Plan, Rewrite
from shardwright.search.tree.planner import Planner
from shardwright.substitutions.rules.catalogue import CATALOGUE
from tests.search.graphs import blocks, cluster, every_choice
from tests.shardwright.page import text_of

RULE = "matmul_of_scaled"


@pytest.fixture(scope="module")
def plain() -> Plan:
    return Planner(cluster(2), every_choice).plan(blocks(), "Net", mesh=Mesh.of(dp=2), roles=("data",))


@pytest.fixture(scope="module")
def plan(plain: Plan) -> Plan:
    """With rewrites that only its report tells of, of equal places in two blocks, and of a rule that nobody knows."""
    names = [node.name for node in plain.graph.nodes if node.op == "add" and not node.is_leaf]
    rewrites = [
        Rewrite(names[0], names[1], ((RULE, 0), ("of_a_file", 1))),
        Rewrite(names[1], names[2], ((RULE, 0),)),
    ]
    return replace(plain, report=replace(plain.report, rewrites=tuple(rewrites)))


def test_equal_places_of_blocks_are_told_together(plan: Plan) -> None:
    assert applied(PlanFacts(plan)) == [
        Applied(RULE, "layers.1–2", "add → add", 2),
        Applied("of_a_file", "layers.1", "add → add", 1),
    ]


def test_a_rule_has_its_certificate_or_says_that_there_is_none(plan: Plan) -> None:
    known, unknown = proven(PlanFacts(plan))
    assert known.sha256 == CATALOGUE[RULE].hash
    assert known.equation == CATALOGUE[RULE].equation
    assert known.how.startswith("normal forms and, independently, real arithmetic; z3")
    assert "every degree" in known.scope
    assert (unknown.sha256, unknown.proofs) == ("", ())
    assert "not among the rules" in unknown.how
    assert replace(known, proofs=()).how == "this Shardwright has no certificate of it"


def test_explain_and_the_page_show_it(plan: Plan, plain: Plan, tmp_path: Path) -> None:
    page, explained = text_of(plan, tmp_path), str(PlanReport(plan))
    for text in (page, explained):
        for told in (RULE, "layers.1–2", "add → add", CATALOGUE[RULE].hash, "normal forms and, independently"):
            assert told in text, told
    assert CATALOGUE[RULE].equation in page
    page, explained = text_of(plain, tmp_path), str(PlanReport(plain))
    assert NO_REWRITE in page
    assert NO_REWRITE in explained
    assert "Certificates" not in page + explained
