"""Links one by one, from what `nvidia-smi topo -m` prints and from NCCL's file."""

from __future__ import annotations

from fractions import Fraction

import pytest

from shardwright.cost.clusters.networks import preset_topology
from shardwright.cost.clusters.wired import wired_topology
from shardwright.pcg.collectives.topology import Topology
from shardwright.pcg.errors import ClusterError
from tests.each import each

CUBE = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
        (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2}  # fmt: skip
NCCL = """
<system version="1">
 <cpu numaid="0"><pci busid="0000:01:00.0" class="0x060400">
  <pci busid="0000:02:00.0"><gpu dev="0" sm="80"/></pci><pci busid="0000:03:00.0"><gpu dev="1" sm="80"/></pci>
 </pci></cpu>
 <cpu numaid="1"><pci busid="0000:81:00.0"><gpu dev="2" sm="80"/></pci><nic><net speed="200000"/></nic></cpu>
</system>
"""


def topo(size: int, pairs: dict[tuple[int, int], str], other: str = "SYS") -> str:
    """What `nvidia-smi topo -m` prints of the GPUs."""
    rows = ["     " + " ".join(f"GPU{i}" for i in range(size))]
    for i in range(size):
        row = ["X" if i == j else pairs.get((min(i, j), max(i, j)), other) for j in range(size)]
        rows.append(f"GPU{i} {' '.join(row)}")
    return "\n".join(rows) + "\n"


def degrees(topology: Topology) -> list[int]:
    return sorted(topology.multiplicity(link) for link in topology.links)


def test_a_cube_mesh_is_that_of_a_dgx1() -> None:
    found = wired_topology(topo(8, {pair: f"NV{many}" for pair, many in CUBE.items()}), "topo", "V100-32")
    dgx1 = preset_topology("dgx1")
    assert not found.relays
    assert found.unit_rate == dgx1.unit_rate
    assert degrees(found) == degrees(dgx1)


def test_switches_and_machines() -> None:
    pairs = {(i, j): "NV12" for i in range(4) for j in range(i)}
    found = wired_topology(topo(4, {(j, i): word for (i, j), word in pairs.items()}), "topo", "A100-40", 2)
    assert found.relays == ("NVSwitch 0 0", "NVSwitch 0 1", "network")
    assert found.by_edge[0, 8].rate_bytes_per_s == 300 * 10**9
    assert [one.rate_bytes_per_s for one in found.resources] == [Fraction(25, 2) * 10**9] * 4


def test_pcie_switches_roots_and_processors() -> None:
    found = wired_topology(topo(4, {(0, 1): "PIX", (2, 3): "PHB"}), "topo", "A10")
    root, switch = "PCIe root of GPU 0 0", "PCIe switch of GPU 0 0"
    assert found.relays == (root, switch, "PCIe root of GPU 2 0")
    assert [found.node_name(node) for edge in found.path(0, 2) for node in edge[1:]] == [
        switch,
        root,
        found.relays[2],
        "rank 2",
    ]
    assert found.path(2, 3) == ((2, 6), (6, 3))


def test_the_file_of_nccl() -> None:
    found = wired_topology(NCCL, "nccl.xml", "A100-40", 2)
    assert found.relays[:3] == ("PCIe root of GPU 0 0", "PCIe switch of GPU 0 0", "PCIe root of GPU 2 0")
    assert found.resources[0].rate_bytes_per_s == 25 * 10**9


def test_nvlinks_of_some_pairs_beside_pcie() -> None:
    found = wired_topology(topo(4, {(0, 1): "NV4", (2, 3): "NV4"}, "SYS"), "topo", "A100-40")
    assert found.path(0, 1) == ((0, 1),)
    assert len(found.path(1, 2)) == 3


@each(
    ("text", "gpu", "nodes", "problem"),
    [
        (topo(2, {(0, 1): "NV1"}), "V99", 1, "GPU 'V99' is not in the table"),
        (topo(1, {}), "V100-32", 1, "expected 2 to 65536 GPUs, got 1"),
        ("nothing", "V100-32", 1, "no row of a GPU"),
        ("<a/>", "V100-32", 1, "expected <system> at the top"),
        (topo(2, {(0, 1): "NV1"}), "V100-32", 0, "expected a positive integer, got 0"),
        (topo(2, {(0, 1): "NV1"}), "V100-32", 999999, "expected 2 to 65536 GPUs, got 1999998"),
    ],
)
def test_what_is_no_wiring(text: str, gpu: str, nodes: int, problem: str) -> None:
    with pytest.raises(ClusterError, match=problem):
        wired_topology(text, "t", gpu, nodes)
