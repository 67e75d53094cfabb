"""Plan files: they round-trip, and every way in which one can be wrong has its message."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.optimizers import OPTIMIZERS
from shardwright.search.plan import Plan, fingerprint
from shardwright.search.request.restrict import ROLES
from shardwright.search.tree.planner import Planner
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


def test_a_plan_may_be_asked_for_with_any_role(plan: Plan) -> None:
    for role in ROLES:
        asked = replace(plan.asked, mesh=plan.mesh, roles=(role,) * len(plan.mesh.names))
        assert Plan.from_json(replace(plan, asked=asked).to_json()).asked.roles == asked.roles


def test_a_plan_keeps_the_optimizer_whose_states_it_predicts(plan: Plan) -> None:
    for name in OPTIMIZERS:
        small = replace(plan, execution=Execution.of(optimizer=name))
        assert small.to_json()["execution"] == ({} if name == "adam" else {"optimizer": name})
        assert Plan.from_json(small.to_json()).execution == small.execution
    with pytest.raises(PlanError, match=r"execution\.optimizer"):
        Plan.from_json(edit(plan, execution={"optimizer": "lamb"}))


def test_a_plan_keeps_its_precision_and_old_files_may_have_one(plan: Plan) -> None:
    sent = replace(plan, execution=Execution(reduce_dtype="bfloat16"))
    assert sent.to_json()["execution"] == {"reduce_dtype": "bfloat16"}
    assert Plan.from_json(json.loads(json.dumps(sent.to_json()))) == sent
    with pytest.raises(PlanError, match=r"execution\.reduce_dtype"):
        Plan.from_json(edit(plan, execution={"reduce_dtype": "int8"}))
    encoded = replace(plan, execution=Execution(encodings={"gradients": "int4"}))  # pyright: ignore[reportArgumentType]
    assert encoded.to_json()["execution"] == {"encodings": {"gradients": "int4"}}
    assert Plan.from_json(json.loads(json.dumps(encoded.to_json()))) == encoded
    with pytest.raises(PlanError, match=r"execution\.encodings"):
        Plan.from_json(edit(plan, execution={"encodings": {"weights": "int4"}}))
    mixed = replace(plan, execution=Execution("amp_bf16"))
    assert Plan.from_json(json.loads(json.dumps(mixed.to_json()))) == mixed
    by_module = replace(plan, execution=Execution({"head": "fp32", "*": "amp_bf16"}))
    assert (
        by_module.to_json()["execution"]
        == {"precision": {"head": "fp32", "*": "amp_bf16"}}
        == {"precision": by_module.precision}
    )
    assert Plan.from_json(json.loads(json.dumps(by_module.to_json()))) == by_module
    for wrong, problem in (
        ({"head": "fp8"}, r"execution\.precision"), ({"": "fp32"}, r"execution\.precision"),
        ({"*": "fp32", "head": "amp_bf16"}, r"precision\['\*'\]: it fits every module"), ({}, "precision: expected"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=problem):
            Plan.from_json(edit(plan, execution={"precision": wrong}))
    old: dict[str, Any] = edit(plan, version=2)
    del old["execution"]
    for told in (old, *old["alternatives"]):
        del told["prediction"]["device_bytes"]
    assert Plan.from_json(old) == plan
    assert Plan.from_json({**old, "precision": "amp_bf16"}) == mixed


def test_a_plan_shows_itself_in_two_lines(plan: Plan) -> None:
    assert repr(plan) == (
        "Plan(Mlp on test, 4 devices, mesh [x=4]:\n     step 536 µs, 311 kB of 17.2 GB on each device)"
    )


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
        ({"graph": ["mesh [x=4]", "outputs"]}, "outputs: expected the loss and buffers, each once, got []"),
        ({"prediction": {}}, "is missing; the file may have been edited or cut, make the plan again"),
        ({"report": 3}, "report: expected an object, got 3; the file may have been edited or cut, make the plan again"),
        ({"cluster": {}}, "cluster"),
        ({"execution": {"num_microbatches": 4}}, "execution: field 'num_microbatches' is not known"),
        ({"graph": ["mesh [x=4]", "outputs loss=%x"]}, "%x is not defined above"),
        ({"mesh": {"names": ["x"], "sizes": [2]}}, "mesh: expected [x=4], as the graph has it, got [x=2]"),
        ({"model": "a\x1b[2J"}, "model: expected text of at least one letter, without control characters, got 'a\\x1b"),
        ({"fingerprint": "x"}, "fingerprint: expected a digest of 16 hexadecimal digits, got 'x'"),
        ({"more": 1}, "the file: field 'more' is not known"),
        ({"version": True}, "plan version True is not supported"),
        ({"version": 2, "precision": "half"}, "precision: expected one of None, 'fp32',"),
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


@each(
    ("path", "value", "message"),
    [
        (("prediction", "step_s"), math.nan, "prediction.step_s: expected a number, got nan"),
        (("prediction", "step_s"), -1, "prediction.step_s: expected at least 0, got -1"),
        (("prediction", "step_s"), "fast", "prediction.step_s: expected a number, got 'fast'"),
        (("prediction", "step_s"), 1e-9, "prediction.step_s: expected at least "),
        (("alternatives", 0, "prediction", "step_s"), 1e-9, "alternatives[0].prediction.step_s: expected at least "),
        (("prediction", "serial_s"), 1.0, "its parts together, got 1.0"),
        (("report", "bound_s"), 1e9, "report.bound_s: expected at most "),
        (("prediction", "memory", "slack_bytes"), None, "memory.slack_bytes: expected an integer, got None"),
        (("alternatives", 0, "mesh"), {"dp": 2}, "alternatives[0].mesh: [dp=2] has 2 devices, the cluster 4"),
        (("alternatives", 0, "mesh"), {"class": 4}, "axis name 'class' is not an identifier"),
        (("cluster", "device"), 3, "cluster: device: expected an object"),
        (("report", "limit_bytes"), True, "report.limit_bytes: expected an integer, got True"),
        (("graph", -2), lambda line: line.replace("=False", "=3"), "'keepdim': expected True or False, got 3"),
        (("graph", -2), lambda line: line.replace("keepdim=False", "keep=0"), "attribute 'keepdim' is missing"),
        (("graph", 1), lambda line: line.replace("(64, 64)", "(64, -64)"), "size -64"),
        (("graph", 1), lambda line: line.replace("'x'", "'x..y'"), "expected the name of a tensor, got 'x..y'"),
        (("graph", -1), "outputs x=%t_7x", "outputs: expected the loss and buffers, each once, got ['x']"),
        (("graph", -1), "outputs loss=%t_6x", "outputs: the loss is float32[64, 64]{R}, expected one number"),
        (("graph", 3), lambda line: line.replace("layers.0.down", "layers.0.up"), "parameter 'layers.0.up' is there 2"),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other_are_refused(
    plan: Plan, path: tuple[str | int, ...], value: object, message: str
) -> None:
    data: Any = edit(plan)
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value(inner[path[-1]]) if callable(value) else value
    with pytest.raises(PlanError) as error:
        Plan.from_json(data, "plan.json")
    assert message in str(error.value)
    assert str(error.value).endswith("the file may have been edited or cut, make the plan again")


def test_what_a_timeline_leaves_out_is_no_contradiction(plan: Plan) -> None:
    """Casts of weights are listed with operators, and the timeline has none: a step may be a little less than both."""
    data, own = plan.to_json(), plan.prediction
    parts_s = own.compute_s + own.optimizer_s + own.exposed_s + own.bubble_s
    data["prediction"]["step_s"] = parts_s - 0.04 * own.compute_s
    assert Plan.from_json(data).prediction.step_s < parts_s


def test_the_documentation_names_every_field(plan: Plan) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    assert not [name for name in plan.to_json() if f"`{name}`" not in page]
