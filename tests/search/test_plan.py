"""Plan files: they round-trip, and every way in which one can be wrong has its message."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.execution import Execution
from shardwright.search.plan import Plan, fingerprint
from shardwright.search.planner import Planner
from tests.each import each
from tests.search.graphs import cluster, every_choice, mlp


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Planner(cluster(4, link_bytes_per_s=1e11), every_choice).plan(mlp(64, 64, 256), "Mlp")


def test_a_saved_plan_is_the_same_plan(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert [str(n.source) for n in loaded.graph.nodes] == [str(n.source) for n in plan.graph.nodes]


def test_a_plan_keeps_its_precision_and_old_files_may_have_one(plan: Plan) -> None:
    mixed = replace(plan, execution=Execution("amp_bf16"))
    assert Plan.from_json(json.loads(json.dumps(mixed.to_json()))) == mixed
    old = edit(plan, version=2)
    del old["execution"]
    assert Plan.from_json(old) == plan
    assert Plan.from_json({**old, "precision": "amp_bf16"}) == mixed


def test_the_fingerprint_sees_sizes_and_wiring_only() -> None:
    assert fingerprint(mlp()) == fingerprint(mlp())
    assert fingerprint(mlp()) != fingerprint(mlp(hidden=64))


def edit(plan: Plan, **fields: object) -> dict[str, object]:
    return {**json.loads(json.dumps(plan.to_json())), **fields}


@each(
    ("fields", "message"),
    [
        (
            {"version": 99},
            "plan version 99 is not supported, this Shardwright reads versions 2 and 3; make the plan again",
        ),
        ({"format": "other"}, "this is not a plan; expected a JSON object with format 'shardwright-plan'"),
        ({"graph": ["mesh [x=4]", "%x = inputt()", "outputs loss=%x"]}, "inputt"),
        ({"graph": ["mesh [x=4]", "outputs"]}, "its graph gives no loss; the file may have been edited"),
        ({"prediction": {}}, "is missing; the file may have been edited or cut, make the plan again"),
        ({"report": 3}, "the file may have been edited, make the plan again"),
        ({"cluster": {}}, "cluster"),
        ({"execution": {"num_microbatches": 4}}, "'num_microbatches' can be costed, but is not part of a plan"),
        ({"version": 2, "precision": "half"}, "Execution.precision: expected"),
    ],
)
def test_wrong_plans_are_refused(plan: Plan, fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_json(edit(plan, **fields), "plan.json")
    assert message in str(error.value)
    assert str(error.value).startswith("plan.json")


def test_a_truncated_file_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(path.read_text()[:1000])
    with pytest.raises(
        PlanError, match=r"plan\.json: not a complete JSON file .* it may have been cut, make the plan again"
    ):
        Plan.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.json: cannot read the plan: No such file"):
        Plan.load(tmp_path / "none.json")


def test_saving_where_one_cannot_leaves_nothing(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot write the plan"):
        plan.save(tmp_path / "no" / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_another_cluster_size_is_refused(plan: Plan) -> None:
    smaller = edit(plan, cluster=cluster(2).to_json())
    with pytest.raises(PlanError, match="has 4 devices, its cluster 2"):
        Plan.from_json(smaller, "plan.json")
