"""The queue of attempts: the likeliest first, neighbours of what comes near, and an end where nothing can win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.pcg.step.execution import Execution
from shardwright.search.choices.problem import NoLayoutsError
from shardwright.search.effort import MANY_NODES, ONCE, WHOLE, Effort
from shardwright.search.exact.solving import Candidate
from shardwright.search.tree.attempts import Attempt, Neighbours, Queue
from shardwright.search.tree.fitting import Fitter
from shardwright.search.tree.phases import Phases
from shardwright.search.tree.ways import Way, Ways
from tests.search.graphs import blocks, planner
from tests.search.tree.test_ways import ways_of

GRAPH = blocks(16, 16, layers=2, seq=4)


class Line(Queue):
    """Ways that differ in the number of microbatches, with given floors and steps; neighbours are one further."""

    def __init__(self, ways: Ways, floors_s: dict[int, float], steps_s: dict[int, float], begin: int) -> None:
        super().__init__(ways)
        self.floors_s, self.steps_s, self.order = floors_s, steps_s, list[int]()
        self.propose(self.way(begin), 0.0)

    def way(self, many: int) -> Way:
        return Way(self.ways.spaces[0], "none", many)

    def floor_s(self, way: Way) -> float:
        return self.floors_s[way.many]

    def plans(self, way: Way) -> list[Candidate]:
        self.order.append(way.many)
        step_s = self.steps_s[way.many]
        if step_s == inf:
            raise NoLayoutsError("none")
        found: Any = SimpleNamespace(
            fits=True, prediction=SimpleNamespace(step_s=step_s), execution=Execution(), lifetimes="zero-1",
            name="line", mesh=way.space.mesh,
        )  # fmt: skip
        return [found]

    @property
    def dimensions(self) -> Mapping[str, Neighbours]:
        return {"more": self._more}

    def _more(self, attempt: Attempt) -> Iterator[tuple[Way, float]]:
        for many in (attempt.way.many - 1, attempt.way.many + 1):
            if many in self.floors_s:
                yield self.way(many), 0.0


def ways() -> Ways:
    return ways_of(planner(2), GRAPH)


def test_attempts_go_from_neighbour_to_neighbour_while_a_floor_may_win() -> None:
    floors_s = {1: 5.0, 2: 3.0, 3: 2.0, 4: 1.0, 5: 0.5, 6: 3.0}
    queue = Line(ways(), floors_s, {1: 5.0, 2: 3.0, 3: 2.0, 4: 1.9, 5: 2.5, 6: 3.0}, begin=3)
    yielded = [attempt.way.many for attempt in queue.run() if attempt.is_judged]
    assert queue.order == [3, 4, 5]  # two of them have floors that cannot win; six is beside what does not come near
    assert yielded == [3, 4, 5]
    assert (queue.fastest_s, queue.left) == (1.9, 0)
    assert [attempt.dimension for attempt in queue.solved] == ["", "more", "more"]
    assert queue.attempts[queue.way(4)].origin == queue.way(3)


def test_the_least_floor_is_solved_first() -> None:
    queue = Line(ways(), {1: 3.0, 4: 1.0, 8: 2.0}, {1: 9.0, 4: 9.0, 8: 9.0}, begin=1)
    for many in (4, 8):
        queue.propose(queue.way(many), 0.0)
    assert list(queue.run())
    assert queue.order == [4, 8, 1]


def test_what_is_left_of_a_queue_that_was_cut_may_still_win() -> None:
    queue = Line(ways(), {1: 3.0, 4: 1.0, 8: 2.0}, {1: 9.0, 4: 2.5, 8: 9.0}, begin=1)
    for many in (4, 8):
        queue.propose(queue.way(many), 0.0)
    next(queue.run())
    assert queue.left == 2  # the first one's neighbours, and eight; not what takes three


def test_a_way_without_layouts_is_left_out() -> None:
    queue = Line(ways(), {1: 1.0, 2: 1.0}, {1: inf, 2: 1.0}, begin=1)
    queue.propose(queue.way(2), 0.0)
    assert [attempt.way.many for attempt in queue.run() if attempt.is_judged] == [2]
    assert str(queue.ways.refused) == "none"


def test_the_least_effort_ends_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ways()
    monkeypatch.setattr(own, "effort", ONCE)
    queue = Line(own, {1: 2.0, 2: 1.0}, {1: 3.0, 2: 1.0}, begin=1)
    assert list(queue.run())
    assert queue.order == [1]


def test_the_effort_follows_from_the_number_of_nodes() -> None:
    assert [Effort.of(n) for n in (1, MANY_NODES - 1, MANY_NODES)] == [WHOLE, WHOLE, ONCE]


def test_what_is_kept_is_decided_of_what_comes_near() -> None:
    """Not of an attempt that with everything kept would take longer than the best plan."""
    judged = list[int]()

    class Judged(Line):
        def judged(self, attempt: Attempt, fitter: Fitter) -> Attempt:
            judged.append(attempt.way.many)
            return attempt

    own = ways()
    queue = Judged(own, {1: 1.0, 2: 1.0}, {1: 2.0, 2: 2.5}, begin=1)
    queue.fitter = Fitter(own.solver, own.folded, values=False)
    queue.propose(queue.way(2), 0.0)
    assert list(queue.run())
    assert judged == [1]


def test_phases_have_names_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    for value, number in (("0", 0), ("1", 2)):
        monkeypatch.setenv("SHARDWRIGHT_DEBUG", value)
        phases = Phases(told.append)
        assert list(phases("first", [1, 2])) == [1, 2]
        with phases.timed("second"):
            pass
        assert list(phases.took_s) == ["first", "second"]
        assert phases.seconds >= 0
        assert len(told) == number
    assert told[0].startswith("first: 0.")
