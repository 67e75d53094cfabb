"""Calibration: one real run on tiny sizes, and what happens when a rank fails."""

import time
from pathlib import Path

import pytest

from shardwright.cost import calibrate as module
from shardwright.cost.calibrate import calibrate
from shardwright.cost.cluster import COLLECTIVES, Cluster
from shardwright.cost.communication import Communication
from shardwright.cost.local import cache_path
from shardwright.cost.measure import Workload
from shardwright.pcg.errors import ClusterError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tiny(num_ranks: int, timeout_s: float = 60.0, **sizes: tuple[int, ...]) -> Workload:
    defaults = {"matmul_sizes": (64, 128), "memory_bytes": (2**16,), "collective_bytes": (2**10, 2**20)}
    return Workload(num_ranks, 1, timeout_s, seconds_per_point=0.005, **(defaults | sizes))


def test_two_ranks() -> None:
    stages: list[str] = []
    cluster = calibrate(2, workload=tiny(2), progress=stages.append)
    assert (cluster.num_devices, cluster.backend) == (2, "gloo")
    assert cluster.provenance.startswith("measured 2")
    assert "2 ranks × 1 threads, torch 2." in cluster.provenance
    assert {(line.collective, line.group_size) for line in cluster.collectives} == {(name, 2) for name in COLLECTIVES}
    assert all(line.fit_error is not None for line in cluster.collectives)
    assert 1e8 < cluster.device.flops_per_s["fp32"] < 1e13
    assert 1e-7 < cluster.device.op_overhead_s < 1e-3
    assert 1e-6 < Communication(cluster, (2,)).all_reduce_s(0, 2**20) < 1
    assert stages[:3] == ["matmul", "memory", "dispatch"]
    assert Cluster.local(2) == cluster == Cluster.load(cache_path(2))


def test_one_rank_has_nothing_to_send(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = calibrate(1, workload=tiny(1), save=False)
    assert cluster.collectives == ()
    assert not cache_path(1).exists()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("calibrating: matmul\n")


def test_a_rank_that_fails_ends_the_calibration() -> None:
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"^calibrate: rank \d ended with status 1: .*; correct the cause"):
        calibrate(2, workload=tiny(2, matmul_sizes=(-1,)))
    assert time.monotonic() - began < 30
    assert not cache_path(2).exists()


def test_the_time_limit_ends_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[module._Ranks] = []
    start = module._Ranks.start

    def watched(ranks: module._Ranks, workload: Workload) -> None:
        started.append(ranks)
        start(ranks, workload)

    monkeypatch.setattr(module._Ranks, "start", watched)
    problem = r"^calibrate: not done after 0\.3 s, in the stage 'start'; the machine may be loaded; try again or give"
    with pytest.raises(ClusterError, match=problem):
        calibrate(2, workload=tiny(2), timeout_s=0.3)
    assert [process.poll() for process in started[0].processes] == [-9, -9]


@pytest.mark.parametrize(
    ("num_ranks", "timeout_s", "problem"),
    [
        (0, 1.0, r"calibrate\.num_ranks: expected a positive integer, got 0; it is how many processes share"),
        (2, 0.0, r"calibrate\.timeout_s: expected a positive number, got 0\.0; give it in seconds"),
    ],
)
def test_bad_arguments(num_ranks: int, timeout_s: float, problem: str) -> None:
    with pytest.raises(ClusterError, match=f"^{problem}"):
        calibrate(num_ranks, timeout_s=timeout_s)
