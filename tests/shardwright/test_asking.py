"""Why not, and what if: another search of a plan's own graph, and what is said of the two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.api import plan as best
from shardwright.asking import resized, what_if, why_not
from shardwright.cost.clusters.cluster import Cluster, Level
from shardwright.pcg.errors import ClusterError, PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.planning import certified_choices
from shardwright.reports.asking import WhatIfReport, WhyNotReport
from shardwright.reports.exposed import exposed_by_kind
from shardwright.reports.facts import PlanFacts
from shardwright.search.plan import Idle, Plan
from shardwright.search.request.options import SearchOptions
from shardwright.search.request.spaces import batch_size, sequence_length
from shardwright.search.tree.planner import Planner
from tests.each import each
from tests.search.graphs import blocks, cluster, mlp
from tests.shardwright.command import Run

GRAPH = blocks(16, 64, layers=2, seq=16)
MACHINES = replace(
    cluster(4), levels=(Level("link", 2, 1e10, 1e-6, "host"), Level("network", 2, 1e9, 1e-6))
)  # fmt: skip


def planned(where: Cluster = MACHINES, **guide: Any) -> Plan:
    planner = Planner(where, certified_choices(), rules=certified_choices().by_name())
    return planner.plan(GRAPH, recompute="none", microbatches=1, **guide)


PLAN = planned()


@each("memory_bytes", [2**34, 14 * 2**20, 11 * 2**20])
def test_why_not_says_what_the_plan_was_compared_with(memory_bytes: int) -> None:
    """By hand is by hand: the same step, to what an estimate of equal blocks is off."""
    graph = blocks(64, 128, layers=4, seq=32)
    where = replace(MACHINES, device=replace(MACHINES.device, memory_bytes=memory_bytes))
    plan = Planner(where, certified_choices(), rules=certified_choices().by_name()).plan(graph, "Net")
    listed = {own.name: own for own in plan.alternatives}
    for name, title in (("ddp", "data parallel"), ("fsdp", "ZeRO-3"), ("zero-2", "ZeRO-2")):
        if title in listed and listed[title].fits:
            other = why_not(plan, name).other
            assert other is not None
            assert other.prediction.step_s == pytest.approx(listed[title].prediction.step_s, rel=5e-3), title
    assert any(own.fits for own in plan.alternatives)


def kept(plan: Plan | None) -> set[str]:
    """How parameters are kept, on any axis."""
    assert plan is not None
    return {how for own in PlanFacts(plan).storage.values() for how in own}


def test_why_not_searches_the_strategy_alone() -> None:
    """Each as it is called, and none faster than the plan."""
    found = {name: why_not(PLAN, name) for name in ("ddp", "zero-2", "fsdp", "hsdp", "tp", "sp", "ulysses", "ring")}
    plans = {name: report.other for name, report in found.items() if report.other is not None}
    assert len(plans) == len(found)
    assert min(p.prediction.step_s for p in plans.values()) >= PLAN.prediction.step_s * (1 - 1e-3)
    assert {p.fingerprint for p in plans.values()} == {PLAN.fingerprint}
    assert kept(plans["ddp"]) == {"whole"}
    assert kept(plans["fsdp"]) == {"gathered"}
    assert plans["hsdp"].mesh.names[-2:] == ("dp", "zero")
    assert "sharded" in kept(plans["tp"])
    assert plans["sp"].mesh.names[-1] == "cp"
    assert (plans["ulysses"].mesh.names[-1], plans["ring"].mesh.names[-1]) == ("sp", "cp")
    assert found["tp"].title == why_not(PLAN, "tensor parallel").title == "tensor parallel"


def test_what_is_said_of_a_strategy() -> None:
    report = why_not(PLAN, "tp")
    assert report.other is not None
    text = str(report)
    assert text.startswith("Why not tensor parallel\n")
    assert "slower: a step of" in text
    for row in (
        "  step  ",
        "    compute  ",
        "    exposed communication  ",
        "      of gradients  ",
        "  memory  ",
        "  mesh  ",
    ):
        assert f"\n{row}" in text, row
    data = report.data()
    assert data["plan"]["prediction"] == PLAN.prediction.to_json()
    for plan in (PLAN, report.other):
        assert sum(exposed_by_kind(plan).values()) == pytest.approx(plan.prediction.exposed_s)
    assert data["other"]["exposed"]["activations"] > 0


def test_verdicts() -> None:
    """Each case is one that the search gave, or the same with another prediction."""
    faster, slower = PLAN, replace(PLAN, prediction=replace(PLAN.prediction, step_s=2 * PLAN.prediction.step_s))
    asked = replace(slower, asked=SearchOptions(pins=("no tensor",)))
    large = replace(PLAN, report=replace(PLAN.report, limit_bytes=10**5))
    assert WhyNotReport(PLAN, "it", PLAN).verdict == "as fast as this plan"
    assert WhyNotReport(faster, "it", slower).verdict.startswith("2.0 × slower: a step of ")
    assert WhyNotReport(slower, "it", faster).verdict.startswith("2.0 × faster: a step of ")
    assert WhyNotReport(asked, "it", faster).verdict.endswith("; this plan keeps to what was asked for: no tensor")
    assert WhyNotReport(large, "it", faster).verdict.startswith("it fits, with a step of ")
    unfit = WhyNotReport(PLAN, "it", large).verdict
    assert unfit.startswith("does not fit: the smallest plan found takes ")
    assert unfit.endswith(" more than the 100 kB that may be used")
    count = PLAN.cluster.num_devices
    fewer = str(WhatIfReport(PLAN, replace(PLAN, idle=Idle("it", count, "as it is")), {"memory": "1GB"}))
    assert "50 % fewer examples a second on each device" in fewer
    assert f"not all used: {count} of {2 * count} devices idle: as it is" in fewer
    rewritten = str(WhyNotReport(PLAN, "it", PLAN, rewritten=True))
    assert "both begin from operators that this plan has rewritten" in rewritten


def test_what_cannot_be_run_is_told() -> None:
    flat = why_not(planned(cluster(2)), "hsdp")
    assert str(flat) == (
        "Why not hybrid sharding\n"
        "  cannot be run: it needs several machines of several devices each, which test does not have\n"
    )
    assert flat.data()["other"] is None
    assert why_not(planned(cluster(1)), "ddp").reason == "it needs several devices, which test does not have"
    with pytest.raises(PlanError, match="unknown strategy 'dpp'; choose one of ddp/data, zero-1, "):
        why_not(PLAN, "dpp")


def test_memory_that_was_asked_for_holds_for_strategies_too() -> None:
    limit = PLAN.prediction.memory.total_bytes // 2
    own = why_not(replace(PLAN, asked=SearchOptions(pins=("no tensor", f"memory<={limit}B"))), "ddp")
    assert own.other is not None
    assert own.other.report.limit_bytes == limit
    assert own.verdict.startswith("does not fit: ")


def test_what_if_plans_anew_on_the_changed_cluster() -> None:
    report = what_if(PLAN, nodes=4, bandwidth="0.5x", memory="0.5x", flops="2x")
    where = report.other.cluster
    assert [level.size for level in where.levels] == [2, 4]
    assert [level.bandwidth_bytes_per_s for level in where.levels] == [1e10, 5e8]
    assert where.device.memory_bytes == MACHINES.device.memory_bytes // 2
    assert where.device.flops_per_s["fp32"] == 2 * MACHINES.device.flops_per_s["fp32"]
    assert report.other.prediction == planned(where).prediction
    text = str(report)
    assert text.startswith("What if nodes=4, bandwidth=0.5x, memory=0.5x, flops=2x\n  a step of ")
    for row in ("  devices  ", "  network  ", "  examples/s  ", "    tokens per device  ", "    that may be used  "):
        assert f"\n{row}" in text, row
    assert report.data()["other"]["num_devices"] == 8


def test_what_was_asked_for_holds_but_a_mesh_of_other_devices() -> None:
    plan = planned(mesh=Mesh.of(dp=4), roles=["data"], pins="no tensor")
    same, more = what_if(plan, flops="2x"), what_if(plan, nodes="2x")
    assert same.other.asked == plan.asked
    assert more.other.asked == replace(plan.asked, mesh=None, roles=None)
    told = "mesh [dp=4] was asked for, which is none of 8 devices: now the search chose"
    assert told in str(more)
    assert told not in str(same)


class Tokens(nn.Module):
    """Predicts a token by itself."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, width), nn.Linear(width, 16)

    def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        losses = nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten(), reduction="none")
        return (losses.view_as(ids) * weight).mean()


@pytest.fixture(scope="module")
def tokens() -> Plan:
    return best(Tokens(), cluster(2), (), BATCH)


BATCH = {"ids": torch.zeros(4, 6, dtype=torch.int64), "weight": torch.ones(4, 1)}


def test_another_batch_needs_the_model(tokens: Plan) -> None:
    report = what_if(tokens, Tokens(), (), BATCH, batch="2x", seq=3)
    inputs = [report.other.graph.types[leaf.name].shape for leaf in report.other.graph.leaves("input")]
    assert sorted(inputs) == [(8, 1), (8, 3)]
    assert (batch_size(report.other.graph), sequence_length(report.other.graph)) == (8, 3)
    assert "\n  sequence" in str(report)
    assert "tokens a second on each device" in str(report)
    assert why_not(tokens, "ddp", Tokens(), (), BATCH).other is not None


@each(
    "changes, model, message",
    [
        ({}, None, "what if what? Change at least one of nodes, bandwidth, memory, flops, batch, seq"),
        ({"batch": "2x", "seq": 3}, None, "batch and seq: the plan has the graph of its own batch only; give"),
        ({"batch": "0.3x"}, Tokens, "batch=0.3x: of 4 that would be 1.2; give what makes a whole number"),
        ({"batch": "2x"}, lambda: Tokens(4), "Tokens is not the model that the plan is for: 'embed.weight' is 16"),
    ],
)  # fmt: skip
def test_what_if_it_cannot_be(tokens: Plan, changes: dict[str, Any], model: Any, message: str) -> None:
    with pytest.raises(PlanError if "0.3x" not in str(changes) else ClusterError) as raised:
        what_if(tokens, model and model(), (), BATCH, **changes)
    assert message in str(raised.value)


def test_no_tokens_no_sequence(tokens: Plan) -> None:
    plan = Planner(cluster(2), certified_choices()).plan(mlp(), compared=False)
    with pytest.raises(PlanError, match="seq: no input of the model has token ids of several positions"):
        what_if(plan, seq="2x")
    with pytest.raises(PlanError, match="Tokens with this batch is not what the plan is for; give its own, or none"):
        why_not(tokens, "ddp", Tokens(4), (), BATCH)


def test_several_sizes_grow_together(tokens: Plan) -> None:
    classes = torch.zeros(4, 5, 5, dtype=torch.int64)  # of pixels, which are no sequence
    arguments = (torch.zeros(8, 6, dtype=torch.int64), torch.ones(4), classes, 3.0)
    (ids, weight, classes, option), _ = resized(tokens, arguments, {}, (12, 9))
    assert (ids.shape, weight.shape, classes.shape, option) == ((24, 9), (12,), (12, 5, 5), 3.0)
    with pytest.raises(PlanError, match="batch=6: the inputs have several sizes along dimension 0; give a mul"):
        resized(tokens, arguments, {}, (6, None))


def test_from_the_command_line(run: Run) -> None:
    assert run("plan", "models.py:net", "--cluster", "local:2", "-o", "plan.json", "--pin", "no zero")[0] == 0
    status, out, _ = run("explain", "plan.json", "--why-not", "fsdp")
    assert (status, out.splitlines()[0]) == (0, "Why not ZeRO-3")
    status, out, _ = run("explain", "plan.json", "models.py:net", "--what-if", "memory=8GB,batch=2x")
    assert (status, out.splitlines()[0]) == (0, "What if memory=8GB, batch=2x")
    assert "  asked for       no zero" in run("explain", "plan.json")[1]
    for arguments, message in {
        (
            "--what-if",
            "colour=2x",
        ): "'colour' cannot be changed; choose among nodes, bandwidth, memory, ",
        ("--what-if", "nodes"): "give changes such as nodes=2x,bandwidth=0.5x, each name once",
        ("--what-if", "batch=2x"): "on the command line FILE.py:FUNCTION or --hf-config config.json",
        ("--what-if", "nodes=2x"): "is one machine, and nothing says what would join it to others",
        (
            "--why-not",
            "tp",
            "--find",
            "up",
        ): "--find, --memory, --by-hand, --recompute, --offload, --formula, --why-not and --what-if are questions of "
        "their own",
        ("--why-not", "tp", "--why-not", "fsdp"): "ask one at a time",
        ("--find", "up", "--depth", "2"): "--depth is of the tree of modules, and --find prints none",
        ("--formula", "--depth", "2"): "--depth is of the tree of modules, and --formula prints none",
        ("models.py:net",): "a model is for --why-not and --what-if; explain needs none",
    }.items():
        status, _, err = run("explain", "plan.json", *arguments)
        assert status == 2
        assert message in err
