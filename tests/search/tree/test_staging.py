"""Plans with pipeline stages: what the search tries of them, what it gives, and that files of them are checked."""

from __future__ import annotations

from collections.abc import Sequence
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
from shardwright.pcg.step.schedules import Item, orders
from shardwright.search.check import check_plan
from shardwright.search.effort import AGAIN
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.solving import Candidate, Solver
from shardwright.search.exact.within import least_bytes, stored_bytes, within_memory
from shardwright.search.plan import Plan
from shardwright.search.request.asked import RecomputeMode
from shardwright.search.request.asked import Stages as StagesLike
from shardwright.search.request.options import NOTHING
from shardwright.search.request.pins import Pins
from shardwright.search.request.spaces import Pipeline, staged_by_hand
from shardwright.search.tree import planner as search_planner
from shardwright.search.tree.attempts import Attempt
from shardwright.search.tree.fitting import Fitter
from shardwright.search.tree.planner import Planner
from shardwright.search.tree.staging import Orders, Stages, StagesByHand
from shardwright.search.tree.ways import Way, Ways
from tests.each import each
from tests.search.graphs import blocks, cluster, every_choice, mixed, planner
from tests.search.tree.test_ways import ways_of


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
    asked: list[tuple[StagesLike | None, str, int]] = [
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


class Numbers(Stages):
    """A queue where numbers decide alone: floors and steps by the number of stages; inner axes but 2 add to floors."""

    def __init__(self, floors_s: dict[int, float], steps_s: dict[int, float], too_large: Sequence[int] = ()) -> None:
        graph, own = blocks(batch=64, width=64, layers=8, seq=8), planner(16)
        self.floors_s, self.steps_s, self.too_large = floors_s, steps_s, too_large
        self.order = list[Way]()
        ways = ways_of(own, graph, stages="auto")
        super().__init__(ways, Fitter(own.solver, ways.folded, values=False), inf)

    def floor_s(self, way: Way) -> float:
        inner = abs(way.space.mesh.sizes[-1] - 2)
        return self.floors_s[way.space.pipeline.stages] + 1e-3 * inner + 1e-4 / way.many

    def plans(self, way: Way) -> list[Candidate]:
        stages = way.space.pipeline.stages
        self.order.append(way)
        memory: Any = SimpleNamespace(total_bytes=100 - stages)
        prediction: Any = SimpleNamespace(step_s=self.steps_s[stages] + 1e-3 * len(self.order), memory=memory)
        found: Any = SimpleNamespace(
            fits=stages not in self.too_large, prediction=prediction, is_tight=False, execution=Execution(),
            lifetimes="zero-1", name=way.space.name, mesh=way.space.mesh,
        )  # fmt: skip
        return [found]

    def judged(self, attempt: Attempt, fitter: Fitter) -> Attempt:
        return attempt

    def stages(self) -> list[int]:
        """The numbers of stages in the order in which they were solved first."""
        assert list(self.run())
        return list(dict.fromkeys(way.space.pipeline.stages for way in self.order))


def test_the_number_of_stages_of_the_least_floor_is_tried_first() -> None:
    """Others once their floors are the least; and none whose floor cannot beat the best step."""
    floors_s = {2: 3.0, 4: 2.0, 8: 2.5}
    assert Numbers(floors_s, {2: 9.0, 4: 9.0, 8: 9.0}).stages() == [4, 8, 2]
    assert Numbers(floors_s, {2: 9.0, 4: 2.1, 8: 9.0}).stages() == [4]


def test_what_steps_of_a_number_took_of_their_floors_says_what_loses() -> None:
    """A quarter of what is above the floor is taken for other meshes; while none is known, floors may be too high."""
    floors_s = {2: 1.0, 4: 1.06, 8: 9.0}
    assert Numbers(floors_s, {2: 1.1, 4: 1.0, 8: 9.0}).stages() == [2, 4]  # 0.95 of its floor is less than 1.1
    queue = Numbers({2: 1.0, 4: 9.0, 8: 9.0}, {2: 2.0, 4: 9.0, 8: 9.0})
    queue.fastest_s = 1.2
    assert queue.stages() == [2]
    assert len(queue.order) == 1  # as others are taken to need 1.25


def test_numbers_of_stages_that_fit_are_tried_where_the_likeliest_does_not() -> None:
    floors_s = {2: 3.0, 4: 2.0, 8: 2.5}
    assert set(Numbers(floors_s, dict.fromkeys(floors_s, 5.0), too_large=(2, 4)).stages()) == {2, 4, 8}


def test_from_a_mesh_its_neighbours_are_tried() -> None:
    """Those with the next smaller and larger inner axis, and as many microbatches as are best."""
    queue = Numbers({2: 1.0, 4: 9.0, 8: 9.0}, {2: 1.0, 4: 9.0, 8: 9.0})
    queue.stages()
    dimensions = {attempt.dimension for attempt in queue.attempts.values()}
    assert dimensions >= {"", "mesh", "microbatches"}
    assert all(attempt.origin in queue.attempts for attempt in queue.attempts.values() if attempt.dimension)


def test_microbatches_begin_where_there_is_room_for_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no number of them leaves room, as many as else, and something is made again."""
    graph, own = blocks(batch=64, width=64, layers=8, seq=8), planner(8)
    started, queue = list[list[int]](), Stages(*_fitted(own, graph, stages=2), inf)
    (line,) = queue.lines.values()
    space = next(s for s in line if len(s.mesh) == 1)
    for room in (1e9, 64.0, 1.0):
        monkeypatch.setattr(queue.ways, "crowding", lambda way, most=room: 128 / (way.many * most / 8))
        plain_s = queue.ways.floor_s(Way(space, "none", 8))
        found = list(queue.starts(space))
        started.append([way.many for way, _ in found])
        assert (found[0][1] > 0.99 * AGAIN * plain_s * share_of_step_of_zero_bubble(8, 2)) == (room == 1.0)
    assert started == [[8], [16], [8]]


def _fitted(own: Planner, graph: Graph, **asked: Any) -> tuple[Ways, Fitter]:
    ways = ways_of(own, graph, **asked)
    return ways, Fitter(own.solver, ways.folded, values=True)


def share_of_step_of_zero_bubble(many: int, stages: int) -> float:
    """What zero-bubble takes of the step that 1F1B takes."""
    return (1 + (stages - 1) / (3 * many)) / (1 + (stages - 1) / many)


def test_microbatches_that_turn_out_to_leave_no_room_give_way_to_more(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, own = blocks(batch=64, width=64, layers=8, seq=8), planner(8)
    queue = Stages(*_fitted(own, graph, stages=2), inf)
    monkeypatch.setattr(queue.ways, "crowding", lambda way: 1.2 if way.many < 32 else 0.9)
    assert list(queue.run())
    assert {way.many for way in queue.attempts} >= {8, 16, 32}


def test_no_more_chunks_are_interleaved_than_there_are_blocks() -> None:
    """What lies between blocks may be cut otherwise where a few of them stand for all."""
    graph, own = blocks(batch=18, width=64, layers=5, seq=8), planner(3)
    ways = ways_of(own, graph, stages=3)
    orders = Orders(ways)
    found = own.plan(graph, stages=3, schedule="1f1b", microbatches=6, compared=False)
    whole = own.solver.solve(ways.folded, found.mesh, ("data",), "test", found.execution)
    assert orders.ordered(whole, Pipeline(3, "1f1b")) is not None
    assert orders.ordered(whole, Pipeline(3, "interleaved", 2)) is None  # six of the seven sections that there are
    orders.num_blocks += 1
    assert orders.ordered(whole, Pipeline(3, "interleaved", 2)) is not None


def test_no_order_that_is_asked_for_beats_the_plan_where_messages_between_stages_are_slow() -> None:
    """Zero-bubble is far faster than 1F1B there, and the eager order, which hides the messages, than both."""
    graph, slow = blocks(batch=64, width=128, layers=5, seq=8), cluster(8, link_bytes_per_s=3e7)
    gpus = Planner(replace(slow, device=replace(slow.device, kind="cuda")), every_choice)
    names: tuple[ScheduleName | None, ...] = (None, "zero-bubble", "eager-1f1b")
    found = [gpus.plan(graph, stages=4, schedule=name, compared=False).prediction.step_s for name in names]
    assert found[0] <= found[2] < 0.95 * found[1]


def test_whole_blocks_leave_the_busiest_stage_more_than_an_equal_share() -> None:
    """Six blocks: a half each for two stages, two for each of four, where equal shares are of one and a half."""
    orders = Orders(ways_of(planner(8), blocks(batch=64, width=64, layers=6, seq=8)))
    work_s = orders.ways.work_by_block
    (block,), in_blocks = orders.ways.folded.repeats, 1 - work_s[""] / sum(work_s.values())
    assert 0.5 < in_blocks < 1
    assert work_s[block] == pytest.approx(in_blocks * sum(work_s.values()))
    assert orders.uneven(Pipeline(2)) == 1
    assert orders.uneven(Pipeline(4)) == pytest.approx(max(1.0, 4 * 2 / 6 * in_blocks))
    assert orders.uneven(Pipeline(4)) > 1


def test_where_stages_are_unlike_blocks_need_not_be_as_many() -> None:
    """Of five blocks, the machine with quicker devices has four: no stage waits for one with three."""
    graph, unlike = blocks(batch=256, width=128, layers=5, seq=8), Planner(mixed(times=4), every_choice)
    plan = unlike.plan(graph, stages=2, compared=False)
    orders = Orders(ways_of(unlike, graph, stages=2))
    assert orders.may_win(Pipeline(2), 1.001 * plan.prediction.step_s)
    assert Orders(ways_of(planner(6), graph)).uneven(Pipeline(2, devices=(4, 2))) == 1


def test_by_hand_the_least_that_has_to_be_made_again_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for all values, what makes all of them again is not tried before what makes some."""
    graph, own, tried = blocks(batch=64, width=64, layers=8, seq=8), planner(8), list[object]()
    ways, fitter = _fitted(own, graph, stages=2, schedule="1f1b")
    modes: list[RecomputeMode] = ["none", "selective", "full"]
    monkeypatch.setattr(ways, "modes", modes)
    queue, space = StagesByHand(ways, Stages(ways, fitter, inf)), staged_by_hand(own.cluster, Pipeline(2))[0]

    def solve(folded: object, mesh: object, roles: object, name: object, run: Execution, *rest: object) -> object:
        tried.append(run.recompute)
        memory = SimpleNamespace(total_bytes=0)
        return SimpleNamespace(
            fits=run.recompute == "selective", prediction=SimpleNamespace(memory=memory, device_bytes=1)
        )

    monkeypatch.setattr(own.solver, "solve", solve)
    for crowding, expected in ((0.5, ["none", "selective"]), (2.0, ["selective"])):
        tried.clear()
        monkeypatch.setattr(ways, "crowding", lambda way, share=crowding: share)
        queue.plans(Way(space, "none", 8))
        assert tried == expected


def test_stages_that_no_number_of_microbatches_divides_are_not_interleaved() -> None:
    """It says so, and what to do."""
    graph, search = blocks(batch=32, width=64, layers=6, seq=8), planner(6)
    with pytest.raises(PlanError, match=r"batch of 32 is cut into no number .* multiple of the 6 stages; choose"):
        search.plan(graph, stages=6, schedule="interleaved", compared=False)


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
    graph, real = blocks(batch=32, width=64, layers=8, seq=8), StagesByHand.plans

    def quick(self: StagesByHand, way: Way) -> list[Candidate]:
        return [replace(c, prediction=replace(c.prediction, step_s=1e-9)) for c in real(self, way)]

    monkeypatch.setattr(StagesByHand, "plans", quick)
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
