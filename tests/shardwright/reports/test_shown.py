"""What is shown of a plan file is worked out once, and is then that of no other file and no other Shardwright."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS
from shardwright.reports import shown
from shardwright.reports.facts import PlanFacts
from shardwright.reports.plan import PlanReport
from shardwright.reports.shown import Shown
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from shardwright.view.page import page
from tests.search.graphs import blocks, cluster, every_choice


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Planner(cluster(2), every_choice).plan(blocks(), "Net", mesh=Mesh.of(dp=2), roles=("data",))


@pytest.fixture
def file(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan file, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models of plans whose facts were worked out."""
    found, own = list[str](), Shown.of

    def of(facts: PlanFacts) -> Shown:
        found.append(facts.plan.model)
        return own(facts)

    monkeypatch.setattr(Shown, "of", of)
    return found


def test_it_is_worked_out_once_and_is_the_same_each_time(file: Path, worked_out: list[str]) -> None:
    first, again = Shown.load(file), Shown.load(file)
    assert worked_out == ["Net"]
    assert str(first) == str(again)
    assert json.dumps(first.facts) == json.dumps(again.facts)
    assert page(first) == page(again)


def test_it_says_what_the_report_of_the_plan_says(plan: Plan, file: Path) -> None:
    Shown.load(file)
    kept = Shown.load(file)
    for depth in (None, 1, 2, 3, 99):
        assert str(kept.at(depth)) == str(PlanReport(plan, depth)), depth
    assert page(kept) == page(plan)


def test_another_file_another_source_or_a_damaged_one_is_worked_out_anew(
    file: Path, worked_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage() -> None:
        for kept in (file.parent / "cache/shardwright/shown").iterdir():
            kept.write_text(kept.read_text()[:-9])

    changes: list[Callable[[], object]] = [
        lambda: file.write_text(file.read_text().replace('"Net"', '"Other"')),
        lambda: monkeypatch.setattr(shown, "_source", lambda: b"another"),
        damage,
    ]
    Shown.load(file)
    for number, change in enumerate(changes, 2):
        change()
        for _ in range(2):
            assert Shown.load(file).facts["model"] == "Other"
        assert len(worked_out) == number


def test_a_file_that_is_replaced_meanwhile_is_not_taken_for_the_old_one(
    file: Path, worked_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, own = file.read_text(), Shown.of_plan
    new = old.replace('"Net"', '"Other"')

    def slowly(plan: Plan) -> Shown:
        file.write_text(new)
        return own(plan)

    monkeypatch.setattr(Shown, "of_plan", slowly)
    assert Shown.load(file).facts["model"] == "Net"
    assert Shown.load(file).facts["model"] == "Other"
    file.write_text(old)
    assert Shown.load(file).facts["model"] == "Net"
    assert worked_out == ["Net", "Other"]


def test_nothing_is_kept_of_what_the_file_alone_does_not_say(
    file: Path, worked_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads a plan with an operator of the user's own is told that there is none, whatever was shown before."""
    for name, row in (("own", ROWS["relu"]), ("relu", replace(ROWS["relu"], flops_per_element=9))):
        with monkeypatch.context() as own:
            own.setitem(ROWS, name, row)
            Shown.load(file)
    assert worked_out == ["Net", "Net"]
    Shown.load(file)
    Shown.load(file)
    assert worked_out == ["Net"] * 3


def test_old_ones_go_and_a_folder_that_cannot_be_written_is_no_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = file.parent / "cache/shardwright/shown"
    folder.mkdir(parents=True)
    monkeypatch.setattr(shown, "MOST_KEPT", 3)
    for number in range(5):
        (folder / f"{number}.json").touch()
        os.utime(folder / f"{number}.json", (number, number))
    Shown.load(file)
    assert {"3.json", "4.json"} < {kept.name for kept in folder.iterdir()}
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert Shown.load(file).facts["model"] == "Net"
    with pytest.raises(PlanError, match="cannot read the plan"):
        Shown.load(file.with_name("nowhere.json"))
