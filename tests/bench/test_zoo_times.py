"""The benchmark of local predictions: what is set against what. Times are not judged here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import zoo_times
from bench.zoo_times import Alone, Measured, Passes, Subject
from shardwright.cost.calibration.workload import Visit, Workload
from shardwright.cost.clusters.cluster import Cluster
from shardwright.lowering.ranks.launch import run_ranks


def test_steps_are_predicted_by_the_passes_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four turns of two steps that count: of each step and loop the slowest rank, of each point all visits."""
    first = [[(2.0, 0.5), (1.0, 0.5)], [(3.0, 0.5), (2.0, 0.7)]] * 2
    second = [[(1.0, 0.5), (2.0, 0.5)], [(2.0, 0.7), (3.0, 0.5)]] * 2
    ranks = [
        Measured({"mlp, data": first}, {"mlp, data": 12}, [1.0, 2.0]),
        Measured({"mlp, data": second}, {"mlp, data": 13}, [4.0, 1.0]),
    ]
    visits = {"key": [Visit("key", [seconds] * 4) for seconds in (1.0, 3.0, 1.0, 3.0)]}
    monkeypatch.setattr(zoo_times, "measured_cluster", lambda points, workload: points["key"].seconds)
    monkeypatch.setattr(Subject, "predicted_s", lambda self, cluster: cluster)
    nothing: Any = None
    subject, between = Subject("mlp", "data", 2, nothing, nothing, 90), Passes(nothing, visits, ranks)
    before, after = (
        Passes(nothing, {"key": [Visit("key", [seconds] * 4)] * 2}, [Measured({}, {}, [loop_s])] * 2)
        for seconds, loop_s in ((5.0, 4.0), (7.0, 6.0))
    )
    around = before.joined(after)
    alone = Alone({"mlp, data": [2.0, 1.0] * 5, "other": [9.0]}, [])
    (found,) = zoo_times.rows([subject], between, around, alone)
    predicted, measured_s, cpu_s = (8 * 1.0 + 7 * 3.0) / 15, (4 * 2.0 + 4 * 3.0) / 8, (4 * 0.5 + 4 * 0.7) / 8
    assert (found.predicted_s, found.predicted_noise) == (pytest.approx(predicted), pytest.approx(2 / 3))
    assert (found.measured_s, found.measured_noise) == (pytest.approx(measured_s), pytest.approx(1 / 3))
    assert found.cpu_s == pytest.approx(cpu_s)
    assert (found.model, found.plan_name, found.num_ranks) == ("mlp", "data", 2)
    assert found.predicted_alone_s == pytest.approx((8 * 5.0 + 7 * 7.0) / 15)
    assert found.alone_s == pytest.approx((4 * 2.0 + 5 * 1.0) / 9)  # but for the slowest tenth
    assert (found.predicted_bytes, found.measured_bytes) == (90, 13)
    assert (between.loop_s(), around.loop_s()) == (3.0, 5.0)


def test_alone_the_slowest_rank_of_every_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds, every plan in processes of its own."""
    first, second = zoo_times.subjects(Cluster.local(1), ["mlp", "dlrm"])
    ranks = [([3.0, 1.0], [0.5]), ([2.0, 4.0], [0.7])]
    ran: list[str] = []

    def run_ranks(body: object, num_ranks: int, timeout_s: float, args: tuple[Subject]) -> object:
        assert (body, num_ranks) == (zoo_times.run_alone, 2)
        ran.append(args[0].model)
        return ranks

    monkeypatch.setattr(zoo_times, "run_ranks", run_ranks)
    found = zoo_times.alone([first, second], 2)
    assert ran == ["mlp", "dlrm"] * 3
    assert found.steps == {"mlp, searched": [3.0, 4.0] * 3, "dlrm, searched": [3.0, 4.0] * 3}
    assert found.loops == [0.7] * 6


def test_steps_alone() -> None:
    ((steps, loops),) = run_ranks(zoo_times.run_alone, 1, 120.0, args=zoo_times.subjects(Cluster.local(1), ["mlp"]))
    assert (len(steps), len(loops)) == (30, 5)
    assert min(steps + loops) > 0


class FewVisits:
    """A rank that visits eight points in a pass."""

    def __init__(self, rank: int, workload: Workload, path: Path) -> None:
        self.workload = workload

    def visits(self, number: int) -> Any:
        assert number < self.workload.num_passes
        yield from [None] * 8


def test_turns_come_between_the_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two a pass; the loop runs at each, also where no plan is run."""
    monkeypatch.setattr(zoo_times, "Rank", FewVisits)
    found = zoo_times.subjects(Cluster.local(1), ["mlp"])
    workload = zoo_times._workload(1, 3)
    assert workload.seconds_per_point / 3 == pytest.approx(0.03 / 6)  # a pass is one of `shardwright calibrate`
    ((steps, memory, loops),) = run_ranks(zoo_times.run, 1, 120.0, args=(found, workload, Path("none")))
    assert [len(turn) for turn in steps["mlp, searched"]] == [2] * 6
    assert all(cpu > 0 for turn in steps["mlp, searched"] for _, cpu in turn)
    assert memory["mlp, searched"] > 0
    assert len(loops) == 6
    ((steps, memory, loops),) = run_ranks(zoo_times.run, 1, 120.0, args=([], workload, Path("none")))
    assert (steps, memory, len(loops)) == ({}, {}, 6)


def test_one_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        zoo_times.main(["--passes", "1"])
    assert "argument --passes: expected at least 2, got 1; noise is how far odd and even" in capsys.readouterr().err
