"""A search that is ended early: by time, or by Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from shardwright.pcg.checks import FieldError
from shardwright.pcg.layout import R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.types import TensorType
from shardwright.reports.plan import PlanReport
from shardwright.search.check import check_plan
from shardwright.search.exact import eliminate
from shardwright.search.exact.building import Moved, ProblemBuilder
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.pruning import relax
from shardwright.search.exact.solving import Candidate, Solver
from shardwright.search.request.anytime import Stop
from shardwright.search.tree.planner import Planner
from shardwright.search.tree.ways import Way, Ways
from tests.search.graphs import blocks, cluster, every_choice


def slow(number: int) -> Iterator[int]:
    for i in range(number):
        time.sleep(0.02)
        yield i


def interrupted() -> Iterator[int]:
    yield 0
    raise KeyboardInterrupt


def test_without_a_limit_all_is_made() -> None:
    stop = Stop()
    assert list(stop.within(slow(3))) == [0, 1, 2]
    assert (stop.reached, stop.reason) == (False, "")


def test_after_the_limit_only_what_is_needed_is_made() -> None:
    stop = Stop(0.01)
    assert list(stop.within(slow(3))) == [0]
    assert stop.reason == "the time limit of 0.01 s"
    assert list(stop.within(slow(3))) == []
    assert list(stop.within(slow(3), needed=True)) == [0]


def test_what_nobody_needs_is_given_up_within_a_try() -> None:
    """Also by what a generator within makes; what is needed is made to its end."""
    stop, begun = Stop(0.05), list[int]()

    def trying() -> Iterator[int]:
        for number in range(3):
            begun.append(number)
            for _ in slow(4):
                stop.check()
            yield number

    assert list(stop.within(trying(), needed=True)) == [0]
    assert begun == [0]
    stop, begun = Stop(0.03), []
    inner = (list(stop.within(trying())) for _ in range(2))
    assert list(stop.within(inner, needed=True)) == [[]]
    assert begun == [0]
    stop.check()


def test_each_part_of_long_work_asks_whether_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a problem, eliminating its variables, and bounding its choices; what was given up can be made later."""
    graph, mesh = Folded(blocks(16)), Mesh.of(x=2, y=4)

    class OverError(Exception):
        pass

    def tried(most: int | None) -> tuple[int, float]:
        asked = [0]

        def check() -> None:
            asked[0] += 1
            if asked[0] == most:
                raise OverError

        solver = Solver(cluster(8), every_choice).until(check)
        with suppress(OverError):
            solver.floor_s(graph, mesh, ("free", "free"), Execution(), "zero-3")
        first = asked[0]
        return first, solver.until(lambda: None).floor_s(graph, mesh, ("free", "free"), Execution(), "zero-3")

    def over() -> None:
        raise OverError

    with pytest.raises(OverError):
        relax([np.zeros(2)] * 2, {(0, 1): np.zeros((2, 2))}, check=over)
    for small in (True, False):
        monkeypatch.setattr("shardwright.search.exact.eliminate._is_small", lambda order, small=small: small)
        monkeypatch.setattr(eliminate.Elimination, "is_series", lambda *of: False)
        asked, floor_s = tried(None)
        assert asked > 100
        for most in (1, asked // 2, asked - 1, asked):
            assert tried(most) == (most, pytest.approx(floor_s)), (small, most)


def test_the_cheapest_moves_between_many_layouts_may_be_given_up() -> None:
    asked, kind = list[None](), TensorType((16, 16), "float32")
    moved = Moved(stored=False, view=False, again=False, summed="", zero="kept", twice=False, late=False, together=0.0)
    builder = ProblemBuilder(cluster(8), Mesh.of(x=2, y=4), every_choice, check=lambda: asked.append(None))
    closure = builder.close(kind, moved, ((R, S(0), S(1)),) * 2)
    assert len(asked) == len(closure.states) == 9


def test_ctrl_c_ends_the_search_once_there_is_something() -> None:
    stop = Stop()
    assert list(stop.within(interrupted(), needed=True)) == [0]
    assert stop.reason == "Ctrl-C"
    later = interrupted()
    next(later)
    with pytest.raises(KeyboardInterrupt):
        list(Stop().within(later, needed=True))


@pytest.mark.parametrize("limit_s", [0, -1.0, float("nan"), "soon"])
def test_a_limit_is_a_positive_number(limit_s: float) -> None:
    with pytest.raises(FieldError, match="time_limit_s: expected a positive number"):
        Stop(limit_s)


def test_a_plan_that_was_stopped_says_so_and_is_bounded_over_all_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By time after its first candidate; by Ctrl-C while the second mesh is searched."""
    graph, planner = blocks(16), Planner(cluster(8, link_bytes_per_s=1e10), every_choice)
    whole = planner.plan(graph)
    for mesh in (None, Mesh.of(x=8)):
        early = planner.plan(graph, mesh=mesh, time_limit_s=1e-6)
        check_plan(early, graph, every_choice)
        assert early.report.stopped == "the time limit of 1e-06 s"
        said = "ended by the time limit of 1e-06 s before it was through, may have left out some"
        assert said in " ".join(str(PlanReport(early)).split())
    assert early.report.num_meshes == 1
    for mesh in (Mesh.of(x=2, y=2, z=2), Mesh.of(x=8)):  # what is free takes long on many axes
        new = Planner(cluster(8, link_bytes_per_s=1e10), every_choice)
        found = new.plan(graph, mesh=mesh, time_limit_s=1e-6, compared=False)
        assert found.report.stopped
        roles = {own[3] for own in new.solver.known.problems if own[2] == found.mesh and not own[-1]}
        assert roles == {("zero",) * len(mesh)}, roles
    solved, searched = Ways.solved, list[object]()

    def ended(ways: Ways, way: Way) -> Candidate:
        searched.extend([way.space] if "search" in way.space.name and way.space not in searched else [])
        if len(searched) == 2:
            raise KeyboardInterrupt
        return solved(ways, way)

    monkeypatch.setattr(Ways, "solved", ended)
    stopped = planner.plan(graph)
    assert stopped.report.stopped == "Ctrl-C"
    assert stopped.report.left > whole.report.left == 0
    assert stopped.report.bound_s == pytest.approx(whole.report.bound_s)
    of_meshes = [{a.name for a in p.alternatives if "search" in a.name} for p in (stopped, whole)]
    assert len(of_meshes[0]) <= 1 < len(of_meshes[1])
