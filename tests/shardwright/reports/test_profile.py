"""What was measured beside what is predicted: by kind, by block and one by one; whose profile it is; a real one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.cli.measured import by_place
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.reports.facts import PlanFacts
from shardwright.reports.profile import ELSEWHERE, OPTIMIZER, PARAMETERS, Profile, ProfileReport, kind_of
from shardwright.search.plan import Plan
from shardwright.search.tree.planner import Planner
from tests.search.graphs import blocks, cluster, every_choice
from tests.shardwright.command import Run
from tests.shardwright.page import text_of


@pytest.fixture(scope="module")
def facts() -> PlanFacts:
    found = Planner(cluster(2), every_choice).plan(blocks(), "Net", mesh=Mesh.of(tp=2), roles=("tensor",))
    return PlanFacts(found)


def profile(plan: Plan, *parts: tuple[str, str, str, float]) -> Profile:
    return Profile(plan.model, plan.fingerprint, str(plan.mesh), "cpu", "2", 2, 5, 0.5, 1.0, parts)


def test_a_profile_of_the_prediction_itself_is_off_nowhere(facts: PlanFacts) -> None:
    """All that is predicted is laid over something, and adds up to what the timeline has."""
    nothing = ProfileReport(facts, profile(facts.plan))
    assert {row.name for row in nothing.kinds} > {"linear", "relu", "communication: reduce", OPTIMIZER}
    parts = [(block, f":{place}", "forward", s) for (block, place), s in nothing._predicted.items()]
    same = ProfileReport(facts, profile(facts.plan, *parts))
    for rows in (same.kinds, same.blocks, same.places):
        assert rows
        assert all(row.measured_s == pytest.approx(row.predicted_s) for row in rows)
    stage = facts.timeline.busiest
    total_s = sum(t.seconds for place in stage.placed for t in place.timeline.segment.tasks_in_all())
    assert sum(row.predicted_s for row in nothing.kinds) == pytest.approx(total_s)


def test_what_runs_as_one_is_compared_with_all_of_it_and_the_worst_is_first(facts: PlanFacts) -> None:
    predicted = ProfileReport(facts, profile(facts.plan))._predicted
    (block, first), (_, second) = [key for key in predicted if key[0] == "layers.1" and ":" in key[1]][:2]
    both_s = predicted[block, first] + predicted[block, second]
    parts = [
        (block, f"{first} {second}", "forward", 1.0),
        (block, f"{first} {second}", "backward", 2.0),
        ("", ELSEWHERE, "forward", 9.0),
    ]
    report = ProfileReport(facts, profile(facts.plan, *parts))
    own = next(both for where, both in report._one_by_one if where == block and both.measured_s)
    assert (own.measured_s, own.predicted_s) == (3.0, pytest.approx(both_s))
    assert report.kinds[0].name == ELSEWHERE
    assert ProfileReport(facts, profile(facts.plan, (block, first, "forward", 0.25), parts[-1])).covered == 0.25
    assert [row.off_s for row in report.kinds] == sorted((row.off_s for row in report.kinds), key=abs, reverse=True)
    assert "measured 500 ms" in str(report)
    assert json.loads(json.dumps(report.data()))["kinds"][0]["measured_s"] == 9.0


def test_kinds() -> None:
    found = map(kind_of, ("attn.c_attn:matmul#2", "mlp.up:linear/reduce#3", ":constant_pad", OPTIMIZER, PARAMETERS))
    assert list(found) == ["matmul", "communication: reduce", "pad", OPTIMIZER, f"communication: {PARAMETERS}"]


def test_events_are_told_by_the_marks_around_them_and_backward_by_numbers() -> None:
    def event(name: str, us: float, parent: Any = None, number: int = -1) -> Any:
        return SimpleNamespace(name=name, self_cpu_time_total=us, self_device_time_total=0.0, cpu_parent=parent,
                               sequence_nr=number, device_type=SimpleNamespace(name="CPU"))  # fmt: skip

    engine = "autograd::engine::evaluate_function: MmBackward0"
    block = event("shardwright block layers.3", 1)
    mark = event("shardwright mlp:matmul", 2, block)
    product = event("aten::mm", 4, mark, 7)
    back = event(engine, 8, None, 7)
    remade = event("shardwright norm:rms_norm", 16, back)
    optimizer = event("aten::add_", 32, event("Optimizer.step#Adam.step", 64))
    lost, sent = event(engine, 128, None, 9), event("c10d::allreduce_", 256)
    events = [
        block,
        mark,
        product,
        back,
        event("aten::mm", 512, back, 8),
        remade,
        optimizer.cpu_parent,
        optimizer,
        lost,
        sent,
    ]
    assert by_place(events, cuda=False) == {
        ("layers.3", ELSEWHERE, "forward"): 1,
        ("layers.3", "mlp:matmul", "forward"): 6,
        ("layers.3", "mlp:matmul", "backward"): 520,
        ("layers.3", "norm:rms_norm", "again"): 16,
        ("", OPTIMIZER, "step"): 96,
        ("", ELSEWHERE, "backward"): 128,
        ("", PARAMETERS, "forward"): 256,
    }


def test_a_file_of_another_plan_or_none_is_refused(facts: PlanFacts, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    own = profile(facts.plan, ("", OPTIMIZER, "step", 1e-3))
    own.save(file)
    assert Profile.load(file) == own
    with pytest.raises(PlanError, match="profile this plan"):
        ProfileReport(facts, replace(own, fingerprint="other"))
    data = json.loads(file.read_text())
    part = ["", OPTIMIZER, "step"]
    for field, value in [
        ("parts", [[*part, -1]]), ("parts", [[*part, float("inf")]]), ("parts", [[*part, True]]), ("parts", [part]),
        ("parts", "none"), ("step_s", "1"), ("step_s", -1), ("profiled_step_s", float("nan")), ("num_ranks", None),
        ("num_steps", True), ("num_steps", 1.5), ("device", 1), ("version", 9),
    ]:  # fmt: skip
        file.write_text(json.dumps({**data, field: value}))
        with pytest.raises(PlanError, match=r"field|is not a profile"):
            Profile.load(file)
    file.write_text("{")
    with pytest.raises(PlanError, match="not a complete JSON file"):
        Profile.load(file)


@pytest.mark.usefixtures("forked")
def test_two_ranks_are_profiled_and_the_page_shows_it(run: Run) -> None:
    assert (
        run("plan", "models.py:net", "--cluster", "local:2", "--mesh", "tp=2", "--roles", "tensor", "-o", "plan.json")[
            0
        ]
        == 0
    )
    status, out, err = run("profile", "plan.json", "models.py:net", "--steps", "2", "--format", "json")
    assert status == 0, err
    found = json.loads(out)
    measured = {row["name"]: row["measured_s"] for row in found["kinds"]}
    assert all(measured[name] > 0 for name in ("linear", "relu", OPTIMIZER)), measured
    assert found["step"]["measured_s"] > 0
    assert "--profile plan.profile.json" in err
    assert run("view", "plan.json", "--profile", "plan.profile.json")[0] == 0
    assert '"measured_s"' in Path("plan.html").read_text()
    assert run("view", "plan.json")[0] == 0
    assert '"measured_s"' not in Path("plan.html").read_text()


def test_the_page_lists_it(facts: PlanFacts, tmp_path: Path) -> None:
    data = ProfileReport(facts, profile(facts.plan, ("", OPTIMIZER, "step", 1.0))).data()
    text = text_of(facts.plan, tmp_path, profile=data)
    assert "Predicted against measured" in text
    assert "+" in text
    assert "Predicted against measured" not in text_of(facts.plan, tmp_path)
