"""A plan with schedules: it holds those that it runs, and its file, price and ranks say the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.api import compile as compiled
from shardwright.api import plan
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.schedules import Schedules
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.predict import predict
from shardwright.cost.timeline.program import Programs
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.scheduled import ScheduledCollective
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.errors import DistributedError, PlanError
from shardwright.reports.plan import PlanReport
from shardwright.search import picked
from shardwright.search.picked import by_library, by_stage, clipping, uses, with_its_schedules
from shardwright.search.plan import Plan
from tests.experts import mixture

TWO_NODES = Cluster(
    "two nodes",
    Cluster.local(2).device,
    (Level("host", 2, 1e9, 50e-6, "host"), Level("net", 2, 2.5e7, 100e-6)),
    "gloo",
    "default",
)
WAYS: Mapping[str, tuple[dict[str, int], list[str]]] = {
    "data": ({"dp": 4}, ["data"]),
    "zero": ({"dp": 4}, ["zero"]),
    "tensor": ({"tp": 4}, ["tensor"]),
    "two axes": ({"a": 2, "b": 2}, ["data", "data"]),
    "experts": ({"ep": 4}, ["expert"]),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


BATCH = {"x": torch.randn(256, 64, generator=torch.Generator().manual_seed(1)).double()}


def of(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and the batch of a way."""
    return mixture("sorted") if name == "experts" else (net(), BATCH)


@pytest.fixture(scope="module")
def plans() -> Mapping[str, Plan]:
    cluster = TWO_NODES.with_schedules("synthesized")
    models = {name: of(name) for name in WAYS}
    return {
        name: plan(models[name][0], cluster, kwargs=models[name][1], mesh=mesh, roles=roles)
        for name, (mesh, roles) in WAYS.items()
    }


def test_a_plan_holds_what_it_runs_and_no_more(plans: Mapping[str, Plan], tmp_path: Path) -> None:
    for name, own in plans.items():
        used = {use.schedule for use in (*uses(own), clipping(own)) if use.schedule is not None}
        assert used, name
        assert own.cluster.schedules == Schedules(tuple(used))
        kinds = {"zero": {"reduce_scatter", "all_gather"}, "experts": {"all_to_all"}}.get(name, {"all_reduce"})
        assert {use.collective for use in uses(own) if use.schedule is not None} >= kinds
        is_priced = name != "two axes"
        assert (by_library(own) > own.prediction.step_s) == is_priced
        assert all(use.is_priced == is_priced for use in uses(own) if use.schedule is not None)
        assert sum(use.saved_s for use in uses(own)) > 0
        own.save(tmp_path / "plan.json")
        again = Plan.load(tmp_path / "plan.json")
        assert again == own
        assert predict(again.graph, again.cluster, again.execution) == own.prediction
        assert str(by_stage(again)) == str(by_stage(own))


def test_a_file_is_priced_by_the_schedules_that_it_has(plans: Mapping[str, Plan]) -> None:
    data = plans["data"].to_json()

    def edited(schedules: object) -> Plan:
        return Plan.from_json({**data, "cluster": {**data["cluster"], "schedules": schedules}})

    slower = edited([])
    assert slower.prediction.step_s == pytest.approx(by_library(plans["data"]), rel=1e-12)
    assert slower.prediction.step_s > plans["data"].prediction.step_s
    with pytest.raises(PlanError, match=r"cluster\.schedules: expected an array or null, got 'synthesized'"):
        edited("synthesized")
    by_library_alone = slower.to_json()
    by_library_alone["report"]["bound_s"] = slower.prediction.step_s
    by_library_alone["cluster"]["schedules"] = data["cluster"]["schedules"]
    with pytest.raises(PlanError, match=r"report\.bound_s: expected at most .* which the plan itself takes"):
        Plan.from_json(by_library_alone)


def test_ranks_and_prices_decide_alike(plans: Mapping[str, Plan]) -> None:
    own = plans["data"]
    communication = Communication(own.cluster, own.mesh.device_sizes)
    (by_axis,) = by_stage(own)
    for use in uses(own):
        pieces = by_axis[use.axis,].get(use.collective, [(0.0, None)])
        taken = [schedule for start, schedule in pieces if start <= use.num_bytes][-1]
        assert taken is use.schedule
        seconds = communication.curve("all_reduce", 0).time_s(use.num_bytes)
        assert (seconds if use.collective == "all_reduce" else use.seconds) == use.seconds


def test_rows_are_priced_by_schedules_and_their_numbers_by_the_library(plans: Mapping[str, Plan]) -> None:
    own = plans["experts"]
    steps = Programs(own.graph, own.cluster).steps(own.execution)
    costs, (exchange,) = steps.move_costs, {e for operator in steps.operators.values() for e in operator.sent}
    counts, rows, *_ = exchange.sent(backward=False).listed
    assert counts == exchange.counts_bytes
    for num_bytes, price in ((counts, costs.library_s), (rows, costs.collective_s)):
        found = costs.transfer_s(exchange, num_bytes)
        assert found == price("all_to_all", exchange.axis, exchange.imbalance * num_bytes)
        other = costs.collective_s if price == costs.library_s else costs.library_s
        assert found != other("all_to_all", exchange.axis, exchange.imbalance * num_bytes)


def test_the_report_says_what_is_gained(plans: Mapping[str, Plan]) -> None:
    report = PlanReport(plans["data"])
    text = "\n".join(map(str, report.paragraphs()))
    assert "Collectives by schedules\n  a step takes" in text
    assert "where gloo runs all collectives" in text
    assert " all_reduce 2x2 " in text
    data = report.data()["schedules"]
    assert data["library_step_s"] > data["step_s"]
    assert PlanReport(replace(plans["data"], cluster=TWO_NODES)).data()["schedules"] is None
    along_two = str(PlanReport(plans["two axes"]).paragraphs())
    assert "counts sums over several axes as gloo's; what they save comes on top" in along_two
    nothing = replace(plans["data"], cluster=TWO_NODES.with_schedules(Schedules()))
    words = "none: no schedule fits a group of this plan and is worth running in place of gloo's own"
    assert words in str(PlanReport(nothing).paragraphs())


def test_a_compiled_step_runs_them(plans: Mapping[str, Plan]) -> None:
    """Loss and gradients are those of one process; as many schedules run as were priced."""

    def body() -> list[tuple[float, float, int]]:
        return [_step(name, own) for name, own in plans.items()]

    for by_rank in run_ranks(body, 4, 120):
        for (name, own), (found, error, count) in zip(plans.items(), by_rank, strict=True):
            model, batch = of(name)
            assert found == pytest.approx(model(**batch).item(), rel=1e-12), name
            assert error < (1e-13 if name == "experts" else 1e-15), name
            assert count == sum(use.times for use in uses(own) if use.schedule is not None), name


def _counted(counts: list[int]) -> AbstractContextManager[object]:
    """Count the schedules that run meanwhile."""
    run = ScheduledCollective._checked

    def counted(self: ScheduledCollective, *args: Any, **kwargs: Any) -> Tensor:
        counts[0] += 1
        return run(self, *args, **kwargs)

    return mock.patch.object(ScheduledCollective, "_checked", counted)


def _step(name: str, own: Plan) -> tuple[float, float, int]:
    counts, (reference, batch) = [0], of(name)
    parallel = compiled(of(name)[0], plan=own, kwargs=batch)
    reference(**batch).backward()
    with _counted(counts):
        loss = parallel.forward_backward(**batch)
    norm = parallel.clip_grad_norm_(1e9)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(reference.parameters(), 1e9).item(), rel=1e-12)
    errors = [
        (p.grad.full_tensor() - q.grad).abs().max().item()
        for p, q in zip(parallel.parameters(), reference.parameters(), strict=True)
        if isinstance(p.grad, DTensor) and q.grad is not None
    ]
    assert len(errors) == len([*reference.parameters()])
    return loss.item(), max(errors), counts[0]


class Tied(nn.Module):
    """The first stage and the last have a weight in common."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(64, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = h + torch.relu(block(h))
        return nn.functional.cross_entropy((h @ self.tokens.weight.T).flatten(0, 1), x.flatten())


def test_stages_and_clipping_sum_by_schedules() -> None:
    """Over a slow link one step is better than the two of a ring."""
    batch = {"x": torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(2))}
    far = replace(TWO_NODES, levels=(replace(TWO_NODES.levels[1], latency_s=0.01),))
    torch.manual_seed(0)
    model = Tied().double()
    own = plan(model, far.with_schedules("synthesized"), kwargs=batch, stages=2, microbatches=2)
    assert [(use.stage, use.axis, use.is_priced) for use in uses(own)] == [(0, "stages", True), (1, "stages", True)]
    names = {use.schedule and use.schedule.name for use in (*uses(own), clipping(own))}
    assert names == {"one-shot all_reduce 2"}
    saved_s = by_library(own) - own.prediction.step_s
    assert saved_s == pytest.approx(uses(own)[0].saved_s)  # both stages wait for the same sum
    with mock.patch.object(picked, "uses", return_value=[]):  # what clipping alone runs is held too
        assert with_its_schedules(own).cluster == own.cluster
    clipped = str(PlanReport(own).paragraphs())
    assert "clipping sums over all ranks by one-shot all_reduce 2" in clipped

    def body() -> tuple[float, float, list[int]]:
        reference, counts = Tied().double(), [0]
        reference.load_state_dict(model.state_dict())
        parallel = compiled(copy.deepcopy(model), plan=own, kwargs=batch)
        with _counted(counts):
            loss = parallel.forward_backward(**batch).item()
            norm = parallel.clip_grad_norm_(1.0).item()
        reference(**batch).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
        return loss - reference(**batch).item(), norm / expected - 1, counts

    for off, norm_off, counts in run_ranks(body, 2, 60):
        assert (off, norm_off) == pytest.approx((0, 0), abs=1e-12)
        assert counts == [2]  # the gradient of the tied weight, and the norm


def _uneven(kind: str, weights: list[int]) -> Schedule:
    """A right schedule of one step, whose ranks give or get other shares."""
    whole = collective(kind, 2, weights=weights)
    ends = [(s, d, c) for c, one in enumerate(whole.chunks) for s in one.sources for d in one.targets if s != d]
    op = "reduce" if whole.reduces else "copy"
    return Schedule(f"uneven {kind}", whole, tuple(Transfer(0, s, d, c, op) for s, d, c in ends))


def test_what_is_wrong_is_not_run(plans: Mapping[str, Plan]) -> None:
    """A plan file is from anyone: a schedule is proven before a rank runs it, a folder's before the search."""
    ring = build("ring", "all_reduce", (4,))
    cut = replace(ring, transfers=ring.transfers[:-1])
    for schedule, words in (
        (cut, "ring all_reduce 4: .*plan without this schedule"),
        (build("one-shot", "all_reduce", (4,)), "would add up in other orders"),
        (_uneven("all_gather", [1, 3]), "uneven all_gather: expected as much for every rank"),
        (_uneven("reduce_scatter", [1, 3]), "uneven reduce_scatter: expected as much"),
        (_uneven("all_to_all", [1, 3, 3, 1]), "uneven all_to_all: expected as much"),  # inputs are of equal size
    ):
        cluster = TWO_NODES.with_schedules(Schedules([schedule]))
        with pytest.raises(PlanError, match=words):
            plan(net(), cluster, kwargs=BATCH)

    def body(own: Plan) -> None:
        compiled(net(), plan=own, kwargs=BATCH)

    hostile = replace(plans["data"], cluster=TWO_NODES.with_schedules(Schedules([cut])))
    with pytest.raises(DistributedError, match="plan without this schedule"):
        run_ranks(lambda: body(hostile), 4, 60)
    data = plans["data"].to_json()
    data["cluster"] = {**TWO_NODES.to_json(), "schedules": "/etc"}
    with pytest.raises(PlanError, match="schedules"):
        Plan.from_json(data)
