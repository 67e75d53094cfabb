"""With or on what plans would fit that a plan is compared with."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from shardwright.cost.timeline.memory import SAFE_SHARE
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.units import size
from shardwright.reports.comparison import Beside, ComparisonReport
from shardwright.search.exact.solving import Candidate, Solver, over_time
from shardwright.search.plan import Plan
from shardwright.search.request.options import SearchOptions
from shardwright.search.request.pins import Pins
from shardwright.search.tree.planner import Planner
from shardwright.search.tree.remedies import remedied
from shardwright.search.tree.ways import Ways
from tests.search.graphs import blocks, cluster, every_choice, mlp

BLOCKS, WEIGHTS = blocks(16, 64, layers=4, seq=16), mlp(64, 128, 256, layers=4)


def tuned(graph: Graph, devices: int = 4, **asked: Any) -> Ways:
    own = cluster(devices)
    return Ways(
        Solver(own, every_choice), graph, Execution(), Pins.of(graph, own, SearchOptions(**asked)), lambda told: None
    )


def solved(
    ways: Ways, roles: tuple[str, ...] = ("zero",), zero: Zero = "zero-3", microbatches: int = 1, **run: Any
) -> Candidate:
    n = ways.solver.cluster.num_devices
    mesh = over_time(Mesh(("x",), (n,)) if len(roles) == 1 else Mesh(("x", "y"), (n // 2, 2)), microbatches)
    return ways.solver.solve(ways.folded, mesh, roles, "by hand", Execution.of(**run), (zero,))


def told(ways: Ways, candidate: Candidate, limit_bytes: float) -> str:
    """Its remedy where so much may be used."""
    ways.solver.limit_bytes = int(limit_bytes)
    (found,) = remedied([replace(candidate, fits=False)], ways).values()
    return found


def between(one: Candidate, other: Candidate) -> float:
    used, less = (c.prediction.memory.total_bytes for c in (one, other))
    assert less < used
    return (used + less) / 2


def test_the_same_layouts_run_otherwise_come_first() -> None:
    ways = tuned(BLOCKS)
    plain = solved(ways)
    assert told(ways, plain, between(plain, solved(tuned(BLOCKS), recompute="full"))) == "with full recomputation"
    ways = tuned(BLOCKS)
    stays = solved(ways, zero="zero-2", recompute="full")
    assert told(ways, stays, between(stays, solved(tuned(BLOCKS), recompute="full"))) == "with ZeRO-3"


def test_more_microbatches_are_named_where_another_number_was_asked_for() -> None:
    ways = tuned(WEIGHTS, microbatches=1)
    whole, many = solved(ways), solved(tuned(WEIGHTS), microbatches=16)
    assert told(ways, whole, between(whole, many)) == "in 16 microbatches"
    ways = tuned(WEIGHTS)
    assert "microbatches" not in told(ways, whole, between(whole, many))


def test_a_batch_that_does_not_divide_should() -> None:
    """6 examples on each of 4 devices are much more than one."""
    graph = blocks(6, 16, layers=2, seq=16)
    ways = tuned(graph)
    whole = solved(ways, recompute="full")
    each = solved(tuned(blocks(4, 16, layers=2, seq=16)), recompute="full")
    assert told(ways, whole, 1.1 * each.prediction.memory.total_bytes) == "with a batch of 4"


def test_more_machines_are_those_on_which_the_same_plan_fits() -> None:
    ways = tuned(WEIGHTS)
    own, twice, often = (solved(tuned(WEIGHTS, n)) for n in (4, 8, 16))
    assert told(ways, own, between(own, twice)) == "on 8 devices"
    assert told(tuned(WEIGHTS), own, between(twice, often)) == "on 16 devices"


def test_else_larger_devices_are_named() -> None:
    ways = tuned(WEIGHTS)
    parts = solved(ways, ("tensor",))
    needed = ceil(parts.prediction.memory.total_bytes / SAFE_SHARE)
    assert told(ways, parts, 0.5 * parts.prediction.memory.total_bytes) == f"on devices of {size(needed)}"
    device = replace(ways.solver.cluster.device, memory_bytes=needed // 5)
    small = replace(parts, prediction=replace(parts.prediction, device_bytes=device.memory_bytes))
    ways.solver.cluster = replace(ways.solver.cluster, device=device)
    assert not told(ways, small, 0.9 * device.memory_bytes)


def test_the_smallest_have_a_remedy_that_files_and_tables_tell() -> None:
    need = Planner(cluster(4), every_choice).plan(BLOCKS).prediction.memory.total_bytes
    plan = Planner(cluster(4, memory_bytes=int(0.6 * need)), every_choice).plan(BLOCKS, stages=1)
    unfit = sorted((a for a in plan.alternatives if not a.fits), key=lambda a: a.prediction.memory.total_bytes)
    assert all(a.remedy for a in unfit[:3])
    assert not any(a.remedy for a in (*unfit[3:], *(a for a in plan.alternatives if a.fits)))
    remark = Beside.alternative(plan, unfit[0]).remark
    assert f" too much (would fit {unfit[0].remedy})" in remark
    assert remark in str(ComparisonReport({"plan": plan}))
    data = plan.to_json()
    assert Plan.from_json(json.loads(json.dumps(data))) == plan
    for other in data["alternatives"]:  # as files of before are
        other.pop("remedy", None)
    assert not any(a.remedy for a in Plan.from_json(data).alternatives)
    data["alternatives"][0]["remedy"] = 3
    with pytest.raises(PlanError, match="remedy"):
        Plan.from_json(data)


def test_what_does_not_fit_is_apart_and_says_why_it_computes_the_same_on_all() -> None:
    """The smallest first, never faster or slower, also where the plan does not fit itself."""
    graph = blocks(6, 16, layers=2, seq=16)
    plan = Planner(cluster(4), every_choice).plan(graph, stages=1)
    for own in (plan, replace(plan, report=replace(plan.report, limit_bytes=1))):
        others = [replace(a, fits=number % 2 == 0) for number, a in enumerate(plan.alternatives)]
        tables = ComparisonReport({"plan": replace(own, alternatives=tuple(others))}).paragraphs()
        assert [table.title.split(" in ")[0] for table in tables] == ["Compared with", "Do not fit"]
        unfit = sorted((a for a in others if not a.fits), key=lambda a: a.prediction.memory.total_bytes)
        fitting = sorted((a for a in others if a.fits), key=lambda a: a.prediction.step_s)
        names = [[row[0] for row in table.rows] for table in tables]
        assert names == [["this plan", *(a.name for a in fitting)], [a.name for a in unfit]]
        assert not any("faster" in cell or "slower" in cell for row in tables[1].rows for cell in row)
    (whole,) = (a for a in plan.alternatives if a.name == "ZeRO-3")
    assert "the batch of 6 does not divide among 4" in Beside.alternative(plan, whole).remark
    for other in plan.alternatives:
        told = "does not divide" in Beside.alternative(plan, other).remark
        assert told is (other.name in ("data parallel", "ZeRO-2", "ZeRO-3")), other.name


def test_where_all_fit_there_is_one_table() -> None:
    plan = Planner(cluster(4), every_choice).plan(BLOCKS, stages=1)
    assert [table.title for table in ComparisonReport({"plan": plan}).paragraphs()] == ["Compared with"]
    assert not any("divide" in Beside.alternative(plan, a).remark for a in plan.alternatives)


def test_of_several_plans_those_that_do_not_fit_come_last() -> None:
    plan = Planner(cluster(4), every_choice).plan(BLOCKS, stages=1)
    small = replace(plan, report=replace(plan.report, limit_bytes=1))
    one, other = ComparisonReport({"a": plan, "b": small, "c": replace(plan)}).paragraphs()
    assert ([row[0] for row in one.rows], [row[0] for row in other.rows]) == (["a", "c"], ["b"])
    (only,) = ComparisonReport({"b": small, "a": plan}).paragraphs()
    assert [row[0] for row in only.rows] == ["b", "a"]
