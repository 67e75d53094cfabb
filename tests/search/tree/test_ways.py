"""Microbatches, recomputation and lifetimes are chosen where they are needed, and no better choice is missed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwright.cost.clusters.cluster import Cluster, Level
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS
from shardwright.pcg.step.parameters import find_parameters
from shardwright.pcg.step.time import check_time
from shardwright.reports.facts import fits
from shardwright.reports.plan import PlanReport
from shardwright.search.check import check_plan
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Candidate, Solver, different, over_time
from shardwright.search.exact.within import stored_bytes
from shardwright.search.plan import Plan
from shardwright.search.request.options import SearchOptions
from shardwright.search.request.pins import Pins
from shardwright.search.request.restrict import FREE, SEQUENCE, ZERO
from shardwright.search.request.spaces import Space, batch_size, meshes, microbatch_counts, nested, sequence_baselines
from shardwright.search.tree.byhand import Strategy, by_people
from shardwright.search.tree.fitting import Fitter
from shardwright.search.tree.meshes import Meshes
from shardwright.search.tree.planner import Planner
from shardwright.search.tree.ways import Way, Ways
from tests.each import each
from tests.search.graphs import blocks, cluster, every_choice, mlp

GRAPH = blocks(16, 16, layers=4, seq=16)


def planner(num_devices: int = 2, **options: float) -> Planner:
    return Planner(cluster(num_devices, **options), every_choice)  # type: ignore[arg-type]


def limited(search: Planner, limit_bytes: float) -> Planner:
    """The same planner, with what it knows already, and other memory."""
    search.solver.limit_bytes = search.limit_bytes = int(limit_bytes)
    return search


def grid(search: Planner, graph: Graph) -> list[Candidate]:
    """Every way to run the graph on one axis, whatever memory it takes."""
    folded, found = Folded(graph), list[Candidate]()
    for role, count, mode in product(("data", "zero", "tensor", "free"), (1, 2, 4, 8), ("none", "full")):
        mesh, execution = over_time(Mesh.of(x=2), count), Execution(recompute=mode)
        for zero in different(ZEROS, mesh) if role in ("zero", "free") else ("zero-3",):
            found.append(search.solver.solve(folded, mesh, (role,), role, execution, (zero,), zero))
    return found


@each("link", [1e11, 1e9, 1e8])
def test_the_plan_is_about_the_best_of_all_ways_to_run_it(link: float) -> None:
    """Over the memory that any of them needs, 12 limits in all."""
    search = planner(link_bytes_per_s=link)
    known = grid(search, GRAPH)
    needs = sorted({c.prediction.memory.total_bytes for c in known})
    limits = [needs[0] + (needs[-1] - needs[0]) * i / 12 for i in range(1, 13, 3)]
    for limit in limits:
        best_s = min(c.prediction.step_s for c in known if c.prediction.memory.total_bytes <= limit)
        plan = limited(search, limit).plan(GRAPH)
        assert plan.prediction.memory.total_bytes <= limit
        assert plan.prediction.step_s <= 1.03 * best_s, (limit, plan.mesh, plan.execution)


def test_less_memory_is_met_by_microbatches_then_by_recomputation() -> None:
    search = planner(link_bytes_per_s=1e9)
    free = search.plan(GRAPH)
    assert (free.mesh.num_microbatches, free.execution) == (1, Execution())
    needed = free.prediction.memory.total_bytes
    ways = []
    for share in (0.8, 0.6, 0.45, 0.3, 0.1):
        plan = limited(search, share * needed).plan(GRAPH)
        check_plan(plan, GRAPH, every_choice)
        check_time(plan.graph)
        ways.append((plan.mesh.num_microbatches, plan.execution.recompute, fits(plan)))
    assert [fit for _, _, fit in ways] == sorted((fit for _, _, fit in ways), reverse=True)
    assert ways[1][2]
    assert not ways[-1][2]
    assert any(count > 1 for count, _, fit in ways if fit)
    assert any(mode != "none" for _, mode, fit in ways if fit)


def devices(mesh: Mesh) -> tuple[int, ...]:
    """The sizes of all axes but that of time."""
    return mesh.sizes[mesh.num_microbatches > 1 :]


@each("share", [0.9, 0.5])
def test_every_mesh_is_searched_to_its_end_and_shown(share: float) -> None:
    """None is left where it is because its serial time is long: overlapped, or within memory, it may be the best."""
    search = planner(4, link_bytes_per_s=1e8)
    limit = share * search.plan(GRAPH).prediction.memory.total_bytes
    plan = limited(search, limit).plan(GRAPH)
    shown = [a for a in plan.alternatives if a.name.startswith("search")]
    assert {devices(mesh) for mesh in (plan.mesh, *(a.mesh for a in shown))} == {m.sizes for m in meshes(4)}
    for mesh in meshes(4):
        alone = limited(search, limit).plan(GRAPH, mesh=mesh)
        assert fits(plan) >= fits(alone)
        assert not fits(alone) or plan.prediction.step_s <= 1.03 * alone.prediction.step_s
        beside = [a for a in shown if devices(a.mesh) == mesh.sizes]
        assert not fits(alone) or not beside or any(a.fits for a in beside)


def test_no_alternative_is_shown_faster_than_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was solved whole is shown whole: of folded blocks it was an estimate, here of half the time."""
    search = planner(2, link_bytes_per_s=1e9)
    again_whole, solved = Solver.again_whole, list[Candidate]()

    def slower(self: Solver, graph: Graph, folded: Folded, candidate: Candidate, *, judged: bool = True) -> Candidate:
        found = again_whole(self, graph, folded, candidate, judged=judged)
        p = replace(found.prediction, step_s=(2.0 + len(solved)) * found.prediction.step_s)
        solved.append(replace(found, prediction=p))
        return solved[-1]

    monkeypatch.setattr(Solver, "again_whole", slower)
    plan = search.plan(GRAPH, recompute="none", microbatches=1)
    assert len(solved) > 1
    assert all(a.prediction.step_s > (1 - 2e-3) * plan.prediction.step_s for a in plan.alternatives if a.fits)


def test_recomputation_is_chosen_where_the_batch_cannot_be_cut_further() -> None:
    graph = blocks(2, 16, layers=4, seq=64)
    search = planner(link_bytes_per_s=1e9)
    needed = search.plan(graph).prediction.memory.total_bytes
    plan = limited(search, 0.6 * needed).plan(graph)
    assert fits(plan)
    assert made_again(plan.graph, plan.execution).twice


@pytest.mark.parametrize("mesh", [None, Mesh.of(dp=2)])
def test_nothing_that_makes_more_again_is_tried_where_memory_is_not_short(
    mesh: Mesh | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, solve = list[Execution](), Solver.solve

    def recorded(self: Solver, *args: Any, **more: Any) -> Candidate:
        tried.append(args[4])
        return solve(self, *args, **more)

    monkeypatch.setattr(Solver, "solve", recorded)
    search = planner(link_bytes_per_s=1e8)
    needed = search.plan(GRAPH, mesh=mesh).prediction.memory.total_bytes
    assert all(execution.recompute == "none" for execution in tried)
    limited(search, 0.4 * needed).plan(GRAPH, mesh=mesh)
    assert any(execution.recompute != "none" for execution in tried)


def test_only_as_much_is_made_again_as_memory_asks_for() -> None:
    """Value by value, and where that is too much or too little, not the same in all blocks."""
    graph = blocks(2, 16, layers=8, seq=64)
    search, way = planner(), {"mesh": Mesh.of(x=2), "roles": ("data",), "microbatches": 1}
    whole, kept = (search.plan(graph, **way, recompute=mode) for mode in ("full", "none"))  # type: ignore[arg-type]
    least, most = (plan.prediction.memory.total_bytes for plan in (whole, kept))
    before_s, mixed = kept.prediction.step_s, 0
    for share in (0.9, 0.7, 0.5, 0.3):
        plan = limited(search, least + share * (most - least)).plan(graph, **way)  # type: ignore[arg-type]
        assert fits(plan)
        assert before_s <= plan.prediction.step_s < whole.prediction.step_s
        made = [again for _, again in plan.execution.by_pattern()]
        assert all(isinstance(again, tuple) for again in made)
        mixed, before_s = mixed + (len(made) > 1), plan.prediction.step_s
        check_plan(plan, graph, every_choice)
        assert "made again in backward: values in" in str(PlanReport(plan))
    assert mixed


def test_gathered_parameters_stay_as_long_as_there_is_room() -> None:
    graph = blocks(16, 64, layers=4, seq=4)
    search = planner(link_bytes_per_s=1e8)
    lifetimes = []
    for zero in ZEROS:
        found = search.solve(graph, Mesh.of(mb=4, x=2), ("zero",), "zero", zeros=(zero,))
        parameters = find_parameters(found.graph).by_leaf.values()
        lifetimes.append({(p.slices.lifetime, p.slices.summed) for p in parameters if p.slices is not None})
    assert lifetimes == [{("step", True)}, {("step", False)}, {("microbatch", False)}, {("pass", False)}]
    roomy = search.solve(graph, Mesh.of(mb=4, x=2), ("zero",), "zero", zeros=ZEROS)
    assert roomy.lifetimes == "zero-1"
    least = search.solve(graph, Mesh.of(mb=4, x=2), ("zero",), "zero").prediction.memory.total_bytes
    tight = limited(search, least).solve(graph, Mesh.of(mb=4, x=2), ("zero",), "zero", zeros=ZEROS)
    assert (tight.lifetimes, tight.fits) == ("zero-3", True)


# ---- pins ----


def test_what_is_asked_for_is_kept_to() -> None:
    search = planner()
    pinned = search.plan(GRAPH, microbatches=4, recompute="full")
    assert (pinned.mesh.num_microbatches, pinned.execution.recompute) == (4, "full")
    assert all(a.mesh.num_microbatches == 4 for a in pinned.alternatives)
    meshed = search.plan(GRAPH, mesh=Mesh.of(mb=2, dp=2), roles=("zero",))
    assert meshed.mesh == Mesh.of(mb=2, dp=2)
    assert search.plan(GRAPH, mesh=Mesh.of(dp=2), microbatches=2).mesh == Mesh.of(mb=2, dp=2)
    by_block = search.plan(GRAPH, recompute={"layers.0": "full", "layers.*": "none"})
    assert by_block.execution.recompute == (("layers.0", "full"), ("layers.*", "none"))


def with_statistics() -> Graph:
    """A model that subtracts the mean over the batch, as batch norm does."""
    b = GraphBuilder()
    x, w = b.leaf("x", "input", (8, 4), "float32", "x"), b.leaf("w", "parameter", (4, 4), "float32", "w", grad=True)
    h = b.op("linear", x, w)
    h = b.op("add", h, b.op("sum", h, dims=(0,), keepdim=True))
    return b.graph([("loss", b.op("sum", b.op("mul", h, h), dims=(0, 1), keepdim=False))])


def test_an_obstacle_to_microbatches_is_told() -> None:
    plan = planner().plan(with_statistics())
    assert plan.mesh.num_microbatches == 1
    assert "the batch cannot be cut into 2 microbatches exactly here" in plan.report.obstacle
    assert "no microbatches: " in str(PlanReport(plan))
    with pytest.raises(PlanError, match=r"the batch cannot be cut into 4 microbatches exactly here"):
        planner().plan(with_statistics(), microbatches=4)


@each(("pins", "message"), [
    ({"microbatches": 3}, "microbatches=3 does not divide the batch of 16; choose one of 1, 2, 4, 8, 16"),
    ({"microbatches": 0}, "microbatches=0: expected a positive number of microbatches in a step"),
    ({"mesh": Mesh.of(mb=4, x=2), "microbatches": 2}, "microbatches=2 contradicts the axis 'mb' of mesh [mb=4, x=2]"),
    ({"mesh": Mesh.of()}, "mesh: it has no axes; give one, of size 1 for a single device"),
    ({"mesh": Mesh.of(mb=4, x=2), "roles": ("data", "data")}, "2 axis roles for mesh [x=2]; give one role per axis of"),
    ({"recompute": "selective"}, "there is no attention"),
    ({"recompute": {"decoder.*": "full"}}, "no repeated block of the model is so named"),
    ({"recompute": "all"}, "expected one of"),
])  # fmt: skip
def test_pins_that_cannot_be_kept_to(pins: dict[str, object], message: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - a field's own error or a plan's
        planner().plan(GRAPH, **pins)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_counts_of_microbatches() -> None:
    assert batch_size(GRAPH) == 16
    assert microbatch_counts(16) == [1, 2, 4, 8, 16]
    assert microbatch_counts(48) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert microbatch_counts(1) == [1]
    assert microbatch_counts(7) == [1, 7]


# ---- plans ----


def test_a_plan_file_says_how_it_is_run(tmp_path: Path) -> None:
    plan = planner().plan(GRAPH, microbatches=2, recompute={"layers.0": "full"})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    data = plan.to_json()
    assert data["execution"] == {"recompute": {"layers.0": "full"}}
    old = {**data, "version": 2, "precision": None}
    del old["execution"]
    assert Plan.from_json(old).execution == Execution()
    with pytest.raises(PlanError, match="field 'speed' is not known"):
        Plan.from_json({**data, "execution": {"speed": 2}})


def test_what_would_fit_is_told_where_nothing_does() -> None:
    graph = mlp(8, 256, 1024, layers=4)
    search = planner()
    small = limited(search, 0.3 * search.plan(graph, recompute="none").prediction.memory.total_bytes)
    plan = small.plan(graph)
    assert not fits(plan)
    assert plan.report.remedies
    steps = [remedy.step_s for remedy in plan.report.remedies]
    assert steps == sorted(steps)
    assert "would fit" in str(PlanReport(plan))
    assert Plan.from_json(plan.to_json()).report.remedies == plan.report.remedies


def test_a_weight_that_no_slice_of_fits_is_named() -> None:
    """With its gradient and two moments it takes four times its bytes; half of that is more than there is."""
    graph = mlp(8, 256, 1024, layers=1)
    plan = limited(planner(), 4 * 256 * 1024 * 4 // 2 - 1000).plan(graph)
    assert not fits(plan)
    assert "up alone takes 2.10 MB on each of 2 devices in equal slices, with its gradient and optimizer" in str(
        PlanReport(plan)
    )


def test_a_baseline_is_the_best_over_its_grid() -> None:
    search = planner(4, link_bytes_per_s=1e9)
    plan = search.plan(GRAPH)
    names = {a.name.partition(",")[0] for a in plan.alternatives}
    by_hand = {"data parallel", "ZeRO-3", "ZeRO-2", "tensor parallel 4", "data 2 x tensor 2"}
    assert len(by_hand - names) <= 1  # the plan itself
    tight = limited(search, 0.5 * plan.prediction.memory.total_bytes).plan(GRAPH)
    for other in tight.alternatives:
        assert other.fits == (other.prediction.memory.total_bytes <= tight.report.limit_bytes)
    assert any(a.mesh.num_microbatches > 1 for a in tight.alternatives if not a.name.startswith("search"))


def ways_of(search: Planner, graph: Graph = GRAPH, **asked: Any) -> Ways:
    """The ways to run a graph on a planner's cluster."""
    pins = Pins.of(graph, search.cluster, SearchOptions.of(**asked))
    return Ways(search.solver, graph, search.execution, pins, lambda message: None)


def test_where_what_is_stored_is_too_much_little_is_tried() -> None:
    """What keeps the least, of each strategy and one mesh; nothing against a plan that fits. The bound is below all."""
    search = planner(4)
    folded, execution = Folded(GRAPH), Execution()
    for mesh, role, zero in product(
        (Mesh.of(x=4), over_time(Mesh.of(x=4), 2)), ("data", "zero", "tensor", "free"), ZEROS
    ):
        way = search.solver.solve(folded, mesh, (role,), role, execution, (zero,), zero)
        least_bytes = stored_bytes(search.solver.problem(folded, mesh, (role,), execution, "zero-3")[0])
        context = search.cluster.device.context_bytes
        assert least_bytes + context <= way.prediction.memory.total_bytes, (mesh, role, zero)
    sharded = stored_bytes(search.solver.problem(folded, Mesh.of(x=4), ("zero",), execution, "zero-3")[0])
    for times, hopeless in ((0.99, ("data", "zero", "tensor", "free")), (1.5, ("data",))):
        ways = ways_of(limited(planner(4), search.cluster.device.context_bytes + times * sharded))
        for role in ("data", "zero", "tensor", "free"):
            space = Space(role, Mesh.of(x=4), (role,))
            assert bool(ways.excess_bytes(space)) == (role in hopeless), (times, role)
            if role in hopeless:
                tried = [attempt.way for attempt in Strategy(ways, [space]).run() if attempt.is_judged]
                assert [(way.mode, way.many) for way in tried] == [("full", ways.counts_on(space)[-1])]
        if times < 1:
            ways = ways_of(limited(planner(4), search.cluster.device.context_bytes + times * sharded))
            known = list(by_people(ways))
            queue = Meshes(ways, None, ways.spaces)
            assert list(queue.run())
            assert not any(c.fits for c in (*known, *queue.bests()))
            assert len(ways.known) == len(known) + 1


def test_degrees_of_a_strategy_have_to_win_against_the_likeliest() -> None:
    """The least floor comes first. Against a plan that is far faster, one way is tried, whether or not it fits."""
    search = planner(8, link_bytes_per_s=1e9)
    spaces = [Space(f"{n}", Mesh.of(x=8 // n, y=n), ("zero", "tensor")) for n in (2, 4)]
    for on, rival_s, number in ((search, inf, 2), (search, 1e-9, 1), (limited(search, 1e-9), 1e-9, 1)):
        ways = ways_of(on)
        strategy = Strategy(ways, spaces, rival_s)
        first = min(spaces, key=lambda space: ways.floor_s(Way(space, "none", 1)))
        solved = [attempt.way.space for attempt in strategy.run() if not attempt.is_judged]
        assert solved[0] == first
        assert len(dict.fromkeys(solved)) <= number
        assert rival_s == inf or len(ways.known) == 1
        assert strategy.best is not None


def test_a_mesh_with_a_higher_floor_is_solved_only_where_rewrites_may_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    search = planner(8)

    def solved(gain: float | None) -> int:
        ways = ways_of(search)
        least_s = ways.floor_s(Way(ways.spaces[0], "none", 1))
        monkeypatch.setattr(ways, "floor_s", lambda way: least_s * (1 if way.space == ways.spaces[0] else 2))
        rewriter = None if gain is None else SimpleNamespace(gain=lambda problem, solution: gain)
        queue = Meshes(ways, None, ways.spaces, cast("Any", rewriter))
        assert list(queue.run())
        return len({attempt.way.space for attempt in queue.solved})

    assert (solved(None), solved(0.3), solved(0.6)) == (1, 1, len(ways_of(search).spaces))


def test_no_problem_is_built_of_recomputation_that_is_not_needed() -> None:
    search = planner(2)
    ways = ways_of(search)
    queue = Meshes(ways, None, [Space("zero", Mesh.of(x=2), ("zero",))])
    assert {c.is_tight for attempt in queue.run() for c in attempt.plans} == {False}
    assert all(way.mode == "none" for way in queue.attempts)


def test_a_way_is_solved_once() -> None:
    ways = ways_of(planner(2))
    way = Way(ways.spaces[0], "none", 1)
    assert ways.solved(way) is ways.solved(way)
    assert list(ways.known) == [way]


def test_weights_that_have_to_stay_gathered_count_as_stored() -> None:
    """Beside the parts that are stored, in 16 bits, as their products may be; but not where they may be let go."""
    search = planner(8)
    whole = 2 * sum(GRAPH.types[leaf.name].num_elements for leaf in GRAPH.leaves("parameter"))
    space = Space("", Mesh.of(x=8), (ZERO,), ("zero-1",))
    problem, _ = search.solver.problem(Folded(GRAPH), space.mesh, space.roles, Execution(), "kept")
    stored = stored_bytes(problem) + search.cluster.device.context_bytes
    ways = ways_of(limited(search, stored + whole / 2))
    assert ways.excess_bytes(space) == pytest.approx(3 / 8 * whole, abs=1)
    assert not ways.excess_bytes(space._replace(zeros=("zero-3",)))
    assert not ways.excess_bytes(space._replace(roles=(FREE,)))


def test_on_many_devices_the_best_mesh_is_cut_to_three_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as the best plan is, where nothing is asked for."""
    levels = (Level("inside", 4, 1e10, 1e-6), Level("across", 2, 1e8, 1e-6))
    search, graph = Planner(replace(cluster(8), levels=levels), every_choice), blocks(16, 64, layers=4, seq=16)

    def cut(**asked: Any) -> list[Way]:
        ways = ways_of(search, graph, **asked)
        queue = Meshes(ways, Fitter(search.solver, ways.folded, values=True), ways.spaces)
        assert list(queue.run())
        return [way for way, attempt in queue.attempts.items() if attempt.dimension == "axes"]

    assert cut() == []
    monkeypatch.setattr("shardwright.search.tree.meshes.MANY_DEVICES", 8)
    monkeypatch.setattr("shardwright.search.tree.meshes.BEHIND", 1e9)  # of the best plan, whose mesh has one axis
    assert {way.space.mesh.sizes for way in cut()} == {(2, 2, 2)}
    assert cut(pins=("y<=4",)) == []
    monkeypatch.setattr("shardwright.search.tree.meshes.FLOORS", 1e-9)  # whatever its floor, it is solved
    plan = search.plan(graph)
    assert plan.report.num_meshes == len(list(meshes(8))) + 1
    assert plan.report.bound_s <= plan.prediction.step_s


def test_too_few_examples_for_all_devices_are_compared_with_plans_that_share_the_sequence() -> None:
    """In groups among which the batch divides; each is shown once, unless it is the plan."""
    search = planner(4, link_bytes_per_s=1e11)
    for batch, kinds in ((2, 3), (4, 0)):
        plan = search.plan(blocks(batch, 64, layers=2, seq=32))
        by_hand = [a for a in plan.alternatives if any(role in a.name for role in SEQUENCE)]
        assert len(by_hand) + (plan.mesh.names[-1] == "sp") == kinds
        assert len({(a.name, a.mesh, str(a.execution)) for a in plan.alternatives}) == len(plan.alternatives)
    spaces = [[space.name for space in ways] for ways in sequence_baselines(cluster(8), blocks(4))]
    assert spaces == [[f"{role} parallel 8", f"data 2 x {role} 4", f"data 4 x {role} 2"] for role in SEQUENCE]
    assert not list(sequence_baselines(cluster(4), mlp(2)))  # which has no sequence


def test_a_forced_plan_is_not_faster_than_the_searched_one() -> None:
    """One or two long examples, on slow and fast links."""
    for batch, link in product((1, 2), (1e9, 1e12)):
        search, graph = planner(4, link_bytes_per_s=link), blocks(batch, 32, layers=2, seq=256)
        step_s = search.plan(graph).prediction.step_s
        pairs = product(("context", "tensor", "zero"), repeat=2)
        for space in dict.fromkeys(Space("forced", m, roles[: len(m)]) for roles, m in product(pairs, meshes(4))):
            forced = search.plan(graph, spaces=[space], compared=False)
            assert step_s <= forced.prediction.step_s * (1 + 1e-9), (batch, link, space)


def test_executions_of_other_precisions_are_kept() -> None:
    search = Planner(cluster(2), every_choice, precision="tf32")
    plan = search.plan(GRAPH, microbatches=2, recompute="full")
    assert plan.execution == Execution("tf32", recompute="full")
    assert replace(plan.execution, precision=None) == Execution(recompute="full")


def test_two_axes_are_cut_at_the_boundary_of_machines() -> None:
    """The inner one that crosses it, or of the outer one what fills a machine; that in the middle shares examples."""
    many = Cluster.preset("dgx-h100", nodes=4)
    for sizes, expected in {(2, 16): (2, 2, 8), (8, 4): (4, 2, 4), (16, 2): (4, 4, 2), (4, 8): None}.items():
        found = nested(Space("", Mesh(("x", "y"), sizes), (FREE, FREE)), many)
        assert (found and found.mesh.sizes) == expected
        assert found is None or (found.roles == (FREE, ZERO, FREE) and str(found.mesh) in found.name)
    for roles, sizes in (((FREE,), (32,)), ((ZERO, FREE), (2, 16))):
        assert nested(Space("", Mesh(("x", "y")[: len(sizes)], sizes), roles), many) is None


def test_where_nothing_fits_meshes_are_told_once() -> None:
    """What was put off is tried then, and the rest is known."""
    told, search = list[str](), planner(8, link_bytes_per_s=1e9)
    search.progress = told.append
    most = search.plan(GRAPH, recompute="none", microbatches=1).prediction.memory.total_bytes
    told.clear()
    plan = limited(search, 0.12 * most).plan(GRAPH, recompute="none", microbatches=1)
    assert not fits(plan)
    assert len(set(told)) == len(told)
