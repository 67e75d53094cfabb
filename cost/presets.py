"""Common machines, from published figures.

The tables hold what the sources say. What a cluster gets is what sustained use reaches of it:

    matmuls       `matmul_efficiency`: measured where the row says so, else 0.8
    memory        0.85 of the datasheet bandwidth (assumed, until calibrated)
    NVLink        0.78: NCCL's all-gather reaches 353 of 450 GB/s on 8 H100 (Azure/msccl@050b4a1 README, 1 GiB)
    PCIe          0.75, or 0.4 without peer-to-peer, where data passes through host memory (assumed)
    network       0.9 (assumed; mscclpp's all-gather on 16 H100 reaches more, Azure NDv5)

A hop's latency is the mean of NCCL's LL and LL128 ring hops, until its selector is modelled: 1.25 µs NVLink, 1.75 µs
PCIe, 3.35 µs network (NVIDIA/nccl, src/graph/tuning.cc). Memory is in decimal GB, at most 7 % below what drivers
report. Vendors' figures come by way of stas00/ml-engineering where the row says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost import checks
from shardwright.cost.cluster import Cluster, Level
from shardwright.cost.device import Device
from shardwright.cost.topology import LinkKind, Topology
from shardwright.pcg.errors import ClusterError

MEMORY_SHARE = 0.85
NETWORK_SHARE = 0.9
NETWORK_HOP_S = 3.35e-6
OP_OVERHEAD_S = 5e-6  # eager launch of a CUDA kernel from Python (assumed, until calibrated)


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the GPUs of a node: the share of its datasheet bandwidth that collectives reach, and a hop."""

    name: str
    share: float
    hop_s: float
    kind: LinkKind
    topology: Topology


NVLINK = Link("nvlink", 0.78, 1.25e-6, "nvlink", "switch")
XGMI = Link("xgmi", 0.78, 1.25e-6, "nvlink", "mesh")
PCIE = Link("pcie", 0.75, 1.75e-6, "pcie", "pcie")
PCIE_THROUGH_HOST = Link("pcie", 0.4, 1.75e-6, "pcie", "pcie")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A row of datasheet figures; rates are dense teraFLOP per second, `fp16_only` devices have no bf16."""

    memory_gb: float
    memory_tb_per_s: float
    tflops_16bit: float
    tflops_tf32: float | None
    tflops_fp32: float
    link: Link
    link_gb_per_s: float  # one way
    source: str
    matmul_efficiency: float = 0.8
    fp16_only: bool = False


_STAS = "stas00/ml-engineering"
_VENDOR = "vendor figures"

GPUS: dict[str, Gpu] = {
    "V100-16": Gpu(16, 0.9, 125, None, 15.7, NVLINK, 150, _VENDOR, fp16_only=True),
    "V100-32": Gpu(32, 0.9, 125, None, 15.7, NVLINK, 150, _VENDOR, fp16_only=True),
    "A100-40": Gpu(40, 1.555, 312, 156, 19.5, NVLINK, 300, f"{_VENDOR}; efficiency {_STAS}", 0.87),
    "A100-80": Gpu(80, 2.0, 312, 156, 19.5, NVLINK, 300, f"{_STAS}, efficiency too", 0.87),
    "H100-SXM": Gpu(80, 3.35, 989, 494.5, 67, NVLINK, 450, f"{_STAS}, efficiency too", 0.80),
    "H100-PCIe": Gpu(80, 2.0, 756, 378, 51, PCIE, 63, _STAS),
    "H200": Gpu(141, 4.8, 989, 494.5, 67, NVLINK, 450, f"{_STAS}; efficiency measured, 8192³ bf16", 0.80),
    "B200": Gpu(180, 8.0, 2250, 1125, 80, NVLINK, 900, f"{_STAS}, efficiency too", 0.78),
    "L40S": Gpu(48, 0.86, 362, 183, 91.6, PCIE, 31, _STAS),
    "MI300X": Gpu(192, 5.3, 1300, 653.7, 163.4, XGMI, 448, f"{_STAS}, efficiency too", 0.51),
    "A10": Gpu(24, 0.6, 125, 62.5, 31.2, PCIE, 31, f"{_VENDOR}, unconfirmed"),
    "RTX-4090": Gpu(24, 1.01, 165, 82.6, 82.6, PCIE_THROUGH_HOST, 31, f"{_VENDOR}, unconfirmed"),
    "T4": Gpu(16, 0.32, 65, None, 8.1, PCIE, 16, f"{_VENDOR}, unconfirmed", fp16_only=True),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """A node: its GPUs and its network, in gigabytes per second per node, one way."""

    gpu: str
    gpus: int
    network_gb_per_s: float
    source: str


_BOX = "network assumed: 100 Gb/s per node"

PRESETS: dict[str, Machine] = {
    "dgx-1-v100": Machine("V100-32", 8, 50, "network 4x100Gb, vendor figure"),
    "dgx-a100-40": Machine("A100-40", 8, 200, "network 8x200Gb HDR, vendor figure"),
    "dgx-a100": Machine("A100-80", 8, 200, "network 8x200Gb HDR, vendor figure"),
    "dgx-h100": Machine("H100-SXM", 8, 400, f"network 8x400Gb NDR, {_STAS}"),
    "dgx-h200": Machine("H200", 8, 400, "network 8x400Gb NDR, as the DGX H100"),
    "dgx-b200": Machine("B200", 8, 400, "network 8x400Gb NDR, vendor figure, unconfirmed"),
    "aws-p3": Machine("V100-16", 8, 3.1, "p3.16xlarge: network 25Gb, vendor figure, unconfirmed"),
    "aws-p4d": Machine("A100-40", 8, 50, f"network 4x100Gb EFA, {_STAS}"),
    "aws-p4de": Machine("A100-80", 8, 50, "network 4x100Gb EFA, as p4d"),
    "aws-p5": Machine("H100-SXM", 8, 400, f"network 32x100Gb EFA, {_STAS}"),
    "aws-p5en": Machine("H200", 8, 400, f"network 16x200Gb EFA, {_STAS}"),
    "gcp-a3-high": Machine("H100-SXM", 8, 100, f"network {_STAS}"),
    "gcp-a3-mega": Machine("H100-SXM", 8, 200, f"network {_STAS}"),
    "h100-pcie-box": Machine("H100-PCIe", 8, 12.5, _BOX),
    "h200-box": Machine("H200", 8, 12.5, _BOX),
    "b200-box": Machine("B200", 8, 12.5, _BOX),
    "mi300x-box": Machine("MI300X", 8, 12.5, _BOX),
    "l40s-box": Machine("L40S", 8, 12.5, _BOX),
    "a10-box": Machine("A10", 4, 12.5, _BOX),
    "rtx-4090-box": Machine("RTX-4090", 8, 12.5, _BOX),
    "t4-box": Machine("T4", 4, 12.5, _BOX),
}


def preset_cluster(name: str, nodes: int = 1, devices_per_node: int | None = None) -> Cluster:
    """The machine `name`, `nodes` times; fewer GPUs per node keep their share of the node's network.

    Raises:
        ClusterError: an unknown name, or a count that is not a positive integer or more than the machine has.
    """
    if name not in PRESETS:
        raise ClusterError(f"Cluster.preset: unknown machine {name!r}; choose one of {', '.join(PRESETS)}")
    machine = PRESETS[name]
    nodes = checks.positive_int(nodes, "Cluster.preset", "nodes", "the number of machines")
    used = machine.gpus if devices_per_node is None else devices_per_node
    used = checks.positive_int(used, "Cluster.preset", "devices_per_node", "the number of GPUs used in each machine")
    if used > machine.gpus:
        raise ClusterError(f"Cluster.preset: {name!r} has {machine.gpus} devices per node, got {used}; take more nodes")
    gpu = GPUS[machine.gpu]
    network = Level("network", nodes, machine.network_gb_per_s * 1e9 * NETWORK_SHARE / machine.gpus, NETWORK_HOP_S)
    levels = (in_node_level(gpu, used), network) if nodes > 1 else (in_node_level(gpu, used),)
    provenance = f"datasheet: {machine.gpu} {gpu.source}; {machine.source}"
    return Cluster(name, gpu_device(machine.gpu), levels, "nccl", provenance)


def gpu_device(name: str) -> Device:
    """The GPU `name` of the table, at the rates that sustained use reaches."""
    gpu = GPUS[name]
    rates = {"fp32": gpu.tflops_fp32, "tf32": gpu.tflops_tf32, "fp16": gpu.tflops_16bit}
    if not gpu.fp16_only:
        rates["bf16"] = gpu.tflops_16bit
    return Device(
        name=name,
        memory_bytes=round(gpu.memory_gb * 1e9),
        memory_bytes_per_s=gpu.memory_tb_per_s * 1e12 * MEMORY_SHARE,
        flops_per_s={precision: rate * 1e12 for precision, rate in rates.items() if rate is not None},
        matmul_efficiency=gpu.matmul_efficiency,
        op_overhead_s=OP_OVERHEAD_S,
        kind="cuda",
    )


def in_node_level(gpu: Gpu, size: int) -> Level:
    """`size` GPUs of one node at the bandwidth that collectives reach."""
    link, bandwidth = gpu.link, gpu.link_gb_per_s * 1e9 * gpu.link.share
    return Level(link.name, size, bandwidth, link.hop_s, link.kind, link.topology)
