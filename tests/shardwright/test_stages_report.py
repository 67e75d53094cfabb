"""What people are told of pipeline stages."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod

from shardwright.asking import what_if, why_not
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.mesh import Mesh
from shardwright.reports.comparison import ComparisonReport
from shardwright.reports.facts import PlanFacts
from shardwright.reports.parameters import stored_parameters
from shardwright.reports.plan import PlanReport
from shardwright.reports.stages import stage_facts
from shardwright.reports.timeline import TimelineReport, plan_timeline
from shardwright.reports.wording import standing
from shardwright.search.tree.planner import Planner
from tests.search.graphs import blocks, cluster, every_choice


def test_a_report_says_what_each_stage_has_and_sends_and_how_long_it_waits() -> None:
    graph, search = blocks(batch=32, width=64, layers=8, seq=8), Planner(cluster(8), every_choice)
    plan = search.plan(graph, stages=2, schedule="interleaved")
    found, timeline = stage_facts(PlanFacts(plan)), simulate(program(plan.graph, plan.cluster, plan.execution))
    assert [s.bubble_s for s in found] == [s.bubble_s for s in timeline.stages]
    assert [s.memory_bytes for s in found] == [s.memory.total_bytes for s in timeline.stages]
    run, size = plan.execution, plan.mesh.num_devices
    has = [name for chunk in zip(*(s.has for s in found), strict=True) for name in chunk]  # in the model's order
    assert len(has) == run.schedule.num_virtual_stages
    assert has[0].startswith("other operators, layers.0")
    assert has[-1].endswith("other operators")
    one = 32 // plan.mesh.num_microbatches * 8 * 64 * 4 / size  # the residual stream, by the batch
    assert [s.sent_bytes for s in found] == [
        run.schedule.chunks_per_stage * one,
        (run.schedule.chunks_per_stage - 1) * one,
    ]
    text = str(PlanReport(plan))
    assert "mesh [x=4] for each of 2 stages" in text
    assert f"Pipeline (2 stages of {run.schedule.chunks_per_stage} chunks each, schedule interleaved)" in text
    assert "listed: one device of each of the 2 stages, added up" in text
    assert text.count(" on each device of the fullest stage") == 2
    assert "compute and communication of one device of each of the 2 stages, added up, in a step of" in text
    assert "2 × [x=4]" in str(ComparisonReport({"one": plan, "other": plan}))
    assert "2 × [x=4]" in str(why_not(plan, "ddp"))
    assert "for each of 2 stages" in str(TimelineReport(plan, plan_timeline(plan, plan.execution)))
    assert len(json.loads(json.dumps(PlanReport(plan).data()))["stages"]) == 2


def test_stages_are_not_said_to_win_by_what_others_were_not_given() -> None:
    """Nor by what does not fit; plans of before have none by hand with stages."""
    planner = Planner(Cluster.preset("dgx-h100", 1), every_choice)
    for stages in (1, 2):
        plan = planner.plan(blocks(64, 2048, 4, 512), "Net", stages=stages, microbatches=4)
        by_hand = [a for a in plan.alternatives if "search on" not in a.name]
        assert {a.execution.schedule.num_stages for a in by_hand} == {1, stages}
        assert "; none by hand" not in standing(plan).text
        deeper = replace(plan, execution=plan.execution.having(num_stages=stages**2, split=()))
        assert "; none by hand" not in standing(deeper).text
        without = [a for a in by_hand if a.execution.schedule.num_stages == 1]
        told = standing(replace(plan, alternatives=tuple(without))).text
        assert told.endswith("; none by hand has stages") is (stages == 2)
        large = [replace(a, fits=False) for a in by_hand if a.execution.schedule.num_stages > 1]
        told = standing(replace(plan, alternatives=(*without, *large))).text
        assert told.endswith("; none by hand with stages fits") is (stages == 2)


def test_reports_say_the_mesh_of_each_stage_where_they_are_unlike() -> None:
    search = Planner(cluster(6), every_choice)
    plan = search.plan(blocks(batch=32, width=64, layers=8, seq=8), stages=[4, 2], mesh=Mesh.of(x=2, y=2))
    found, text = stage_facts(PlanFacts(plan)), str(PlanReport(plan))
    assert [s.mesh for s in found] == ["[x=2, y=2]", "[x=1, y=2]"]
    assert "6 devices (test), meshes [x=2, y=2], [x=1, y=2] for 2 stages" in text
    assert "asked for       mesh x=2,y=2; stages 4,2" in text
    assert "stage  mesh        has" in text
    assert "[x=2, y=2] + [x=1, y=2]" in str(ComparisonReport({"one": plan, "other": plan}))
    told = str(TimelineReport(plan, plan_timeline(plan, plan.execution)))
    assert "meshes [x=2, y=2], [x=1, y=2] for 2 stages\n" in told
    stored = stored_parameters(PlanFacts(plan))
    by_ranks = {own.ranks for own in stored.values()}
    assert {"0–3", "4–5"} <= by_ranks
    for own in stored.values():
        ranks = 6 if own.ranks == "0–5" else 4 if own.ranks == "0–3" else 2
        assert own.copies * prod(own.shape) == ranks * prod(own.local_shape) or own.ranks == "0–5"


def test_a_plan_without_stages_has_no_table_of_them() -> None:
    plan = Planner(cluster(2), every_choice).plan(blocks(layers=2))
    assert stage_facts(PlanFacts(plan)) == []
    assert "Pipeline" not in str(PlanReport(plan))


def test_what_if_on_other_devices_says_that_the_stages_are_others() -> None:
    search = Planner(cluster(6), every_choice)
    plan = search.plan(blocks(batch=32, width=256, layers=8, seq=8), stages=[4, 2])
    found = what_if(plan, nodes="2x")
    assert found.other.cluster.num_devices == 12
    assert "stages of 4 + 2 devices were asked for, not of 12: now the search chose" in str(found)
    assert what_if(plan, memory="2x").other.execution.schedule.stage_sizes == plan.execution.schedule.stage_sizes
