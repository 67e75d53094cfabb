"""The local machine: defaults, and the saved calibration."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster
from shardwright.cost.clusters.local import cache_path, default_cluster, memory_per_rank_bytes
from shardwright.pcg.errors import ClusterError
from tests.each import each


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_defaults(num_ranks: int) -> None:
    cluster = Cluster.local(num_ranks)
    assert cluster == default_cluster(num_ranks)
    assert (cluster.num_devices, cluster.backend, cluster.provenance) == (num_ranks, "gloo", "default")
    assert {line.collective for line in cluster.collectives} == set(COLLECTIVES)
    assert 0 < cluster.device.memory_bytes * num_ranks <= memory_per_rank_bytes(1)


def test_threads_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    one, two = Cluster.local(1).device, Cluster.local(2).device
    assert one.flops_per_s["fp32"] == 2 * two.flops_per_s["fp32"]


def test_the_saved_calibration_is_used() -> None:
    saved = replace(default_cluster(2), provenance="measured")
    saved.save(cache_path(2))
    assert Cluster.local(2) == saved
    assert Cluster.local(4).provenance == "default"


def test_the_calibration_of_another_machine_is_not_used() -> None:
    saved = default_cluster(2)
    replace(saved, provenance="measured", device=replace(saved.device, name="elsewhere")).save(cache_path(2))
    assert Cluster.local(2).provenance == "default"


def test_a_broken_calibration_is_left_aside() -> None:
    cache_path(2).parent.mkdir()
    cache_path(2).write_text("{")
    with pytest.warns(
        UserWarning, match=r"calibration is not used, costs are defaults: .*local-2\.json: line 1: .*again"
    ):
        assert Cluster.local(2) == default_cluster(2)


def test_where_calibrations_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_path(2, {"XDG_CACHE_HOME": "/cache"}) == Path("/cache/shardwright/local-2.json")
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_path(4, environ) == Path("/home/someone/.cache/shardwright/local-4.json")


@each("num_ranks", [0, -1, 1.5, True, "2"])
def test_errors(num_ranks: int) -> None:
    with pytest.raises(ClusterError, match=r"^Cluster\.local\.num_ranks: expected a positive integer, got .*processes"):
        Cluster.local(num_ranks)
