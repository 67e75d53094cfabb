"""The tables of common machines."""

import pytest

from shardwright.cost.cluster import Cluster
from shardwright.cost.presets import GPUS, PRESETS, gpu_device
from shardwright.pcg.errors import ClusterError


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_constructs(name: str) -> None:
    cluster = Cluster.preset(name, nodes=64)
    assert cluster.num_devices == 64 * PRESETS[name].gpus
    assert cluster.provenance.startswith(f"datasheet: {PRESETS[name].gpu} ")
    assert len(Cluster.preset(name).levels) == 1
    inside, outside = cluster.levels
    assert outside.bandwidth_bytes_per_s < inside.bandwidth_bytes_per_s
    assert outside.latency_s > inside.latency_s


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_constructs(name: str) -> None:
    device = gpu_device(name)
    assert device.peak_flops_per_s("fp16") > device.peak_flops_per_s("fp32") > device.peak_flops_per_s("fp64")
    assert device.memory_bytes_per_s < GPUS[name].memory_tb_per_s * 1e12


def test_every_gpu_is_in_some_machine() -> None:
    assert {machine.gpu for machine in PRESETS.values()} == set(GPUS)


def test_bandwidth_is_per_device() -> None:
    inside, outside = Cluster.preset("dgx-h100", nodes=2).levels
    assert inside.bandwidth_bytes_per_s == pytest.approx(450e9 * 0.78)
    assert outside.bandwidth_bytes_per_s == pytest.approx(400e9 / 8 * 0.9)


def test_part_of_a_node() -> None:
    cluster = Cluster.preset("dgx-a100", nodes=2, devices_per_node=2)
    assert [level.size for level in cluster.levels] == [2, 2]
    assert cluster.levels[1] == Cluster.preset("dgx-a100", nodes=2).levels[1]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("dgx-z100",), r"unknown machine 'dgx-z100'; choose one of dgx-1-v100, .*, dgx-h100, "),
        (("dgx-h100", 0), r"nodes: expected a positive integer, got 0; it is the number of machines"),
        (("dgx-h100", 2.5), r"nodes: expected a positive integer, got 2\.5"),
        (("dgx-h100", 2, 0), r"devices_per_node: expected a positive integer, got 0; it is the number of GPUs used"),
        (("dgx-h100", 2, 16), r"'dgx-h100' has 8 devices per node, got 16; take more nodes"),
    ],
)
def test_errors(arguments: tuple[str, int, int], problem: str) -> None:
    with pytest.raises(ClusterError, match=rf"^Cluster\.preset[.:] ?{problem}"):
        Cluster.preset(*arguments)
