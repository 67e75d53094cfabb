"""Reports as Markdown: read again by a parser, nothing is lost and no text means anything; narrow terminals."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest
from markdown_it import MarkdownIt

from shardwright.pcg.mesh import Mesh
from shardwright.reports.comparison import ComparisonReport, slower
from shardwright.reports.plan import PlanReport
from shardwright.reports.report import Paragraph
from shardwright.search.plan import Alternative, Plan
from shardwright.search.tree.planner import Planner
from tests.search.graphs import blocks, cluster, every_choice
from tests.shardwright.command import Run

PARSER = MarkdownIt("commonmark", {"html": True}).enable("table")
EVIL = r"a|b *c* _d_ `e` <b>f</b> [g](h) \ &amp; ~~i~~ # j"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Planner(cluster(2), every_choice).plan(blocks(), "Net", mesh=Mesh.of(tp=2), roles=("tensor",))


def cells(html: str) -> list[str]:
    return [unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html)]


def test_every_cell_and_line_of_a_plan_is_there(plan: Plan) -> None:
    report = PlanReport(plan)
    html = PARSER.render(report.markdown())
    assert len(re.findall("<h2>", html)) == len(report.paragraphs())
    found = cells(html)
    for paragraph in report.paragraphs():
        for row in paragraph.rows:
            for cell in row:
                assert cell.strip() in [own.strip("\xa0 ") for own in found], cell
    assert "<li><strong>predicted step</strong> " in html
    assert "<em>" not in html


def test_names_mean_nothing_in_it() -> None:
    html = PARSER.render(Paragraph(EVIL, [EVIL], (EVIL,), [[EVIL]], [EVIL]).markdown())
    assert cells(html) == [EVIL, EVIL]
    assert unescape(re.sub("<[^>]*>", "", html)).count(EVIL) == 5
    assert not re.search("<(b|a|em|code|del|strong)[ >]", html)


def test_a_drawing_stays_as_it_is() -> None:
    lines = ["add", "├─ x ```", "└─ y"]
    assert "\n".join(lines) in unescape(PARSER.render(Paragraph("left", lines).markdown()))


def test_a_report_fits_40_columns(plan: Plan) -> None:
    for report in (PlanReport(plan), ComparisonReport({"a.json": plan, "b.json": plan})):
        lines = [line for paragraph in report.paragraphs() for _, line in paragraph.set(40)]
        assert max(map(len, lines)) <= 40


def test_compare_fails_where_the_first_plan_is_slower(plan: Plan, run: Run) -> None:
    slow = replace(plan, prediction=replace(plan.prediction, step_s=1.1 * plan.prediction.step_s))
    for number, own in enumerate((plan, slow)):
        own.save(f"{number}.json")
    cases = [(["1.json", "0.json"], "5", 1), (["1.json", "0.json"], "11", 0), (["0.json", "1.json"], "0", 0)]
    for files, margin, expected in cases:
        status, out, err = run("compare", *files, "--fail-if-slower", margin, "--format", "markdown")
        assert (status, out[:9]) == (expected, "## Plans\n"), err
        assert ("1.json is slower than 0.json" in err) is bool(expected)
    replace(plan, fingerprint="other").save("other.json")
    assert run("compare", "0.json", "other.json", "--fail-if-slower", "1")[0] == 2
    assert run("compare", "0.json", "--fail-if-slower", "1000")[0] == 0
    quick = Alternative("quick", plan.mesh, replace(plan.prediction, step_s=0.5 * plan.prediction.step_s), fits=True)
    assert slower({"a": replace(plan, alternatives=(quick,))}, 0.1).startswith("a is slower than quick, ")
    assert not slower({"a": replace(plan, alternatives=(replace(quick, fits=False),))}, 0.1)
