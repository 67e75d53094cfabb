"""What a process finds out about its cluster."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwright.cost.clusters import detect
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.detect import detect_cluster
from shardwright.cost.clusters.local import default_cluster
from shardwright.cost.clusters.presets import GPUS, gpu_device
from shardwright.pcg.errors import ClusterError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def give_gpus(
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    memory_gb: float = 80,
    topology: str | None = None,
    num_units: int = 999,
) -> None:
    """Fake GPUs: what torch says of them, and what `nvidia-smi topo -m` prints."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    found = [
        SimpleNamespace(name=name, total_memory=int(memory_gb * 1e9), multi_processor_count=num_units) for name in names
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])
    monkeypatch.setattr(detect, "_nvidia_smi_topology", lambda: topology)


def world(size: int, local: int) -> dict[str, str]:
    return {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local)}


def test_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, [])
    assert detect_cluster({}) == default_cluster(1)
    assert detect_cluster(world(4, 4)) == default_cluster(4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Cluster.detect() == default_cluster(2)


def test_cpu_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, [])
    cluster = detect_cluster(world(8, 2))
    assert [(level.name, level.size) for level in cluster.levels] == [("rank", 2), ("network", 4)]
    assert cluster.provenance == "default; network assumed: 10 Gb/s per node"
    assert cluster.collectives == ()


def test_more_ranks_than_gpus_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, ["Tesla T4"])
    assert detect_cluster(world(2, 2)).backend == "gloo"


@pytest.mark.parametrize(
    ("name", "memory_gb", "preset"),
    [
        ("Tesla V100-SXM2-16GB", 16.9, "V100-16"),
        ("Tesla V100-SXM2-32GB", 34.1, "V100-32"),
        ("NVIDIA A100-SXM4-40GB", 42.4, "A100-40"),
        ("NVIDIA A100-SXM4-80GB", 85.1, "A100-80"),
        ("NVIDIA H100 80GB HBM3", 85.0, "H100-SXM"),
        ("NVIDIA H100 96GB HBM3", 101.9, "H100-96"),
        ("NVIDIA H100 PCIe", 85.0, "H100-PCIe"),
        ("NVIDIA H100 NVL", 100.0, "H100-PCIe"),
        ("NVIDIA GH200 480GB", 102.0, "GH200-96"),
        ("NVIDIA H200", 150.1, "H200"),
        ("NVIDIA B200", 191.5, "B200"),
        ("NVIDIA GB200", 198.0, "GB200"),
        ("NVIDIA L40S", 47.7, "L40S"),
        ("AMD Instinct MI300X", 206.1, "MI300X"),
        ("NVIDIA A10", 23.7, "A10"),
        ("NVIDIA GeForce RTX 4090", 25.3, "RTX-4090"),
        ("Tesla T4", 15.8, "T4"),
    ],
)
def test_gpus(name: str, memory_gb: float, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, [name] * 4, memory_gb)
    cluster = detect_cluster({})
    assert (cluster.device.name, cluster.num_devices, cluster.backend) == (preset, 4, "nccl")
    assert cluster.device.memory_bytes == int(memory_gb * 1e9)
    assert "; memory detected, links " in cluster.provenance


def test_every_gpu_of_the_table_is_detected() -> None:
    assert {preset for _, presets in detect._GPU_NAMES for preset in presets} == set(GPUS)


SWITCH, BOX = (f"""\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity
GPU0\t X \t{link}\t{link}\t{link}\tPXB\t0-63
GPU1\t{link}\t X \t{link}\t{link}\tPXB\t0-63
GPU2\t{link}\t{link}\t X \t{link}\tSYS\t64-127
GPU3\t{link}\t{link}\t{link}\t X \tSYS\t64-127
NIC0\tPXB\tPXB\tSYS\tSYS\t X
""" for link in ("NV12", "PHB"))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "topology", "kind", "how"),
    [
        ("NVIDIA A100-SXM4-80GB", SWITCH, "nvlink", "detected"),
        ("NVIDIA A100-SXM4-80GB", BOX, "pcie", "detected"),
        ("NVIDIA A100 80GB PCIe", None, "pcie", "by the GPU's name"),
        ("NVIDIA A100-SXM4-80GB", None, "nvlink", "by the GPU's name"),
        ("NVIDIA A100-SXM4-80GB", "GPU0 X N/A\nGPU1 N/A X", "nvlink", "by the GPU's name (nvidia-smi topo -m: GPU0: "),
        ("NVIDIA L40S", BOX, "pcie", "detected"),
    ],
)
def test_links(name: str, topology: str | None, kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, [name] * 4, 80, topology)
    cluster = detect_cluster({})
    assert cluster.levels[0].kind == kind
    assert f"; memory detected, links {how}" in cluster.provenance


PAIRS_ACROSS = """\
GPU0  X   SYS  NV12 SYS
GPU1 SYS   X   SYS  NV12
GPU2 NV12 SYS   X   SYS
GPU3 SYS  NV12 SYS   X
"""


def test_the_gpus_that_torch_sees_count_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def links(visible: int, shown: str, local: int) -> tuple[list[tuple[str, int]], str]:
        give_gpus(monkeypatch, ["NVIDIA A100 80GB PCIe"] * visible, 80, PAIRS_ACROSS)
        environ = {"RANK": "0", "LOCAL_RANK": "0", **world(local, local)}
        cluster = detect_cluster(environ | ({"CUDA_VISIBLE_DEVICES": shown} if shown else {}))
        return [(level.name, level.size) for level in cluster.levels], cluster.provenance.rpartition("links ")[2]

    assert links(2, "0,2", 2) == ([("nvlink", 2)], "detected")
    assert links(2, "0,1", 2) == ([("sockets", 2)], "detected")
    assert links(4, "0,2,1,3", 4) == ([("nvlink", 2), ("sockets", 2)], "detected")
    renumber = "detected (NVLinks left out, as they do not join equal groups of consecutive GPUs; number them so: "
    assert links(4, "", 4) == ([("sockets", 4)], f"{renumber}CUDA_VISIBLE_DEVICES=0,2,1,3)")
    assert links(2, "GPU-5ebe9f43,GPU-ac33420d", 2) == ([("pcie", 2)], "by the GPU's name")


def test_a_slice_of_a_card_is_not_the_whole_card(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, ["NVIDIA A100-SXM4-80GB MIG 3g.40gb"], 42.3, num_units=42)
    cluster = detect_cluster({})
    card = gpu_device("A100-80")
    assert (cluster.device.name, cluster.device.num_units) == ("A100-80", 42)
    assert cluster.device.flops_per_s["bf16"] == pytest.approx(card.flops_per_s["bf16"] * 42 / 108)
    assert cluster.device.memory_bytes_per_s == pytest.approx(card.memory_bytes_per_s * 42.3e9 / card.memory_bytes)
    assert cluster.provenance.endswith("; 42 of the GPU's 108 multiprocessors")


def test_slices_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, ["NVIDIA H100 80GB HBM3 MIG 1g.10gb"], 10, num_units=16)
    problem = (
        r"^Cluster\.detect: 2 ranks on this machine have slices of GPUs \(NVIDIA H100 .*; give each rank a whole GPU"
    )
    slurm = {"STEP_NUM_TASKS": "2", "PROCID": "0", "LOCALID": "0", "STEP_TASKS_PER_NODE": "2"}
    environ = {f"SLURM_{name}": value for name, value in slurm.items()}
    with pytest.raises(ClusterError, match=problem):
        detect_cluster(environ | {"CUDA_VISIBLE_DEVICES": "MIG-1"})


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="GPU0 X NV18\n"))
    assert detect._nvidia_smi_topology() == "GPU0 X NV18\n"


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_a_driver_that_cannot_be_asked(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert detect._nvidia_smi_topology() is None


def test_gpus_of_several_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, ["Tesla T4", "NVIDIA A10"])
    problem = r"^Cluster\.detect: this machine has GPUs of several kinds: NVIDIA A10, Tesla T4; .*CUDA_VISIBLE_DEVICES"
    with pytest.raises(ClusterError, match=problem):
        detect_cluster({})


def test_gpu_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, ["NVIDIA H200"] * 8, 141)
    cluster = detect_cluster(world(32, 8))
    assert [(level.name, level.size) for level in cluster.levels] == [("nvlink", 8), ("network", 4)]
    assert "network assumed: 100 Gb/s per node" in cluster.provenance


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"WORLD_SIZE": "two"}, r"environment: WORLD_SIZE: expected a positive integer, got 'two'; start .* torchrun"),
        ({"WORLD_SIZE": "0"}, r"environment: WORLD_SIZE: expected a positive integer, got '0'"),
        (world(4, -1), r"environment: LOCAL_WORLD_SIZE: expected a positive integer, got '-1'"),
        (
            {"SLURM_STEP_NUM_TASKS": "12", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "8,4"},
            r"nodes have 4 and 8 ranks; start the same number of ranks on every node, or describe the cluster in",
        ),
        ({"RANK": "1"}, r"environment: RANK is set, so torchrun started this process, but WORLD_SIZE is missing"),
        (world(4, 3), r"LOCAL_WORLD_SIZE=3 does not divide WORLD_SIZE=4; start the same number of ranks on every"),
    ],
)
def test_contradictory_environments(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ClusterError, match=f"^{problem}"):
        detect_cluster(environ)


def test_a_gpu_that_nobody_described(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, ["NVIDIA Z9000"])
    with pytest.raises(ClusterError, match=r"no figures for the GPU 'NVIDIA Z9000', only for V100-16, .*Cluster\.load"):
        detect_cluster({})
