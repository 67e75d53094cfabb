"""Plans with pipeline stages: what the search tries of them, what it gives, and that files of them are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.cost.clusters.cluster import Cluster, Level
from shardwright.cost.predict import predict
from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.stages import Stages as Cut
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.meshes import stage_meshes
from shardwright.pcg.step.pipelining import Schedule, ScheduleName
from shardwright.pcg.step.recompute import Recompute
from shardwright.pcg.step.schedules import Item, orders
from shardwright.search.check import check_plan
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.solving import Candidate, Solver
from shardwright.search.exact.within import least_bytes, stored_bytes, within_memory
from shardwright.search.plan import Plan
from shardwright.search.request.anytime import Stop
from shardwright.search.request.asked import RecomputeMode, Stages
from shardwright.search.request.options import NOTHING, SearchOptions
from shardwright.search.request.pins import Pins
from shardwright.search.request.spaces import Pipeline, Space, staged_by_hand
from shardwright.search.tree import planner as search_planner
from shardwright.search.tree.planner import Planner
from shardwright.search.tree.staging import _AGAIN, _PATIENCE, Stager, _is_beyond, _Way
from shardwright.search.tree.tuning import Tuner
from tests.each import each
from tests.search.graphs import blocks, cluster, every_choice, mixed, planner


def test_plans_with_stages_have_a_split_and_come_back_from_a_file(tmp_path: Path) -> None:
    graph, search = blocks(batch=32, width=64, layers=8, seq=8), planner()
    asked: list[tuple[int, ScheduleName | None]] = [(2, None), (4, "1f1b"), (2, "interleaved"), (4, "gpipe")]
    for stages, schedule in asked:
        plan = search.plan(graph, stages=stages, schedule=schedule)
        run = plan.execution
        assert run.schedule.num_stages == stages
        assert plan.mesh.num_devices * stages == 8
        assert schedule in (None, run.schedule.name)
        assert len(run.schedule.split) == run.schedule.num_virtual_stages
        assert plan.mesh.num_microbatches >= stages
        assert predict(plan.graph, search.cluster, run) == plan.prediction
        assert plan.prediction.bubble_s > 0
        assert plan.report.bound_s <= plan.prediction.step_s
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert (loaded.execution, loaded.asked) == (run, plan.asked)
        check_plan(loaded, graph, every_choice)


def test_without_being_asked_there_are_no_stages() -> None:
    graph, search = blocks(batch=32, width=64, layers=8, seq=8), planner(4)
    plain, one = search.plan(graph), search.plan(graph, stages=1)
    assert plain.execution.schedule.num_stages == one.execution.schedule.num_stages == 1
    assert all(other.execution.schedule.num_stages == 1 for other in plain.alternatives)
    assert plain.prediction == one.prediction


def test_stages_are_tried_unasked_where_gpus_wait() -> None:
    """A plan that takes little more than its work is left alone; so is one on CPUs, which share their memory's rate."""
    graph, tried = blocks(batch=16, width=1024, layers=8, seq=1), list[int]()
    for link_bytes_per_s, kind in ((1e7, "cuda"), (1e7, "cpu"), (1e12, "cuda")):
        flat = cluster(4, link_bytes_per_s=link_bytes_per_s)
        own = replace(flat, device=replace(flat.device, kind=kind))
        plan = Planner(own, every_choice).plan(graph)
        assert plan.asked.stages is None
        tried.append(plan.execution.schedule.num_stages)
    assert tried == [4, 1, 1]


def test_stages_are_taken_where_they_are_faster_and_left_where_not() -> None:
    """Between devices that send slowly, activations of a few examples are less than gradients of all weights."""
    for link_bytes_per_s, wins in ((1e7, True), (1e12, False)):
        search = planner(4, link_bytes_per_s=link_bytes_per_s)
        graph = blocks(batch=16, width=1024, layers=8, seq=1)
        plain, auto, *given = (search.plan(graph, stages=stages) for stages in (None, "auto", 2, 4))
        least_s = min(plan.prediction.step_s for plan in (plain, *given))
        assert auto.prediction.step_s == pytest.approx(least_s)
        assert (auto.execution.schedule.num_stages > 1) == wins
        few, none = (search.plan(graph, stages="auto", pins=pin) for pin in ("stages<=2", "no stages"))
        assert few.execution.schedule.num_stages == 1 + wins
        assert none.execution.schedule.num_stages == 1
        if wins:
            assert auto.prediction.step_s < 0.8 * plain.prediction.step_s
            assert {other.execution.schedule.num_stages for other in auto.alternatives} >= {1}


def test_a_pin_that_asks_for_stages_is_kept_to() -> None:
    """Also where a plan without stages is faster, and where nothing else asks for any."""
    graph, search = blocks(batch=16, width=1024, layers=8, seq=1), planner(4, link_bytes_per_s=1e12)
    assert search.plan(graph, stages="auto").execution.schedule.num_stages == 1
    asked: list[tuple[Stages | None, str, int]] = [
        ("auto", "stages>=2", 2), (None, "stages=4", 4), ("auto", "stages=2", 2),
    ]  # fmt: skip
    for stages, pin, least in asked:
        plan = search.plan(graph, stages=stages, pins=pin)
        assert plan.execution.schedule.num_stages == least
        assert plan.asked.pins == (pin,)
    with pytest.raises(PlanError, match="no mesh of 4 devices keeps to all that is asked for"):
        search.plan(graph, stages=2, pins="x>=3")


def test_stages_are_tried_where_nothing_fits_without() -> None:
    """None of these sizes is a multiple of three: stages alone divide the memory by that."""
    graph = blocks(batch=1, width=65, layers=9, seq=7)
    alone = planner(3).plan(graph)
    assert alone.execution.schedule.num_stages == 1
    memory_bytes = round(0.5 * alone.prediction.memory.total_bytes)
    found = planner(3, memory_bytes=memory_bytes).plan(graph)
    assert found.execution.schedule.num_stages > 1
    assert found.prediction.memory.total_bytes <= found.report.limit_bytes
    refused = planner(3, memory_bytes=memory_bytes).plan(graph, stages=1)
    assert refused.execution.schedule.num_stages == 1
    assert refused.prediction.memory.total_bytes > refused.report.limit_bytes


@each(
    ("asked", "message"),
    [
        ({"stages": 3}, "stages=3 does not divide the 8 devices of cluster test"),
        ({"stages": 8}, "stages=8: the model has 4 blocks to put on them; choose fewer"),
        ({"stages": "auto", "mesh": Mesh.of(x=4)}, "stages='auto' with a mesh, which is that of one stage"),
        (
            {"pins": "stages<=2", "stages": 4},
            "pin 'stages<=2': it bounds what is chosen, but stages=4 is given; leave one",
        ),
        (
            {"stages": 4, "schedule": "interleaved"},
            "8 virtual stages, but the model has only 6 sections to put on them",
        ),
        ({"pins": "stages>=8"}, "pin 'stages>=8': of the numbers of stages that are possible, [1, 2, 4], it"),
        ({"pins": "stages=2", "mesh": Mesh.of(x=8)}, "pin 'stages=2': of the numbers of stages that are possible, [1]"),
        ({"stages": 0}, "stages: expected a positive integer, got 0"),
        ({"schedule": "1f1b"}, "schedule='1f1b' without stages=: it is that of pipeline stages; give both"),
        ({"stages": 2, "schedule": "2f2b"}, "schedule: expected one of"),
        ({"stages": 2, "mesh": Mesh.of(x=8)}, "2 stages of mesh [x=8] have 16 devices, cluster test has 8"),
        ({"stages": [8]}, "stages=[8]: expected the devices of each of several stages; give two or more"),
        ({"stages": [4, 0]}, "stages: expected a positive integer, got 0"),
        ({"stages": [8, 4]}, "stages=[8, 4] have 12 devices, cluster test has 8"),
        ({"stages": [4, 1, 1, 1, 1]}, "stages=[4, 1, 1, 1, 1]: the model has 4 blocks to put on them"),
        ({"stages": [5, 3]}, "stages=[5, 3]: no mesh of 5 devices has a first axis that can be cut to all of these"),
        ({"stages": [4, 2, 2], "pins": "stages<=2"}, "but stages=[4, 2, 2] is given; leave one out"),
        (
            {"stages": [6, 2], "mesh": Mesh.of(x=2, y=3)},
            "stages of 6 + 2 devices on mesh [x=2, y=3]: it has to be that of the largest, with 6 devices, and the oth",
        ),
        ({"stages": [4, 4], "mesh": Mesh.of(x=2)}, "2 stages of mesh [x=2] have 4 devices, cluster test has 8"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardwrightError) as error:
        planner().plan(blocks(batch=32, layers=4), **asked)
    assert message in str(error.value)


def test_what_does_not_run_in_stages_is_not_laid_out_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """SearchOptions for, it is refused; where the search chooses, it takes none."""
    graph = blocks(batch=16, width=1024, layers=8, seq=1)
    search = Planner(cluster(4, link_bytes_per_s=1e7), every_choice, precision="amp_fp16")
    assert search.plan(graph, stages=2).execution.schedule.num_stages == 2
    monkeypatch.setattr(search_planner, "not_run", lambda graph, precision: f"{precision} does not run in stages")
    with pytest.raises(PlanError, match="amp_fp16 does not run in stages"):
        search.plan(graph, stages=2)
    assert search.plan(graph, stages="auto").execution.schedule.num_stages == 1


def test_a_file_of_other_stages_is_refused() -> None:
    graph, search = blocks(batch=32, width=64, layers=8, seq=8), planner()
    plan = search.plan(graph, stages=2, schedule="1f1b", mesh=Mesh.of(x=4))
    data = plan.to_json()
    for change, message in (
        ({"num_stages": 4, "split": [2, 2, 2, 4]}, "4 stages of mesh"),
        ({"split": None}, "execution.split: expected how many sections"),
        ({"split": [1]}, "Execution.split: expected a number of sections for each of the 2"),
    ):
        execution = {k: v for k, v in {**data["execution"], **change}.items() if v is not None}
        with pytest.raises(PlanError, match=message.replace(".", r"\.")):
            Plan.from_json({**data, "execution": execution})
    wrong = replace(plan, execution=plan.execution.having(split=(1, 1)))
    with pytest.raises(PlanError, match="split: expected 2 positive numbers that add up to"):
        check_plan(wrong, graph, every_choice)


def test_stages_that_do_not_compute_what_is_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, search = blocks(batch=32, width=64, layers=8, seq=8), planner()
    plan, with_sends = search.plan(graph, stages=2, schedule="1f1b", mesh=Mesh.of(x=4)), Cut.with_sends

    def broken(own: Cut) -> Graph:
        """Without a block: whoever reads its end reads its start."""
        sent = with_sends(own)
        last = [n for n in sent.nodes if n.op == "relu"][-1]
        rest = (n for n in sent.nodes if n is not last)
        swapped = (replace(n, inputs=tuple(last.inputs[0] if i == last.name else i for i in n.inputs)) for n in rest)
        return replace(sent, nodes=tuple(swapped))

    check_plan(plan, graph, every_choice)
    monkeypatch.setattr(Cut, "with_sends", broken)
    with pytest.raises(PlanError, match=r"its stages do not compute the captured graph: .* the model %.* = relu\(\)"):
        check_plan(plan, graph, every_choice)


def test_stages_that_wait_for_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, search = blocks(batch=32, width=64, layers=8, seq=8), planner()
    plan = search.plan(graph, stages=2, schedule="1f1b", mesh=Mesh.of(x=4))

    def broken(schedule: Schedule, num_microbatches: int) -> list[list[Item]]:
        """The first stage begins with what the second one gives."""
        first, *rest = orders(schedule, num_microbatches)
        backward = next(item for item in first if item.direction == "backward")
        return [[backward, *(item for item in first if item != backward)], *rest]

    monkeypatch.setattr("shardwright.search.check.orders", broken)
    with pytest.raises(PlanError, match=r"plan for .*: schedule: .* waits for ever"):
        check_plan(plan, graph, every_choice)


def climbed(
    stages: Stages,
    floors_s: dict[int, float],
    steps_s: dict[int, float],
    too_large: Sequence[int] = (),
    recompute: Recompute = "none",
    inner_s: Callable[[int], float] = lambda inner: 1e-3 * abs(inner - 2),
) -> tuple[list[int], list[tuple[int, tuple[int, ...], int]]]:
    """The numbers of stages of the plans that come, and the ways that are tried, where numbers decide alone.

    `inner_s`: what the size of the inner axis adds to floors.
    """
    graph, own, tried = (
        blocks(batch=64, width=64, layers=8, seq=8),
        planner(16),
        list[tuple[int, tuple[int, ...], int]](),
    )
    kept = Pins.of(graph, own.cluster, SearchOptions(stages=stages), None)

    class Told(Stager):
        def _may_win(self, stages: int) -> bool:
            return stages in floors_s

        def _floor_s(self, space: Space, count: int) -> float:
            return floors_s[space.pipeline.stages] + inner_s(space.mesh.sizes[-1]) + 1e-4 / count

        def _best(self, way: _Way) -> Any:
            stages, count = way.space.pipeline.stages, self._counts(way.space)[way.number]
            tried.append((stages, way.space.mesh.sizes, count))
            prediction = SimpleNamespace(
                step_s=steps_s[stages] + 1e-3 * len(tried), memory=SimpleNamespace(total_bytes=100 - stages)
            )
            mesh, fits = Mesh(("mb", *way.space.mesh.names), (count, *way.space.mesh.sizes)), stages not in too_large
            run = Execution(recompute=recompute)
            return SimpleNamespace(
                fits=fits, prediction=prediction, mesh=mesh, stages=stages, execution=run, is_tight=False
            )

    tuner: Any = Tuner(own.solver, graph, own.execution, kept, own.progress)
    tuner.told = lambda candidate: candidate
    found: Any = list(Told(tuner, inf).plans())
    return [candidate.stages for candidate in found], tried


def test_numbers_of_stages_are_climbed_from_the_least_floor() -> None:
    """More or fewer while steps get shorter; the first way of another number is like the best."""
    floors_s = {2: 3.0, 4: 2.0, 8: 2.5}
    found, tried = climbed("auto", floors_s, {2: 3.0, 4: 5.0, 8: 6.0})
    assert found == [4, 8, 2]
    assert list(dict.fromkeys(stages for stages, *_ in tried)) == [4, 8, 2]
    assert len({sizes for stages, sizes, _ in tried if stages == 8}) == 1
    assert next(way for way in tried if way[0] == 4)[1:] == ((2, 2), 16)
    assert next(way for way in tried if way[0] == 2)[1:] == ((4, 2), 8)
    found, tried = climbed("auto", floors_s, {2: 3.0, 4: 5.0, 8: 4.0})
    assert found[:2] == [4, 8]
    order = [stages for stages, *_ in tried]
    assert order.index(2) > order.index(8)  # by itself, at the end


def test_a_number_of_stages_all_of_whose_meshes_are_unlikely_has_one() -> None:
    """That whose inner axis is nearest to the likeliest one of another number."""
    found, tried = climbed("auto", {2: 3.0, 4: 1.0}, {2: 5.0, 4: 4.0}, inner_s=lambda inner: 0.2 * abs(inner - 8))
    assert found[0] == 4
    assert next(sizes for stages, sizes, _ in tried if stages == 4) == (4,)


def test_so_many_meshes_that_are_no_better_end_a_number_of_stages() -> None:
    found, tried = climbed(2, {2: 2.0}, {2: 3.0})
    assert (found, len({sizes for _, sizes, _ in tried})) == ([2], 1 + _PATIENCE)


def test_where_memory_decides_more_microbatches_follow() -> None:
    """Else fewer too; once the numbers of a mesh are no better than the first, only that in which stages idle least."""
    ways = [climbed(2, {2: 2.0}, {2: 3.0}, recompute=mode)[1] for mode in ("none", "full")]
    counts, tight = ([count for _, sizes, count in tried if sizes == tried[0][1]] for tried in ways)
    assert counts[0] == tight[0]
    assert min(counts) < counts[0] < max(counts)
    assert tight == sorted(tight)
    assert len(tight) == 3


def test_more_microbatches_follow_where_no_number_of_them_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "crowding", lambda tuner, space, mode, count: 1e9 / count)
    for too_large in ((), (2,)):
        _, tried = climbed(2, {2: 2.0}, {2: 3.0}, recompute="full", too_large=too_large)
        counts = [count for _, sizes, count in tried if sizes == tried[0][1]]
        assert counts[:2] == [8, 16]


def test_what_lies_beyond_a_worse_mesh_is_left_out() -> None:
    """As seen from the best: nothing on its other side, nor where there is none that is worse."""
    left = [[i for i in (1, 2, 4, 8, 16) if not _is_beyond(i, 4, worse)] for worse in ((), (2,), (8,), (4, 1, 16))]
    assert left == [[1, 2, 4, 8, 16], [4, 8, 16], [1, 2, 4], [2, 4, 8]]


def test_where_no_mesh_is_likely_those_that_are_known_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, search = blocks(batch=32, width=64, layers=8, seq=8), planner()
    monkeypatch.setattr(Stager, "_likely", lambda *_: [])
    assert search.plan(graph, pins="stages>=2").execution.schedule.num_stages > 1


def test_microbatches_begin_where_there_is_room_for_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no number of them leaves room, as many as else, and something is made again."""
    graph, own = blocks(batch=64, width=64, layers=8, seq=8), planner(8)
    kept = Pins.of(graph, own.cluster, SearchOptions(stages=2), None)
    (spaces,) = kept.staged.values()
    space, started = next(s for s in spaces if len(s.mesh) == 1), list[tuple[list[int], bool]]()
    for room in (1e9, 64.0, 1.0):
        tuner = Tuner(own.solver, graph, own.execution, kept, own.progress)
        monkeypatch.setattr(tuner, "crowding", lambda space, mode, count, most=room: 128 / (count * most / 8))
        stager = Stager(tuner, inf)
        counts = stager._counts(space)
        found = [counts[way.number] for way in stager._first(space)]
        started.append((found, stager._is_crowded(space, found[0])))
        plain_s = stager._floor_s(space, found[0])
        assert stager._way(space, counts.index(found[0])).floor_s == plain_s * (_AGAIN if started[-1][1] else 1.0)
    assert started == [([8], False), ([16], False), ([8], True)]


def test_no_layouts_keep_less_than_their_least() -> None:
    """Where that is more than there is room for, nothing is found within memory."""
    graph, run, solver = blocks(batch=64, width=64, layers=4, seq=64), Execution(), Solver(cluster(4), every_choice)
    asked: Any = Folded(graph), Mesh.of(x=4), ("free",), run, "zero-3"
    problem, eliminator = solver.problem(*asked)
    context, stored = solver.cluster.device.context_bytes, stored_bytes(problem)
    least = least_bytes(problem)
    assert stored < least
    for share, fits in ((0.99, False), (1.01, True)):
        limit = stored + share * (least - stored)
        small = solver.within(round(limit + context))
        assert small.crowding(problem, run) == pytest.approx(1 / share, rel=1e-4)
        assert within_memory(problem, eliminator, limit, inf).fits == fits
    assert solver.within(round(stored)).crowding(problem, run) == inf


def test_where_the_likeliest_number_of_stages_does_not_fit_others_are_tried() -> None:
    floors_s = {2: 3.0, 4: 2.0, 8: 2.5}
    found, tried = climbed("auto", floors_s, dict.fromkeys(floors_s, 5.0), too_large=(2, 4))
    assert 8 in found
    assert {stages for stages, *_ in tried} >= {4, 8}


def test_a_mesh_is_judged_by_its_best_number_of_microbatches() -> None:
    """One whose devices have no example each in the number that is tried first may be the best in fewer."""
    graph, own = blocks(batch=16, width=64, layers=8, seq=8), planner(8)
    kept = Pins.of(graph, own.cluster, SearchOptions(stages=2), None)

    class Told(Stager):
        def _floor_s(self, space: Space, count: int) -> float:
            return 1.0 if (space.mesh.sizes, count) == ((4,), 4) else 2.0 + 1 / len(space.mesh)

    stager = Told(Tuner(own.solver, graph, own.execution, kept, own.progress), inf)
    (spaces,) = kept.staged.values()
    found = {(way.space.mesh.sizes, way.number): way.floor_s for way in stager._likeliest(spaces)}
    assert min(found.values()) == 1.0


def test_no_more_chunks_are_interleaved_than_there_are_blocks() -> None:
    """What lies between blocks may be cut otherwise where a few of them stand for all."""
    graph, own = blocks(batch=18, width=64, layers=5, seq=8), planner(3)
    tuner = Tuner(
        own.solver, graph, own.execution, Pins.of(graph, own.cluster, SearchOptions(stages=3), None), own.progress
    )
    stager = Stager(tuner, inf)
    found = own.plan(graph, stages=3, schedule="1f1b", microbatches=6, compared=False)
    whole = own.solver.solve(tuner.folded, found.mesh, ("data",), "test", found.execution)
    assert stager._ordered(whole, Pipeline(3, "1f1b")) is not None
    assert stager._ordered(whole, Pipeline(3, "interleaved", 2)) is None  # six of the seven sections that there are
    stager._num_blocks += 1
    assert stager._ordered(whole, Pipeline(3, "interleaved", 2)) is not None


def test_stages_that_no_number_of_microbatches_divides_are_not_interleaved() -> None:
    """It says so, and what to do."""
    graph, search = blocks(batch=32, width=64, layers=6, seq=8), planner(6)
    with pytest.raises(PlanError, match=r"batch of 32 is cut into no number .* multiple of the 6 stages; choose"):
        search.plan(graph, stages=6, schedule="interleaved", compared=False)


def test_what_steps_took_of_their_floors_says_what_loses() -> None:
    """Half of what is above the floor may be saved; while no step is known, a floor may be a little too high."""
    graph, own = blocks(batch=16, width=64, layers=8, seq=8), planner(8)
    kept = Pins.of(graph, own.cluster, SearchOptions(stages=2), None)
    stager = Stager(Tuner(own.solver, graph, own.execution, kept, own.progress), 10.0)
    ((space, *_),) = kept.staged.values()
    for over, floors_s in ((inf, [7.0, 8.0, 9.0, 10.0]), (1.6, [7.0]), (0.5, [7.0, 8.0, 9.0])):
        stager._over = over
        assert [f for f in (7.0, 8.0, 9.0, 10.0, inf) if not stager._loses(_Way(f, space, 0))] == floors_s


def test_unasked_stages_are_tried_where_a_step_is_far_from_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it will be once some blocks keep more."""
    search, began = Planner(Cluster.preset("dgx-h100"), every_choice), list[float]()
    solver, pins = search.solver, SimpleNamespace(asked=NOTHING)
    own = {"folded": Folded(blocks()), "ideal_s": lambda mode: 1.0}
    tuner: Any = SimpleNamespace(solver=solver, pins=pins, modes=["none"], told=None, **own)
    slow: Any = SimpleNamespace(fits=True, prediction=SimpleNamespace(step_s=1.4))

    def stager(tuner: object, fastest_s: float) -> Any:
        began.append(fastest_s)
        return SimpleNamespace(plans=lambda: iter(()), by_hand=lambda: iter(()), tried=[])

    monkeypatch.setattr("shardwright.search.tree.planner.Stager", stager)
    for mixed_s in (1.02, 1.3):
        fitted: Any = SimpleNamespace(candidate=slow, mixed_s=lambda limit_bytes, own_s=mixed_s: own_s)
        search._staged(tuner, [slow], [fitted], Stop(None), needed=False, compared=True)
    assert began == [1.3]


def test_plans_with_stages_are_compared_with_the_best_by_hand_that_has_them() -> None:
    """ZeRO-1 and tensor parallelism in equal stages: as good as the best of all ways to run them, found one by one."""
    graph, search = blocks(batch=32, width=64, layers=8, seq=8), planner()
    for stages, microbatches in ((2, None), (4, 8), (8, None)):
        plan = search.plan(graph, stages=stages, microbatches=microbatches)
        (other,) = (a for a in plan.alternatives if "search on" not in a.name and a.execution.schedule.num_stages > 1)
        assert f"pipeline {stages} " in other.name
        assert other.execution.schedule.name in ("1f1b", "interleaved")
        assert (other.execution.schedule.split, other.execution.schedule.num_stages) == ((), stages)
        assert set(other.lifetimes) <= {"zero-1"}
        assert other.prediction.step_s >= plan.prediction.step_s
        own = search.solver
        found = list[float]()
        for count in [microbatches] if microbatches else [4, 8, 16, 32]:
            for space in staged_by_hand(search.cluster, Pipeline(stages)):
                mesh = Mesh(("mb", *space.mesh.names), (count, *space.mesh.sizes))
                if 32 // count % space.data_degree or count < stages:
                    continue
                run = space.run(Execution(), "none")
                c = own.solve(fold(graph), mesh, space.roles, space.name, run, space.zeros, "zero-1")
                found.append(c.prediction.step_s)
                for chunks in (2, 4) if count % stages == 0 else ():
                    with suppress(PlanError):
                        order = run.having(schedule="interleaved", chunks_per_stage=chunks)
                        found.append(own.predicted(c.graph, order, fold(graph).repeats).step_s)
        assert other.prediction.step_s == pytest.approx(min(found), rel=1e-9)


def test_by_hand_the_least_that_has_to_be_made_again_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for all values, what makes all of them again is not tried before what makes some."""
    graph, own, tried = blocks(batch=64, width=64, layers=8, seq=8), planner(8), list[object]()
    kept = Pins.of(graph, own.cluster, SearchOptions(stages=2, schedule="1f1b"), None)
    tuner: Any = Tuner(own.solver, graph, own.execution, kept, own.progress)
    tuner.modes = ["none", "selective", "full"]
    stager, space = Stager(tuner, inf), staged_by_hand(own.cluster, Pipeline(2))[0]

    def solve(folded: object, mesh: object, roles: object, name: object, run: Execution, *rest: object) -> object:
        tried.append(run.recompute)
        memory = SimpleNamespace(total_bytes=0)
        return SimpleNamespace(
            fits=run.recompute == "selective", prediction=SimpleNamespace(memory=memory, device_bytes=1)
        )

    monkeypatch.setattr(own.solver, "solve", solve)
    for crowding, modes in ((0.5, ["none", "selective"]), (2.0, ["selective"])):
        tried.clear()
        monkeypatch.setattr(tuner, "crowding", lambda *_, share=crowding: share)
        list(stager._ways_by_hand(space, 8))
        assert tried == modes


def test_by_hand_larger_groups_of_tensor_parallelism_are_tried_where_others_do_not_fit() -> None:
    """Each device has less of the weights; fewer examples, or other stages, may fit as well."""
    graph, own = blocks(batch=64, width=64, layers=8, seq=8), planner(8)
    kept = Pins.of(graph, own.cluster, SearchOptions(stages=2), None)
    stager = Stager(Tuner(own.solver, graph, own.execution, kept, own.progress), inf)
    wide, narrow = (s for s in staged_by_hand(own.cluster, Pipeline(2)) if len(s.mesh) == 1)
    other = next(s for s in staged_by_hand(own.cluster, Pipeline(4)) if len(s.mesh) == 1)
    counts = stager._counts(wide)
    least, most = _Way(1.0, wide, 0), _Way(1.0, wide, len(counts) - 1)
    assert [stager._needs_more(way, most) for way in (least, most)] == [True, True]
    assert not stager._needs_more(most, least)
    assert not stager._needs_more(_Way(1.0, narrow, 0), least)
    assert not stager._needs_more(_Way(1.0, other, 0), least)


def test_stages_by_hand_keep_to_machines_and_have_all_devices() -> None:
    boxes = Cluster.preset("dgx-h100", 4)
    found = {s.name: (s.mesh.sizes, s.roles) for s in staged_by_hand(boxes, Pipeline(2))}
    assert found == {
        "data 16 x pipeline 2 (1f1b)": ((16,), ("zero",)),
        "data 8 x tensor 2 x pipeline 2 (1f1b)": ((8, 2), ("zero", "tensor")),
        "data 4 x tensor 4 x pipeline 2 (1f1b)": ((4, 4), ("zero", "tensor")),
        "data 2 x tensor 8 x pipeline 2 (1f1b)": ((2, 8), ("zero", "tensor")),
    }
    assert [s.name for s in staged_by_hand(boxes, Pipeline(4))][-1] == "tensor 8 x pipeline 4 (1f1b)"
    assert [s.name for s in staged_by_hand(boxes, Pipeline(32))] == ["pipeline 32 (1f1b)"]


def test_a_plan_by_hand_with_stages_is_chosen_where_it_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not against a mesh or pins that it does not know; nor is it made where nothing is compared."""
    graph, real = blocks(batch=32, width=64, layers=8, seq=8), Stager.by_hand

    def quick(self: Stager) -> Iterator[Candidate]:
        for found in real(self):
            yield replace(found, prediction=replace(found.prediction, step_s=1e-9))

    monkeypatch.setattr(Stager, "by_hand", quick)
    again: RecomputeMode = {"layers.0": "full"}  # blocks told apart are not folded, nor solved once more
    plan = planner().plan(graph, stages=2, recompute=again)
    assert plan.mesh.names[1] in ("dp", "tp")
    assert all(" x pipeline 2" not in a.name for a in plan.alternatives)
    kept: list[dict[str, Any]] = [{"mesh": Mesh.of(x=2, y=2)}, {"pins": "x=2"}]
    for asked in kept:
        plan = planner().plan(graph, stages=2, recompute=again, **asked)
        assert plan.mesh.names[1] == "x"
        assert any(" x pipeline 2" in a.name for a in plan.alternatives)
    plan = planner().plan(graph, stages=2, recompute=again, compared=False)
    assert not any(" x pipeline 2" in a.name for a in plan.alternatives)


def test_stages_have_as_many_devices_as_is_asked_for(tmp_path: Path) -> None:
    """The largest has most of the blocks; what is left of the cluster stays idle; equal numbers are plain stages."""
    graph = blocks(batch=32, width=64, layers=8, seq=8)
    asked: list[tuple[tuple[int, ...], int, dict[str, Any]]] = [
        ((4, 2), 6, {}), ((2, 4), 8, {"mesh": Mesh.of(x=2, y=2)}), ((2, 1, 1), 4, {"schedule": "1f1b"}),
        ((4, 2), 6, {"schedule": "interleaved", "microbatches": 4}),
    ]  # fmt: skip
    for stages, num_devices, options in asked:
        plan = planner(num_devices).plan(graph, stages=stages, **options)
        run = plan.execution
        assert tuple(mesh.num_devices for mesh in stage_meshes(plan.mesh, run)) == stages
        assert max(run.schedule.stage_sizes) == plan.mesh.devices.sizes[0]
        assert plan.cluster.num_devices == sum(stages)
        assert (plan.idle.num_devices if plan.idle else 0) == num_devices - sum(stages)
        assert predict(plan.graph, plan.cluster, run) == plan.prediction
        sections = [sum(run.schedule.split[stage :: len(stages)]) for stage in range(len(stages))]
        if run.schedule.chunks_per_stage == 1:
            assert max(sections) == sections[stages.index(max(stages))]
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        assert (loaded.execution, loaded.asked) == (run, plan.asked)
        assert loaded.asked.stages == stages
        check_plan(loaded, graph, every_choice)
    equal, plain = (planner().plan(graph, stages=stages) for stages in ((4, 4), 2))
    assert equal.execution == plain.execution


def test_a_file_of_other_sizes_is_refused() -> None:
    plan = planner(6).plan(blocks(batch=32, width=64, layers=8, seq=8), stages=(4, 2), mesh=Mesh.of(x=4))
    data = plan.to_json()
    assert data["execution"]["stage_sizes"] == [4, 2]
    for sizes, message in (
        ([4, 1], "have 5 devices, its cluster 6"),
        ([4, 3], "stage_sizes [4, 3]: expected divisors of the 4 devices along 'x' of mesh"),
        ([2, 2], "the largest of them 4; give the mesh of the largest stage"),
        ([4], "stage_sizes: expected a number of devices for each of the 2 stages, got"),
        ([4, 0], "execution.stage_sizes[1]: expected at least 1, got 0"),
    ):
        wrong = {**data, "execution": {**data["execution"], "stage_sizes": sizes}}
        with pytest.raises(PlanError) as error:
            Plan.from_json(wrong)
        assert message in str(error.value)


def test_parts_of_a_cluster_of_unlike_numbers_of_devices_may_be_stages() -> None:
    """Unasked they are tried, beside stages of equal sizes; as each is run on its own devices, the fast have more."""
    graph, unit = blocks(batch=32, width=64, layers=11, seq=64), mixed(times=3.0)
    slow, fast = (replace(cluster(2), device=part.device) for part in unit.parts)
    joined = Cluster.join([slow, slow, fast], Level("net", 3, 1e7, 1e-5))
    merged = replace(
        joined, parts=(replace(joined.parts[0], levels=(*slow.levels, Level("net", 2, 1e7, 1e-5))), joined.parts[2])
    )
    assert [part.num_devices for part in merged.parts] == [4, 2]
    assert [*Pins.of(graph, merged, NOTHING).staged] == [2, 3, 6, (4, 2)]
    assert [*Pins.of(graph, joined, NOTHING).staged] == [2, 3, 6]
    search = Planner(merged, every_choice)
    plan = search.plan(graph, stages=(4, 2), schedule="1f1b", compared=False)
    assert plan.execution.schedule.split[1] > 4
    check_plan(plan, graph, every_choice)
    best = search.plan(graph, compared=False)
    assert best.prediction.step_s <= plan.prediction.step_s * 1.001
