"""Levels of links from what the driver and NCCL say of real machines."""

import pytest

from shardwright.cost.clusters.presets import preset_cluster
from shardwright.cost.clusters.wiring import Wiring, node_levels, read_nccl, read_topo
from shardwright.pcg.errors import ClusterError, ShardwrightError
from tests.each import each

SHARE = 0.8  # of NVLink's rate, as presets have it


def square(size: int, link: str) -> str:
    """All pairs alike."""
    return rows([[("X" if i == j else link) for j in range(size)] for i in range(size)])


def grouped(size: int, group: int, inside: str, between: str, half: str = "") -> str:
    """Equal groups of neighbours; `half`: between groups of one half of the machine."""
    near = half or between

    def entry(i: int, j: int) -> str:
        if i == j:
            return "X"
        if i // group == j // group:
            return inside
        return near if i // (size // 2) == j // (size // 2) else between

    return rows([[entry(i, j) for j in range(size)] for i in range(size)])


def rows(matrix: list[list[str]]) -> str:
    """As the driver prints it, with a card of the network and affinities behind."""
    names = [f"GPU{i}" for i in range(len(matrix))]
    header = "\t".join(["\x1b[4m", *names, "NIC0", "CPU Affinity", "NUMA Affinity\x1b[0m"])
    lines = [
        "\t".join([name, *(f" {x} " for x in row), "SYS", "0-31,64-95", "0"])
        for name, row in zip(names, matrix, strict=True)
    ]
    nic = "\t".join(["NIC0", *("SYS" for _ in names), " X "])
    return "\n".join([header, *lines, nic, "", "Legend:", "  X    = Self", "  NV#  = a bonded set of # NVLinks"])


DGX_1 = """\
GPU0  X  NV1 NV1 NV2 NV2 SYS SYS SYS
GPU1 NV1  X  NV2 NV1 SYS NV2 SYS SYS
GPU2 NV1 NV2  X  NV2 SYS SYS NV1 SYS
GPU3 NV2 NV1 NV2  X  SYS SYS SYS NV1
GPU4 NV2 SYS SYS SYS  X  NV1 NV1 NV2
GPU5 SYS NV2 SYS SYS NV1  X  NV2 NV1
GPU6 SYS SYS NV1 SYS NV1 NV2  X  NV2
GPU7 SYS SYS SYS NV1 NV2 NV1 NV2  X
"""
P3_8XLARGE = """\
GPU0  X  NV1 NV1 NV2
GPU1 NV1  X  NV2 NV1
GPU2 NV1 NV2  X  NV2
GPU3 NV2 NV1 NV2  X
"""
UNEQUAL = "NVLinks left out, as they do not join equal groups of consecutive GPUs"
THREE_WITH_ONE_BRIDGE = """\
GPU0  X   NV12 NODE
GPU1 NV12  X   NODE
GPU2 NODE NODE  X
"""


@each(
    ("text", "gpu", "expected"),
    [
        (DGX_1, "V100-32", [("nvlink", "ring", 8, 150 * SHARE)]),  # the hybrid cube mesh
        (P3_8XLARGE, "V100-16", [("nvlink", "mesh", 4, 100 * SHARE)]),  # four of its links stay inside
        (square(16, "NV6"), "V100-32", [("nvlink", "switch", 16, 150 * SHARE)]),  # DGX-2
        (square(8, "NV12"), "A100-80", [("nvlink", "switch", 8, 300 * SHARE)]),  # DGX A100
        (square(4, "NV4"), "A100-40", [("nvlink", "mesh", 4, 300 * SHARE)]),  # four on a board without a switch
        (square(8, "NV8"), "A100-80", [("nvlink", "switch", 8, 200 * SHARE)]),  # A800
        (square(8, "NV18"), "H100-SXM", [("nvlink", "switch", 8, 450 * SHARE)]),
        (square(8, "NV18"), "B200", [("nvlink", "switch", 8, 900 * SHARE)]),
        (square(4, "NV6"), "GH200-96", [("nvlink", "mesh", 4, 450 * SHARE)]),
        (square(2, "NV18"), "H200", [("nvlink", "mesh", 2, 450 * SHARE)]),  # two of a machine with switches
        # cards bridged in pairs: in two sockets, four in one, eight
        (grouped(4, 2, "NV12", "SYS"), "A100-80", [("nvlink", "mesh", 2, 300 * SHARE), ("sockets", "pcie", 2, 11)]),
        (
            grouped(4, 2, "NV12", "NODE"),
            "H100-PCIe",
            [("nvlink", "mesh", 2, 300 * SHARE), ("pcie", "pcie", 2, 63 * 0.75)],
        ),
        (
            grouped(8, 2, "NV12", "SYS", "NODE"),
            "H100-PCIe",
            [("nvlink", "mesh", 2, 300 * SHARE), ("pcie", "pcie", 2, 63 * 0.75), ("sockets", "pcie", 2, 5.5)],
        ),
        (
            grouped(4, 2, "NV3", "SYS"),
            "V100-16",
            [("nvlink", "mesh", 2, 75 * SHARE), ("sockets", "pcie", 2, 11)],
        ),  # AC922
        (THREE_WITH_ONE_BRIDGE, "A100-80", [("pcie", "pcie", 3, 31 * 0.75)]),
        # no NVLink: one processor, two, each card on a processor's own
        (square(4, "PHB"), "T4", [("pcie", "pcie", 4, 16 * 0.75)]),
        (square(2, "PIX"), "L40S", [("pcie", "pcie", 2, 31 * 0.75)]),
        (grouped(8, 4, "NODE", "SYS"), "L40S", [("pcie", "pcie", 4, 31 * 0.75), ("sockets", "pcie", 2, 5.5)]),
        (grouped(8, 2, "PXB", "SYS", "NODE"), "A10", [("pcie", "pcie", 4, 31 * 0.75), ("sockets", "pcie", 2, 5.5)]),
        (square(8, "NODE"), "RTX-4090", [("pcie", "pcie", 8, 31 * 0.4)]),  # no peer-to-peer
        (square(4, "SYS"), "A10", [("sockets", "pcie", 4, 22)]),
    ],
)
def test_levels(text: str, gpu: str, expected: list[tuple[str, str, int, float]]) -> None:
    levels, _ = node_levels(read_topo(text, "topo"), gpu)
    got = [(x.name, x.topology, x.size, x.bandwidth_bytes_per_s / 1e9) for x in levels]
    assert [x[:3] for x in got] == [x[:3] for x in expected]
    assert [x[3] for x in got] == pytest.approx([x[3] for x in expected])


@each(
    ("name", "text"),
    [
        ("dgx-1-v100", DGX_1),
        ("dgx-a100", square(8, "NV12")),
        ("dgx-h100", square(8, "NV18")),
        ("gh200-quad", square(4, "NV6")),
        ("l40s-box", grouped(8, 4, "NODE", "SYS")),
        ("h100-pcie-box", grouped(8, 4, "NODE", "SYS")),
        ("t4-box", square(4, "PHB")),
    ],
)
def test_presets_are_what_their_wirings_say(name: str, text: str) -> None:
    preset = preset_cluster(name)
    assert node_levels(read_topo(text, "topo"), preset.device.name) == (preset.levels, "")


@each(
    ("text", "gpu", "note"),
    [
        (THREE_WITH_ONE_BRIDGE, "A100-80", UNEQUAL),
        (
            "GPU0 X SYS NV4 SYS\nGPU1 SYS X SYS NV4\nGPU2 NV4 SYS X SYS\nGPU3 SYS NV4 SYS X",
            "A100-80",
            f"{UNEQUAL}; number them so: CUDA_VISIBLE_DEVICES=0,2,1,3",
        ),
        (square(2, "NV4"), "L40S", "NVLinks left out, as none are known of L40S"),
        (square(2, "NV12"), "A100-80", ""),
    ],
)
def test_what_is_left_out_is_said(text: str, gpu: str, note: str) -> None:
    assert node_levels(read_topo(text, "topo"), gpu)[1] == note


@each(
    ("text", "problem"),
    [
        ("", r"no row of a GPU, such as `GPU0  X  NV18`; expected what `nvidia-smi topo -m` prints"),
        ("GPU0 X NV4\nGPU2 NV4 X", r"expected rows GPU0 to GPU2, got 0, 2; give the whole matrix"),
        (" GPU0 GPU1\nGPU0 X NV4", r"expected rows GPU0 to GPU1, got 0; give the whole matrix"),
        ("GPU0 X\nGPU1 NV4 X", r"GPU0: expected 2 entries with X as number 0; give the whole matrix"),
        (
            "GPU0 X N/A\nGPU1 N/A X",
            r"GPU0: 'N/A' is no connection; expected X, NV and a number, or one of PIX, PXB, PHB",
        ),
        ("GPU0 X NV0\nGPU1 NV0 X", r"GPU0: 'NV0' is no connection"),
        ("GPU0 X NV4\nGPU1 NV4 X\nGPU1 SYS X", r"two rows of GPU1, which differ; give one matrix"),
        (
            "GPU0 X NV4\nGPU1 NV4 X\nGPU99999999999 X",
            r"expected GPU0 to GPU1023, got 'GPU99999999999'; correct the row",
        ),
        ("GPU0 GPU99999999999\nGPU0 X NV4", r"expected GPU0 to GPU1023, got 'GPU99999999999'"),
        ("GPU0 X NV4\nGPU1024 NV4 X", r"expected GPU0 to GPU1023, got 'GPU1024'"),
        ("GPU0 X NV4\nGPU\u0661 NV4 X", r"expected GPU0 to GPU1023, got 'GPU\u0661'"),
        ("GPU20 X NV4", r"expected rows GPU0 to GPU20, got 20; give the whole matrix"),
        ("GPU0 X NV4\nGPU1 SYS X", r"GPU1 to GPU0 is SYS and back NV4; a connection is the same both ways"),
    ],
)
def test_what_is_no_matrix(text: str, problem: str) -> None:
    with pytest.raises(ClusterError, match=f"^topo.txt: {problem}"):
        read_topo(text, "topo.txt")


# ---- NCCL's file ----


def system(*cpus: str) -> str:
    inside = "".join(f'<cpu numaid="{i}" arch="x86_64" vendor="AuthenticAMD">{cpu}</cpu>' for i, cpu in enumerate(cpus))
    return f'<system version="1">{inside}</system>'


def card(number: int, *links: tuple[str, int, str]) -> str:
    nvlinks = "".join(f'<nvlink target="{target}" count="{count}" tclass="{kind}"/>' for target, count, kind in links)
    return (
        f'<pci busid="0000:0{number}:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">'
        f'<gpu dev="{number}" sm="80" rank="{number}" gdr="1">{nvlinks}</gpu></pci>'
    )


def bridge(number: int, *inside: str) -> str:
    return f'<pci busid="0000:a{number}:00.0" class="0x060400">{"".join(inside)}</pci>'


NIC = '<pci busid="0000:f0:00.0" class="0x020700"><nic><net name="mlx5_0" dev="0" speed="200000" port="1"/></nic></pci>'
SWITCH = [("0000:c4:00.0", 6, "0x068000"), ("0000:c5:00.0", 6, "0x068000")]


def to(number: int, count: int) -> tuple[str, int, str]:
    return f"0000:0{number}:00.0", count, "0x030200"


@each(
    ("text", "paths", "network_gb_per_s"),
    [
        (system(card(0, *SWITCH) + NIC, card(1, *SWITCH) + NIC), ["X NV12", "NV12 X"], 50),
        (system(card(0, to(1, 4)) + card(1, to(0, 4)), card(2)), ["X NV4 SYS", "NV4 X SYS", "SYS SYS X"], 0),
        (system(bridge(0, card(0), card(1)) + card(2)), ["X PIX PHB", "PIX X PHB", "PHB PHB X"], 0),
        (system(bridge(0, bridge(1, card(0)), bridge(2, card(1)))), ["X PXB", "PXB X"], 0),
        (system(card(1), card(0)), ["X SYS", "SYS X"], 0),
    ],
)
def test_nccls_topology(text: str, paths: list[str], network_gb_per_s: float) -> None:
    assert read_nccl(text, "t.xml") == Wiring(tuple(tuple(row.split()) for row in paths), network_gb_per_s)


@each(
    ("text", "problem"),
    [
        ("<system", r"t.xml, line 1: expected XML, got unclosed token; is the file whole\?"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><system/>', r"t.xml, line 1: expected no document type, got 'x'; remove it"),
        (70 * "<pci>", r"t.xml, line 1, pci: expected at most 1048576 elements and 64 levels; is it the right file\?"),
        ("<algo/>", r"t.xml: expected <system> at the top, got <algo>; is it NCCL's topology\?"),
        (system(NIC), r"t.xml: no <gpu> in it; dump the topology of a run that uses all GPUs \(NCCL_TOPO_DUMP_FILE\)"),
        (system(card(1)), r"t.xml: GPUs have the numbers 1; expected the file of one machine, dev 0 and on"),
        (system(card(0), card(0)), r"t.xml: two GPUs have the number 0; expected the file of one machine"),
        (
            system(card(0), card(0).replace('dev="0"', 'dev="1"')),
            r"t.xml: two GPUs at 0000:00:00\.0; expected one at each",
        ),
        (system('<gpu dev="0"/>', '<gpu dev="1"/>'), r"t.xml: expected a GPU inside of pci, got one inside of cpu"),
        (
            system(card(99999999999)),
            r"t.xml, line 1, gpu: dev: expected a whole number from 0 to 1023, got '99999999999'",
        ),
        (
            system(card(0, to(5, 4))),
            r"t.xml: the GPU at 0000:00:00\.0 has an NVLink to 0000:05:00\.0, where there is none",
        ),
        (
            system(card(0, to(0, 4)).replace('"4"', '"many"')),
            r"t.xml, line 1, nvlink: count: expected a whole number from 1 to 999, got 'many'; correct it",
        ),
        (
            system(card(0, to(1, 4)) + card(1)),
            r"t.xml: GPU1 to GPU0 is PHB and back NV4; a connection is the same both ways",
        ),
        (system(card(0) + NIC.replace("200000", "-1")), r"t.xml, line 1, net: speed: expected a whole number from 0"),
    ],
)
def test_what_is_no_topology(text: str, problem: str) -> None:
    with pytest.raises(ShardwrightError, match=f"^{problem}"):
        read_nccl(text, "t.xml")
