"""Blocks over pipeline stages: as many as each has room and time for, what it makes again, and what it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import predict
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import lifetimes
from shardwright.pcg.step.pipelining import SCHEDULES
from shardwright.pcg.step.recompute import Recompute
from shardwright.search.check import check_plan
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Solver
from shardwright.search.plan import Alternative, Plan
from shardwright.search.tree import whole as whole_graphs
from shardwright.search.tree.fitting import Fitter
from shardwright.search.tree.planner import Planner
from shardwright.search.tree.spreading import said_by_block, spread_out, stored_by_stage
from tests.search.graphs import blocks, cluster, every_choice, mixed, planner


def test_stages_make_again_what_each_has_no_room_for() -> None:
    """With memory for all of one stage's values but not the other's, the one with more in flight makes more again."""
    graph, search = blocks(batch=64, width=64, layers=8, seq=64), planner(2)
    free = search.plan(graph, stages=2, schedule="1f1b", mesh=Mesh.of(mb=8, x=1), recompute="none")
    again = search.plan(graph, stages=2, schedule="1f1b", mesh=Mesh.of(mb=8, x=1), recompute="full")
    most, least = (plan.prediction.memory.total_bytes for plan in (free, again))
    small = planner(2, memory_bytes=round((most + least) / 2 / 0.9))
    plan = small.plan(graph, stages=2, schedule="1f1b", mesh=Mesh.of(mb=8, x=1))
    assert plan.prediction.memory.total_bytes <= plan.report.limit_bytes
    assert free.prediction.step_s < plan.prediction.step_s < again.prediction.step_s
    assert not plan.execution.schedule.recompute_by_stage
    assert all(other.prediction != plan.prediction for other in plan.alternatives)
    by_stage = plan.execution.having(recompute="none", recompute_by_stage=("full", "none"))
    other = Alternative("by stage", plan.mesh, plan.prediction, True, by_stage)
    compared = replace(plan, alternatives=(other,))
    assert Plan.from_json(compared.to_json()) == compared
    with pytest.raises(PlanError, match="recompute_by_stage: expected nothing; a plan says in recompute what each"):
        Plan.from_json(replace(plan, execution=by_stage).to_json())


@pytest.mark.parametrize(("width", "faster"), [(1024, False), (4096, True)])
def test_stages_send_pieces_of_what_all_ranks_have(width: int, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where these are large; ranks inside a machine then gather them."""
    graph, machines = blocks(batch=4, width=width, layers=4, seq=512), Cluster.preset("dgx-h100", nodes=2)

    def planned() -> Plan:
        search = Planner(machines, every_choice)
        return search.plan(graph, stages=2, mesh=Mesh.of(mb=4, x=8), roles=("tensor",), schedule="1f1b")

    plan = planned()
    check_plan(plan, graph, every_choice)
    monkeypatch.setattr(whole_graphs, "sent_in_pieces", lambda solver, found: found)
    whole = planned()
    sent, all_sent = (program(p.graph, machines, p.execution).hops_bytes for p in (plan, whole))
    assert [(8 if faster else 1) * num_bytes for num_bytes in sent] == list(all_sent)
    assert (plan.prediction.step_s < whole.prediction.step_s) == faster


def test_stages_share_out_the_memory() -> None:
    """What fits on no device, not even in slices of one, fits where stages share the blocks."""
    graph = blocks(batch=32, width=63, layers=8, seq=2)
    peaks = {}
    for stages in (1, 2, 4):
        found = planner(4).plan(graph, stages=stages, mesh=Mesh.of(x=4 // stages), microbatches=4)
        peaks[stages] = found.prediction.memory.parameters_bytes
        timeline = simulate(program(found.graph, cluster(4), found.execution))
        assert timeline.fullest.memory == found.prediction.memory
    assert peaks[4] < 0.4 * peaks[1]


def test_blocks_are_spread_by_room_and_time() -> None:
    """The first stage has more microbatches in flight, so that with equally many blocks it needs more memory."""
    graph, solver = blocks(batch=64, width=64, layers=9, seq=16), Solver(cluster(4), every_choice)
    run = Execution.of(num_stages=2)
    found = solver.solve(Folded(graph), Mesh.of(mb=8, x=2), ("data",), "test", run)
    equal = simulate(program(found.graph, solver.cluster, run.having(split=(6, 5)))).stages
    limit = (3 * equal[0].memory.total_bytes + equal[1].memory.total_bytes) // 4
    small = solver.within(limit)
    execution = run.having(split=(6, 5))
    given = replace(found, execution=execution, fits=False, prediction=predict(found.graph, small.cluster, execution))
    moved = spread_out(small, given)
    assert moved.fits
    assert moved.execution.schedule.split[0] < 6
    assert moved.prediction.memory.total_bytes <= limit < equal[0].memory.total_bytes
    better = spread_out(solver, replace(found, execution=run))
    assert better.prediction.step_s < predict(found.graph, solver.cluster, run.having(split=(9, 2))).step_s
    assert abs(better.execution.schedule.split[0] - better.execution.schedule.split[1]) <= 2
    assert predict(found.graph, solver.cluster, better.execution) == better.prediction


def test_faster_devices_have_more_of_the_blocks() -> None:
    graph = blocks(batch=32, width=64, layers=11, seq=64)
    unasked = Planner(mixed(), every_choice).plan(graph)
    assert unasked.execution.schedule.num_stages > 1
    assert unasked.prediction.step_s < 0.9 * Planner(mixed(), every_choice).plan(graph, stages=1).prediction.step_s
    plan = Planner(mixed(), every_choice).plan(graph, stages=2, schedule="1f1b")
    first, second = plan.execution.schedule.split
    assert second > 1.5 * first
    equal = predict(plan.graph, plan.cluster, plan.execution.having(split=(6, first + second - 6)))
    assert plan.prediction.step_s < 0.9 * equal.step_s
    plan.to_json()
    check_plan(plan, graph, every_choice)


def test_larger_devices_have_more_of_the_blocks() -> None:
    """Of devices that are as fast, the ones with less memory have less, and no stage needs more than it has."""
    graph = blocks(batch=32, width=64, layers=11, seq=64)
    whole = Planner(mixed(times=1.0), every_choice).plan(graph, stages=2, schedule="1f1b", recompute="none")
    need = whole.prediction.memory.total_bytes
    small = mixed((round(0.8 * need), 1 << 34), times=1.0)
    plan = Planner(small, every_choice).plan(graph, stages=2, schedule="1f1b", mesh=whole.mesh, recompute="none")
    assert plan.execution.schedule.split[0] < whole.execution.schedule.split[0]
    stages = simulate(program(plan.graph, small, plan.execution)).stages
    assert all(s.memory.total_bytes <= 0.9 * s.device_bytes for s in stages)
    assert plan.prediction.device_bytes == round(0.8 * need)
    with pytest.raises(PlanError, match=r"pin 'memory<=1GB': not with stages on devices that differ; leave one out"):
        Planner(small, every_choice).plan(graph, stages=2, pins="memory<=1GB")


def test_plans_on_devices_that_differ_come_back_from_a_file() -> None:
    """With little work a microbatch, updates weigh more than the rest; those of quick devices take less."""
    graph = blocks(batch=2, width=64, layers=6, seq=1)
    search = Planner(mixed(times=8.0), every_choice)
    for schedule in SCHEDULES:
        plan = search.plan(graph, stages=2, schedule=schedule, mesh=Mesh.of(mb=2, x=2), compared=False)
        own = plan.prediction
        assert Plan.from_json(plan.to_json()) == plan
        assert 0 < own.compute_s + own.optimizer_s <= (own.step_s - own.exposed_s - own.bubble_s) * (1 + 1e-9)


def test_no_stage_needs_more_than_its_own_devices_have() -> None:
    """A large device may lack room where it has more left than a small one that has enough."""
    graph, split = blocks(batch=32, width=64, layers=11, seq=64), (1, 12)
    run = Execution.of(num_stages=2, split=split)
    whole = Solver(mixed(times=1.0), every_choice).solve(Folded(graph), Mesh.of(mb=8, x=2), ("data",), "test", run)
    need = [s.memory.total_bytes for s in simulate(program(whole.graph, mixed(times=1.0), run)).stages]
    for factors, fits in (((1.2, 1.2), True), ((1.2, 1.05), False), ((1.05, 1.2), False)):
        small, large = (round(factor * num_bytes) for factor, num_bytes in zip(factors, need, strict=True))
        solver = Solver(mixed((small, large), times=1.0), every_choice)
        prediction = solver.predicted(whole.graph, run, {})
        assert solver.fits(prediction) == fits
        if fits:  # what the large devices store is more than the small ones have
            found = replace(whole, prediction=prediction)
            assert prediction.memory.stored_bytes > small
            assert [f.candidate.fits for f in Fitter(solver, Folded(whole.graph), values=True).best([found])] == [True]


def test_what_stages_make_again_is_said_by_block() -> None:
    """With the same step and memory, whichever stage makes again; what lies in no block is never made again whole."""
    graph, solver = blocks(batch=64, width=32, layers=6, seq=32), Solver(cluster(2), every_choice)
    said = list[object]()
    kinds: list[tuple[Recompute, Recompute]] = [("none", "full"), ("full", "none")]
    for modes in kinds:
        run = Execution.of(num_stages=2, split=(4, 4), recompute_by_stage=modes)
        found = solver.solve(Folded(graph), Mesh.of(mb=4, x=1), ("data",), "test", run)
        told = said_by_block(solver, found)
        assert told.prediction == found.prediction == predict(told.graph, solver.cluster, told.execution)
        said.append((told.execution.schedule.recompute_by_stage, told.execution.recompute))
    assert said == [((), (("layers.3-5", "full"),)), ((), (("layers.0-2", "full"),))]


def test_stages_that_differ_in_what_they_make_again_keep_to_it() -> None:
    """Nothing is decided value by value where each stage has its own kind; equal kinds are that of the plan."""
    graph, solver = blocks(batch=64, width=32, layers=6, seq=32), Solver(cluster(2), every_choice)
    run = Execution.of(num_stages=2, split=(4, 4), recompute="full", recompute_by_stage=("full", "none"))
    found = solver.solve(Folded(graph), Mesh.of(mb=4, x=1), ("data",), "test", run)
    for fitted in Fitter(solver, Folded(graph), values=True).best([found]):
        assert fitted.candidate.execution == run
    programs = solver.programs(found.graph, {})
    least = programs.sections_bytes(run)[0]
    small, large = (programs.spread(run, (size, 2.0**30), ("none", "full")) for size in (least, 2.0**30))
    assert (large.recompute, large.schedule.recompute_by_stage) == ("none", ())
    assert small.schedule.recompute_by_stage == ("full", "none")


def test_each_stage_keeps_gathered_weights_as_long_as_it_has_room() -> None:
    """The first has more blocks and no room beside them; the second keeps what it gathers for the whole step."""
    graph, ample = blocks(batch=64, width=64, layers=9, seq=16), Solver(cluster(4), every_choice)
    run = Execution.of(num_stages=2, split=(7, 4))
    found = ample.solve(Folded(graph), Mesh.of(mb=8, x=2), ("zero",), "test", run, zeros=("zero-3",))
    assert set(lifetimes(found.graph).values()) == {"zero-3"}
    small = ample.within(found.prediction.memory.total_bytes)
    stored = stored_by_stage(small, found)
    assert (stored.fits, stored.execution) == (True, run)
    assert stored.prediction == predict(stored.graph, small.cluster, run)
    assert stored.prediction.step_s < found.prediction.step_s
    by_block = [lifetimes(stored.graph)[f"down{block}"] for block in range(9)]
    assert by_block == ["zero-3"] * 6 + ["zero-1"] * 3
    assert stored_by_stage(small, stored) == stored
    anywhere = stored_by_stage(ample, found)
    assert set(lifetimes(anywhere.graph).values()) == {"zero-1"}
    assert stored_by_stage(ample, found, ("zero-3",)) == found
