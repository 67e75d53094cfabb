"""Answers to questions about a plan are kept, and shown on its page; what is none, or of another plan, is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.browser import browser, opened
from shardwright.asking import why_not
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.reports.answer import Answer
from shardwright.reports.shown import Shown
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.view.page import page
from tests.search.graphs import cluster, every_choice, mlp
from tests.shardwright.command import Run

NET = """
import torch


class Net(torch.nn.Linear):
    def forward(self, input):
        return super().forward(input).square().mean()


def make():
    return Net(64, 64), {"input": torch.randn(8, 64)}
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Planner(cluster(2), every_choice).plan(mlp(), "Net")


def test_what_is_kept_is_what_was_printed(plan: Plan, tmp_path: Path) -> None:
    report = why_not(plan, "ddp")
    Answer.of(report, plan).save(tmp_path / "a.json")
    kept, shown = Answer.load(tmp_path / "a.json"), Shown.of_plan(plan)
    kept.check(shown.facts)
    assert list(map(str, kept.paragraphs)) == list(map(str, report.paragraphs()))
    assert '"answers":[]' in page(shown)
    if browser() is None:
        pytest.skip("no Chromium to lay the page out: `make browser` installs it")
    script = 'const answer = document.getElementById("answers").innerText'
    answer, console = opened(page(shown, answers=[kept]), tmp_path, script)
    assert console == []
    (told,) = report.paragraphs()
    for text in (told.title, *told.lines, *(cell for row in told.rows for cell in row)):
        assert text.strip() in answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "shardwright-profile"}, "another format or version"),
        ({"version": 2}, "another format or version"),
        ({"step_s": "soon"}, "could not convert"),
        ({"paragraphs": [{"title": "x", "more": 1}]}, "unexpected keyword"),
        ({"paragraphs": [{"title": 1}]}, "AttributeError"),
        ({"paragraphs": [{"title": "x", "columns": ["a"], "rows": [["1", "2"]]}]}, "a row is not as long"),
        ({"paragraphs": [{"title": "x", "columns": [1], "rows": []}]}, "what should be text is not"),
        ({"paragraphs": 3}, "not iterable"),
    ],
)
def test_what_is_no_answer(plan: Plan, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    own = tmp_path / "a.json"
    Answer.of(why_not(plan, "ddp"), plan).save(own)
    own.write_text(json.dumps(json.loads(own.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(PlanError, match=f"this is not an answer .*{message}.*ask again"):
        Answer.load(own)
    own.write_text("[1]", encoding="utf-8")
    with pytest.raises(PlanError, match="this is not an answer"):
        Answer.load(own)


def test_the_answer_of_another_plan_is_refused(plan: Plan) -> None:
    other = Planner(cluster(2), every_choice).plan(mlp(), "Net", mesh=Mesh.of(mb=2, dp=2), roles=("data",))
    with pytest.raises(PlanError, match=r"the answer is about a plan of Net on mesh .* ask about this plan"):
        Answer.of(why_not(plan, "ddp"), plan).check(Shown.of_plan(other).facts)


def test_from_the_question_to_the_page(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    assert run("plan", "net.py:make", "--cluster", "local:2", "-o", "plan.json")[0] == 0
    status, _, err = run("explain", "plan.json", "--what-if", "bandwidth=0.5x", "-o", "if.json")
    assert status == 0
    assert "shardwright view plan.json --answer if.json" in err
    assert run("explain", "plan.json", "--why-not", "ddp", "-o", "not.json")[0] == 0
    assert run("view", "plan.json", "--answer", "if.json", "--answer", "not.json")[0] == 0
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert '"title":"What if bandwidth=0.5x"' in text
    assert '"title":"Why not data parallel"' in text
    before = (tmp_path / "plan.json").read_bytes()
    status, _, err = run("explain", "plan.json", "--why-not", "ddp", "-o", "plan.json")
    assert status == 2
    assert "this is the plan file, which the answer would replace" in err
    status, _, err = run("explain", "plan.json", "-o", "what.json")
    assert status == 2
    assert "-o keeps an answer of --why-not or --what-if" in err
    assert (tmp_path / "plan.json").read_bytes() == before
    assert not (tmp_path / "what.json").exists()
