"""The tables of common machines."""

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.presets import CONTEXT_BYTES, GPUS, LINKS, PRESETS, Gpu, LinkRow, Machine, gpu_device
from shardwright.cost.collectives.communication import Communication
from shardwright.pcg.errors import ClusterError
from tests.each import each


@each("name", PRESETS)
def test_every_preset_constructs(name: str) -> None:
    cluster = Cluster.preset(name, nodes=64)
    assert cluster.num_devices == 64 * PRESETS[name].gpus
    assert cluster.provenance.startswith(f"datasheet: {PRESETS[name].gpu} ")
    node = Cluster.preset(name).levels
    assert len(node) == (2 if PRESETS[name].sockets > 1 else 1)
    assert cluster.levels[: len(node)] == node
    inside, outside = cluster.levels[len(node) - 1 : len(node) + 1]
    assert outside.bandwidth_bytes_per_s < inside.bandwidth_bytes_per_s
    assert outside.latency_s > inside.latency_s
    assert (inside.kind == "network", outside.kind) == (False, "network")


@pytest.mark.parametrize("table", [GPUS, PRESETS, LINKS])
def test_every_row_names_its_source(table: dict[str, Gpu | Machine | LinkRow]) -> None:
    assert all(row.source.strip() for row in table.values())


NOMINAL_GB = {
    "V100-16": 16, "V100-32": 32, "A100-40": 40, "A100-80": 80, "H100-SXM": 80, "H100-PCIe": 80, "H100-96": 96,
    "GH200-96": 96, "H200": 141, "B200": 180, "GB200": 186, "L40S": 48, "MI300X": 192, "A10": 24, "RTX-4090": 24,
    "T4": 16,
}  # fmt: skip
"""What datasheets call it, in units of 2**30 bytes."""


def test_what_drivers_report_is_a_little_less_than_datasheets_say() -> None:
    """Error correction takes a sixteenth of GDDR6, the driver a hundredth or so of any."""
    assert NOMINAL_GB.keys() == GPUS.keys()
    shares = {name: gpu_device(name).memory_bytes / 2**30 / nominal for name, nominal in NOMINAL_GB.items()}
    assert all(0.9 < share <= 1 for share in shares.values()), shares
    gddr6 = {"L40S", "A10", "T4"}
    assert all(share > 0.97 for name, share in shares.items() if name not in gddr6), shares


def test_every_link_and_network_is_used() -> None:
    used = {gpu.link for gpu in GPUS.values()} | {machine.network for machine in PRESETS.values()}
    assert used | {"sockets"} == set(LINKS)


def test_machines_without_nvlink_have_their_gpus_under_two_processors() -> None:
    """22 GB/s between them, for all GPUs of one; each GPU's own lanes below."""
    figures = {
        used: [(x.size, round(x.bandwidth_bytes_per_s / 1e9, 2)) for x in node.levels]
        for used in (1, 4, 6, 7, 8)
        if (node := Cluster.preset("l40s-box", 1, used))
    }
    assert figures == {
        1: [(1, 23.25)], 4: [(4, 23.25)], 6: [(3, 23.25), (2, 7.33)], 7: [(7, 5.5)], 8: [(4, 23.25), (2, 5.5)],
    }  # fmt: skip
    assert all(machine.sockets == 1 for machine in PRESETS.values() if LINKS[GPUS[machine.gpu].link].kind == "nvlink")


def test_rings_pass_between_processors_once_and_exchanges_with_all() -> None:
    """8 H100 over PCIe: a ring has the 22 GB/s for itself, at most; in an exchange four GPUs share them."""
    model = Communication(Cluster.preset("h100-pcie-box"), (8,))
    ring = model.curve("all_gather", 0).at(1e10).line.s_per_byte
    assert ring == pytest.approx(7 / 8 / 22e9)
    exchange = model.curve("all_to_all", 0).at(1e10).line.s_per_byte
    assert exchange == pytest.approx(4 / 64 / (22e9 / 4))


@each(
    ("figure", "expected"),
    [("V100-32", 125), ("A100-40", 312), ("H100-SXM", 989), ("H200", 989), ("B200", 2250), ("GB200", 2500)],
)
def test_generations(figure: str, expected: float) -> None:
    """Units and columns are right: vendors' dense 16-bit rates, in teraFLOP per second."""
    assert gpu_device(figure).peak_flops_per_s("float16") == expected * 1e12


@each("name", GPUS)
def test_every_gpu_constructs(name: str) -> None:
    device = gpu_device(name)
    assert device.peak_flops_per_s("fp8") >= device.peak_flops_per_s("bf16") >= device.peak_flops_per_s("fp32")
    assert device.peak_flops_per_s("fp16") > device.peak_flops_per_s("fp32") > device.peak_flops_per_s("fp64")
    assert device.memory_bytes_per_s < GPUS[name].memory_tb_per_s * 1e12


def test_every_gpu_is_in_some_machine() -> None:
    assert {machine.gpu for machine in PRESETS.values()} == set(GPUS)


def test_bandwidth_is_per_device() -> None:
    inside, outside = Cluster.preset("dgx-h100", nodes=2).levels
    assert inside.bandwidth_bytes_per_s == pytest.approx(450e9 * 0.8)
    assert outside.bandwidth_bytes_per_s == pytest.approx(400e9 / 8 * 0.9)


def test_part_of_a_node() -> None:
    cluster = Cluster.preset("dgx-a100", nodes=2, devices_per_node=2)
    assert [level.size for level in cluster.levels] == [2, 2]
    assert cluster.levels[1] == Cluster.preset("dgx-a100", nodes=2).levels[1]


def test_part_of_a_mesh_has_part_of_its_links() -> None:
    assert Cluster.preset("mi300x-box").levels[0].bandwidth_bytes_per_s == pytest.approx(448e9 * 0.8)
    two = Cluster.preset("mi300x-box", devices_per_node=2).levels[0]
    assert (two.size, two.topology) == (2, "mesh")
    assert two.bandwidth_bytes_per_s == pytest.approx(64e9 * 0.8)


def test_machines_in_pods() -> None:
    sizes = {
        nodes: [level.size for level in Cluster.preset("meta-h100", nodes).levels] for nodes in (1, 384, 768, 2048)
    }
    assert sizes == {1: [8], 384: [8, 384], 768: [8, 384, 2], 2048: [8, 256, 8]}
    network, spine = Cluster.preset("meta-h100", 768).levels[1:]
    assert spine.shared_bytes_per_s == pytest.approx(network.bandwidth_bytes_per_s / 7)
    problem = (
        r"^Cluster\.preset: 'meta-h100' comes in pods of up to 384 nodes, 389 nodes do not make equal pods of at least "
        r"half of that; take a multiple of 384, or at most one pod"
    )
    with pytest.raises(ClusterError, match=problem):
        Cluster.preset("meta-h100", 389)


@each(
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


def test_contexts_are_counted_on_gpus_and_said_to_be_assumed() -> None:
    assert {gpu_device(name).context_bytes for name in GPUS} == {CONTEXT_BYTES}
    assert 4e8 < CONTEXT_BYTES < 2e9
    assert Cluster.local(1).device.context_bytes == 0
