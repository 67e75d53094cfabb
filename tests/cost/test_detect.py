"""What a process finds out about its cluster."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwright.cost.cluster import Cluster
from shardwright.cost.detect import detect_cluster
from shardwright.cost.local import default_cluster
from shardwright.pcg.errors import ClusterError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def give_gpus(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    properties = SimpleNamespace(total_memory=85_000_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def world(size: int, local: int) -> dict[str, str]:
    return {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local)}


def test_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, "none", 0)
    assert detect_cluster({}) == default_cluster(1)
    assert detect_cluster(world(4, 4)) == default_cluster(4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Cluster.detect() == default_cluster(2)


def test_cpu_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, "none", 0)
    cluster = detect_cluster(world(8, 2))
    assert [(level.name, level.size) for level in cluster.levels] == [("rank", 2), ("network", 4)]
    assert cluster.provenance == "default; network assumed: 10 Gb/s per node"
    assert cluster.collectives == ()


def test_more_ranks_than_gpus_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, "Tesla T4", 1)
    assert detect_cluster(world(2, 2)).backend == "gloo"


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla T4", "T4"),
    ],
)
def test_gpus(name: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, name, 4)
    cluster = detect_cluster({})
    assert (cluster.device.name, cluster.num_devices, cluster.backend) == (preset, 4, "nccl")
    assert cluster.device.memory_bytes == 85_000_000_000
    assert cluster.provenance.endswith("; memory detected")


def test_gpu_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, "NVIDIA H200", 8)
    cluster = detect_cluster(world(32, 8))
    assert [(level.name, level.size) for level in cluster.levels] == [("nvlink", 8), ("network", 4)]
    assert "network assumed: 100 Gb/s per node" in cluster.provenance


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"WORLD_SIZE": "two"}, r"environment: WORLD_SIZE: expected a positive integer, got 'two'; start .* torchrun"),
        ({"WORLD_SIZE": "0"}, r"environment: WORLD_SIZE: expected a positive integer, got '0'"),
        (world(4, -1), r"environment: LOCAL_WORLD_SIZE: expected a positive integer, got '-1'"),
        (world(4, 3), r"LOCAL_WORLD_SIZE=3 does not divide WORLD_SIZE=4; start the same number of ranks on every"),
    ],
)
def test_contradictory_environments(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ClusterError, match=f"^{problem}"):
        detect_cluster(environ)


def test_a_gpu_that_nobody_described(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, "NVIDIA Z9000", 1)
    with pytest.raises(ClusterError, match=r"no figures for the GPU 'NVIDIA Z9000', only for V100-16, .*Cluster\.load"):
        detect_cluster({})
