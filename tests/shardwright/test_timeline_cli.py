"""`shardwright timeline`: every way to run a plan by an option of its own, and what it shows."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from shardwright.cli.timeline import timeline as command
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.pcg.step.execution import Execution
from shardwright.reports.timeline import TimelineReport, moved, plan_timeline
from shardwright.search.plan import Plan, SearchReport
from tests.cost.programs import planned
from tests.each import each
from tests.shardwright.command import Run

GPUS = "preset:dgx-h100:2"


@pytest.fixture(autouse=True)
def plan(run: Run) -> Plan:
    """Of eight blocks on four GPUs, in plan.json."""
    graph, cluster = planned("data", 8), Cluster.preset("dgx-h100", 1, 4)
    found = Plan(graph, cluster, "Net", "0" * 16, predict(graph, cluster), (), SearchReport(0.0, 1, 0.0, 72 * 10**9))
    found.save("plan.json")
    return found


def shown(run: Run, *options: str) -> str:
    status, out, err = run("timeline", "plan.json", *options)
    assert (status, err) == (0, "")
    return out


WAYS: list[tuple[tuple[str, ...], Execution]] = [
    ((), Execution()),
    (("--microbatches", "3"), Execution.of(num_microbatches=3)),
    *((("--precision", p), Execution(precision=p)) for p in ("fp32", "tf32", "amp_bf16", "amp_fp16", "fp16", "fp8")),
    (("--precision", "bf16-mixed"), Execution(precision="amp_bf16")),
    (("--reduce-dtype", "bf16"), Execution(reduce_dtype="bfloat16")),
    (("--encodings", "weights=fp8,gradients=int4"), Execution(encodings=(("weights", "fp8"), ("gradients", "int4")))),
    (("--encodings", "exact"), Execution()),
    (("--compiled",), Execution.of(compiled=True)),
    (("--recompute", "full"), Execution(recompute="full")),
    (("--offload",), Execution.of(offload="full")),
    (("--optimizer", "sgd"), Execution.of(optimizer="sgd")),
    (("--shard-optimizer",), Execution.of(shard_optimizer=True)),
    (("--stages", "4"), Execution.of(num_stages=4)),
    (("--stages", "2", "--microbatches", "4", "--schedule", "zero-bubble"),
     Execution.of(num_stages=2, num_microbatches=4, schedule="zero-bubble")),
    (("--stages", "2", "--microbatches", "4", "--schedule", "interleaved", "--chunks", "2"),
     Execution.of(num_stages=2, num_microbatches=4, schedule="interleaved", chunks_per_stage=2)),
    (("--no-overlap",), Execution.of(overlap=False)),
    (("--late-gathers",), Execution.of(late_gathers=True)),
    (("--stage-sizes", "2,4"), Execution.of(num_stages=2, stage_sizes=(2, 4))),
]  # fmt: skip


@each(("options", "execution"), WAYS, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_an_option_is_a_field(run: Run, plan: Plan, options: tuple[str, ...], execution: Execution) -> None:
    expected = plan_timeline(moved(plan, Cluster.preset("dgx-h100", 2)), execution)
    found = json.loads(shown(run, *options, "--cluster", GPUS, "--format", "json"))
    assert found == json.loads(json.dumps(TimelineReport(plan, expected).data()))
    assert len(found["stages"]) == execution.schedule.num_stages


def test_every_field_has_an_option() -> None:
    parameters = {parameter.name for parameter in command.params}
    without = {"per_microbatch", "split", "recompute_by_stage"}  # no time; the best; a plan says it by block
    assert Execution().by_field().keys() - without <= parameters


def test_without_a_cluster_it_is_the_plan_s_own(run: Run, plan: Plan) -> None:
    found = json.loads(shown(run, "--format", "json"))
    assert found["step_s"] == plan.prediction.step_s


def test_one_stage_has_no_table_of_stages(run: Run) -> None:
    out = shown(run)
    assert out.startswith("Timeline of Net on dgx-h100, mesh [x=4]\n  step ")
    assert "Stages" not in out
    assert "\nStreams\n" in out
    assert "\nMemory at the peak\n" in out


def test_several_stages_have_one(run: Run) -> None:
    out = shown(run, "--cluster", "preset:dgx-h100:4", "--stages", "4", "--microbatches", "8")
    title = "Timeline of Net on dgx-h100, mesh [x=4] for each of 4 stages; 16 of 32 devices in use\n"
    assert out.startswith(title)
    header, *rows = out.split("\nStages\n")[1].split("\n\n")[0].splitlines()
    assert re.split(r"\s{2,}", header.strip()) == [
        "stage", "compute", "exposed", "bubble", "of the step", "peak memory", "at the peak",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert all("backward of microbatch" in row or "forward of microbatch" in row for row in rows)
    assert re.search(r"\nStreams of stage [0-3]\n", out)
    assert re.search(r"\nMemory of stage [0-3] at the peak\n", out)


def test_a_smaller_device_has_its_own_limit(run: Run) -> None:
    """The limit is that of the cluster that was asked for, not that of the plan's search."""
    gpus = Cluster.preset("dgx-h100", 1, 4)
    data: Any = gpus.to_json()
    data["device"]["memory_bytes"] = gpus.device.context_bytes + 1
    Cluster.from_json(data).save("small.json")
    assert "DOES NOT FIT, the limit is 540 MB" in shown(run, "--cluster", "small.json")
    assert "DOES NOT FIT" not in shown(run)


@each(
    ("options", "message"),
    [
        (("--chunks", "2"), "--chunks: expected 1 with schedule '1f1b', got 2; change the one or the other"),
        (("--schedule", "interleaved"), "--chunks: expected at least 2 with schedule 'interleaved', got 1; change"),
        (
            ("--schedule", "interleaved", "--chunks", "2", "--stages", "2", "--microbatches", "3"),
            "--microbatches: expected a multiple of the 2 stages, or fewer than them, got 3; interleaving",
        ),
        (
            ("--stages", "2"),
            "2 stages of mesh [x=4] need 8 devices, cluster 'dgx-h100' has 4; choose fewer stages or a larger cluster",
        ),
        (
            ("--cluster", "local:2"),
            "mesh [x=4] needs 4 devices, cluster 'local-2' has 2; choose a larger cluster",
        ),
        (("--stage-sizes", "4,x"), "--stage-sizes '4,x': expected a number of devices for each stage, such as 2,1"),
        (
            ("--stage-sizes", "4,2", "--stages", "3"),
            "--stage-sizes: expected a number of devices for each of the 3 stages, got (4, 2); give one for each",
        ),
        (("--stage-sizes", "4,2"), "stages of meshes [x=4] and [x=2] need 6 devices, cluster 'dgx-h100' has 4; choose"),
        (("--stages", "0"), "Invalid value for '--stages': 0 is not in the range x>=1."),
        (("--stages", "16", "--cluster", "preset:dgx-h100:8"), "16 virtual stages, but the model has only 10 sections"),
        (("--offload", "--cluster", "local:4"), "offload: device "),
        (("--precision", "fp4"), "--precision: expected one of 'fp32', 'tf32', "),
        (("--cluster", "nowhere"), "--cluster 'nowhere' is no cluster: give local:N, preset:NAME[:NODES[:GPUS]]"),
    ],
)
def test_what_does_not_go_together_is_told_by_the_options_names(
    run: Run, options: tuple[str, ...], message: str
) -> None:
    status, out, err = run("timeline", "plan.json", *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}")
