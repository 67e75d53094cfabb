"""Of models of many operators that do not repeat little is tried, in one way each; and a plan and a true bound come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardwright.pcg.graph import Node
from shardwright.pcg.inference import infer
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT
from shardwright.pcg.step.lifetimes import Zero, with_lifetimes
from shardwright.pcg.types import TensorType
from shardwright.reports.facts import fits
from shardwright.search import effort
from shardwright.search.check import check_plan
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.solving import Candidate, Solver
from shardwright.search.exact.within import stored_bytes
from shardwright.search.request.options import NOTHING, SearchOptions
from shardwright.search.request.pins import Pins
from shardwright.search.tree.byhand import by_people
from shardwright.search.tree.fitting import Fitter
from shardwright.search.tree.meshes import Meshes
from shardwright.search.tree.staging import Stages
from shardwright.search.tree.ways import Way, Ways, folded
from tests.search.graphs import blocks, every_choice, mlp
from tests.search.tree.test_ways import limited, ways_of
from tests.search.tree.test_ways import planner as planner_of

GRAPH = blocks(16, 16, layers=3, seq=16)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as large."""
    monkeypatch.setattr(effort, "MANY_NODES", 1)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """All that is solved."""
    found, solve = list[Candidate](), Solver.solve

    def noted(self: Solver, *args: Any, **kwargs: Any) -> Candidate:
        found.append(solve(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(Solver, "solve", noted)
    return found


def ways(limit_bytes: float = 0.0) -> Ways:
    search = planner_of(8, link_bytes_per_s=1e9)
    if limit_bytes:
        search = limited(search, limit_bytes)
    return ways_of(search, GRAPH)


def all_stored_bytes() -> float:
    """What one device would store."""
    own = ways()
    return own.solver.all_stored_bytes(own.folded)


def test_what_is_stored_is_what_the_problem_of_one_device_has() -> None:
    for graph in (GRAPH, blocks(16, 16, layers=8, seq=16)):
        search, folded = planner_of(8), fold(graph)
        one = stored_bytes(search.solver.problem(folded, Mesh.of(x=1), ("data",), DEFAULT, "zero-3")[0])
        assert search.solver.all_stored_bytes(folded) == one
        assert not search.solver.excess_bytes(one)


def test_as_many_nodes_as_are_left_after_folding_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the whole graph, on which a plan of a folded one is laid out."""
    deep, own = blocks(16, 16, layers=8, seq=16), planner_of(8).cluster
    left = len(fold(deep).graph.nodes)
    assert left < len(deep.nodes)
    for most, once in ((left, True), (left + 1, False)):
        monkeypatch.setattr(effort, "MANY_NODES", most)
        assert folded(deep, Pins.of(deep, own, NOTHING)).effort.is_least == once
        by_block = SearchOptions(recompute={"layers.*": "full"})
        assert folded(deep, Pins.of(deep, own, by_block)).effort.is_least
    assert not Folded(deep).effort.is_least


def test_each_way_is_tried_once(large: None, solved: list[Candidate]) -> None:
    """A plan by hand in the likeliest of its degrees; two meshes, of the same axes in two orders only one."""
    own = ways()
    by_hand = list(by_people(own))
    assert len(solved) == len(by_hand) == 5
    queue = Meshes(own, None, own.spaces)
    assert list(queue.run())
    assert len(solved) == len(by_hand) + len(queue.solved)
    sizes = [sorted(attempt.way.space.mesh.sizes) for attempt in queue.solved]
    assert len(sizes) == 2
    assert sizes[0] != sizes[1]
    assert all(c.fits for c in solved)


def test_fewer_nodes_are_tried_in_more_ways(solved: list[Candidate]) -> None:
    """That the test above can fail."""
    own = ways()
    queue = Meshes(own, None, own.spaces)
    assert list(queue.run())
    assert len(queue.solved) >= 3


def test_the_search_goes_on_until_something_fits_and_no_further(large: None, solved: list[Candidate]) -> None:
    most = planner_of(8).plan(GRAPH, recompute="none", microbatches=1).prediction.memory.total_bytes
    own = ways(0.45 * most)
    solved.clear()
    by_hand = list(by_people(own))
    for own_best in by_hand:
        tries = [c.fits for c in solved if c.name == own_best.name]
        assert tries == [False] * (len(tries) - 1) + [own_best.fits], "one try each, another where that does not fit"
        assert len(tries) == 1 or not tries[0]
    assert not all(c.fits for c in by_hand)
    space = next(space for space in own.spaces if len(space.mesh) == 2)
    queue = Meshes(own, None, [space])
    fits = [a.best.fits for a in queue.run() if a.way.space == space and not a.is_judged]
    assert fits == [False] * (len(fits) - 1) + [True]


def test_what_fits_with_parameters_gathered_again_is_found(large: None) -> None:
    """Where they cannot stay, though layouts are first chosen as if they could."""
    most = planner_of(8).plan(GRAPH, recompute="none", microbatches=1).prediction.memory.total_bytes
    search = limited(planner_of(8), 0.4 * most)
    assert search.plan(GRAPH, mesh=Mesh.of(x=2, y=4)).prediction.memory.total_bytes <= 0.4 * most


def test_a_plan_and_its_bound_are_true(large: None) -> None:
    graph, search = mlp(16, 64, 128, layers=2), planner_of(8)
    plan = search.plan(graph)
    check_plan(plan, graph, every_choice)
    assert fits(plan)
    assert plan.report.bound_s <= plan.prediction.step_s
    assert all(plan.prediction.step_s <= a.prediction.step_s for a in plan.alternatives if a.fits)


def test_what_each_keeps_is_looked_at_of_one_plan(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of none that would take longer, with everything kept, than a plan that fits."""
    walked, walk = list[Candidate](), Fitter.judged

    def judged(self: Fitter, candidate: Candidate, *args: Any) -> Candidate:
        walked.append(candidate)
        return walk(self, candidate, *args)

    monkeypatch.setattr(Fitter, "judged", judged)
    search = planner_of(8)
    most = search.plan(GRAPH, stages=1).prediction.memory.total_bytes
    assert not walked
    assert fits(limited(search, 0.45 * most).plan(GRAPH, stages=1))
    assert len({c.name for c in walked}) <= 1


@pytest.mark.parametrize("is_large", [True, False])
def test_where_nothing_can_fit_stages_are_not_tried(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal share of what is stored is too much. A large model is then not compared with plans by hand either."""
    tried = list[Stages]()
    init = Stages.__init__

    def noted(self: Stages, *args: Any) -> None:
        tried.append(self)
        init(self, *args)

    monkeypatch.setattr(Stages, "__init__", noted)
    monkeypatch.setattr(effort, "MANY_NODES", 1 if is_large else 2**12)
    graph = blocks(16, 16, layers=8, seq=16)
    search = planner_of(8)
    stored = search.solver.all_stored_bytes(fold(graph))
    context = search.cluster.device.context_bytes
    for times, hopeless in ((0.9, True), (1.1, False)):
        tried.clear()
        plan = limited(planner_of(8), context + times * stored / 8).plan(graph)
        assert not fits(plan)
        assert bool(tried) != hopeless, times
        assert plan.report.bound_s <= plan.prediction.step_s
        if hopeless:
            assert bool(plan.alternatives) != is_large


def test_what_does_not_fit_has_no_other_problem_built() -> None:
    own = ways(0.9 * all_stored_bytes() / 8)
    found = own.solved(Way(own.spaces[0], "full", 2))
    assert not found.fits
    assert {key[5] for key in own.solver.known.problems if key[4].recompute == "full"} == {found.priced}  # type: ignore[attr-defined]


def test_plans_by_hand_that_cannot_fit_are_left_out_where_one_that_fits_is_asked_for(solved: list[Candidate]) -> None:
    share, context = all_stored_bytes() / 8, ways().solver.cluster.device.context_bytes
    own = ways(context + 1.5 * share)
    able = [c.name for c in by_people(own, able=True)]
    assert "data parallel" not in able
    assert not any(c.name == "data parallel" for c in solved)
    assert {"ZeRO-3"} <= set(able)
    assert "data parallel" in {c.name for c in by_people(ways(context + 1.5 * share))}


def test_a_lifetime_changes_the_types_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what gathers a parameter and what is no longer the same is inferred anew."""
    spaces = [space for space in ways().spaces if len(space.mesh) == 1]
    graph, inferred = planner_of(8).plan(GRAPH, spaces=spaces).graph, list[str]()

    def noted(node: Node, operands: Sequence[TensorType], mesh: Mesh) -> TensorType:
        inferred.append(node.name)
        return infer(node, operands, mesh)

    monkeypatch.setattr("shardwright.pcg.graph.infer", noted)
    zeros: tuple[Zero, ...] = ("kept", "zero-3")
    for zero in zeros:
        inferred.clear()
        changed = with_lifetimes(graph, {leaf.name: zero for leaf in graph.leaves("parameter")})
        differ = [node.name for node in changed.nodes if graph.by_name.get(node.name) is not node]
        assert set(inferred) <= set(differ)
        assert len(inferred) < len(graph.nodes) / 2
        inferred.clear()
        assert replace(changed).types == changed.types
        assert len(inferred) == len(changed.nodes)
