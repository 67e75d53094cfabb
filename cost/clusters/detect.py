"""The cluster that a process runs on, from its launcher's environment, torch's devices and the driver."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.device import Device
from shardwright.cost.clusters.local import local_cluster, saved_cluster
from shardwright.cost.clusters.presets import GPUS, LINKS, assumed_network, gpu_device, in_node_level
from shardwright.cost.clusters.topology import Level
from shardwright.cost.clusters.wiring import node_levels, read_topo
from shardwright.pcg.errors import ClusterError, DistributedError
from shardwright.pcg.launcher import device_index, find_launch

# Names that torch gives, and their presets. The first match counts; of its presets, the one with the nearest memory.
_GPU_NAMES = (
    (r"V100", ("V100-16", "V100-32")),
    (r"A100", ("A100-40", "A100-80")),
    (r"GH200", ("GH200-96",)),
    (r"GB200", ("GB200",)),
    (r"H100.*(PCIe|NVL)", ("H100-PCIe",)),
    (r"H100", ("H100-SXM", "H100-96")),
    (r"H200", ("H200",)),
    (r"B200", ("B200",)),
    (r"L40S", ("L40S",)),
    (r"MI300X", ("MI300X",)),
    (r"A10\b", ("A10",)),
    (r"RTX 4090", ("RTX-4090",)),
    (r"\bT4\b", ("T4",)),
)
_MIG = " MIG "  # in the name of a slice of a card: "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
_CPU_NETWORK = Level("network", 1, 1.1e9, 50e-6)  # 10 Gb/s TCP


def detect_cluster(environ: Mapping[str, str] = os.environ) -> Cluster:
    """Detect the cluster of a process with this environment; a saved calibration of one node's GPUs is used.

    Under torchrun, `srun` or `mpirun` (`pcg.launcher`) the cluster has as many ranks as the launcher started; else it
    is this machine's GPUs or one CPU rank. Other nodes cannot be seen: they are taken to be like this one, the
    bandwidth to them is assumed, and the provenance says so.

    Raises:
        ClusterError: the environment contradicts itself, or the GPUs are in no preset or of several kinds.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        sized = {"RANK": "0", "LOCAL_RANK": "0", **environ}  # the rank itself makes no difference
        launch = find_launch(sized if "WORLD_SIZE" in environ else environ)
        uses_gpus = num_gpus > 0 and (launch is None or device_index(launch, num_gpus, environ) is not None)
    except DistributedError as error:
        raise ClusterError(str(error)) from None
    world = launch.world if launch else max(1, num_gpus)
    local = (launch.local_world if launch else None) or world
    sizes = sorted(set(launch.on_nodes if launch else ()))
    if world % local or len(sizes) > 1:
        unequal = f"nodes have {' and '.join(map(str, sizes))} ranks"
        problem = unequal if sizes else f"LOCAL_WORLD_SIZE={local} does not divide WORLD_SIZE={world}"
        raise ClusterError(
            f"{problem}; start the same number of ranks on every node, or describe the cluster in a file (Cluster.join)"
        )
    if not uses_gpus:
        return _cpu_cluster(local, world // local)
    return _gpu_cluster(local, world // local, environ)


def _gpu_cluster(local: int, nodes: int, environ: Mapping[str, str]) -> Cluster:
    import torch

    visible = torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(index) for index in range(min(local, visible))]
    names = sorted({properties.name for properties in gpus})
    if len(names) > 1:
        advice = "show torch only those of one kind (CUDA_VISIBLE_DEVICES), or describe the cluster in a file"
        raise ClusterError(f"Cluster.detect: this machine has GPUs of several kinds: {', '.join(names)}; {advice}")
    saved = saved_cluster(local, names[0], "cuda") if nodes == 1 else None
    if saved is not None:
        return saved
    if _MIG in names[0] and local > 1:
        raise ClusterError(
            f"Cluster.detect: {local} ranks on this machine have slices of GPUs ({names[0]}), which NCCL does not join;"
            " give each rank a whole GPU, or start one rank"
        )
    memory_bytes = min(properties.total_memory for properties in gpus)
    preset = _preset_of(names[0], memory_bytes)
    device, share = _part_of(gpu_device(preset), memory_bytes, min(p.multi_processor_count for p in gpus))
    levels, how = _node_links(preset, names[0], local, visible, environ)
    provenance = f"datasheet: {preset} {GPUS[preset].source}; memory detected, links {how}"
    if share:
        provenance += f"; {share}"
    if nodes > 1:
        levels += (assumed_network(nodes, local),)
        provenance += "; network assumed: 100 Gb/s per node"
    return Cluster(f"detected-{preset}", device, levels, "nccl", provenance)


def _preset_of(name: str, memory_bytes: int) -> str:
    presets = next((presets for pattern, presets in _GPU_NAMES if re.search(pattern, name)), None)
    if presets is None:
        known = ", ".join(GPUS)
        advice = "describe it in a file and use Cluster.load(path)"
        raise ClusterError(f"Cluster.detect: no figures for the GPU {name!r}, only for {known}; {advice}")
    stated = re.search(r"(\d+)GB", name.partition(_MIG)[0])  # a slice has a part of its card's memory
    expected_bytes = int(stated[1]) * 1e9 if stated and _MIG in name else memory_bytes
    return min(presets, key=lambda preset: abs(gpu_device(preset).memory_bytes - expected_bytes))


def _part_of(device: Device, memory_bytes: int, num_units: int) -> tuple[Device, str]:
    """Return the device with this memory and number of multiprocessors, and the share in words ("" if whole).

    A slice of a card has fewer multiprocessors. Rates of products scale with the multiprocessors, the rate of memory
    with the memory.
    """
    if not 0 < num_units < device.num_units:
        return replace(device, memory_bytes=memory_bytes), ""
    units, memory = num_units / device.num_units, min(1.0, memory_bytes / device.memory_bytes)
    rates = {precision: rate * units for precision, rate in device.flops_per_s.items()}
    part = replace(
        device,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=device.memory_bytes_per_s * memory,
        flops_per_s=rates,
        num_units=num_units,
    )
    return part, f"{num_units} of the GPU's {device.num_units} multiprocessors"


def _node_links(
    preset: str, name: str, local: int, visible: int, environ: Mapping[str, str]
) -> tuple[tuple[Level, ...], str]:
    """Return the levels between this node's GPUs, and their source: the driver, else the GPU's name.

    A GPU that comes with and without NVLink has it where the name does not say PCIe.
    """
    usual = GPUS[preset].link
    if local == 1:
        return (in_node_level(preset, 1),), "as usual for this GPU"
    matrix, gpus = _nvidia_smi_topology(), _visible_gpus(environ, local, visible)
    how = "by the GPU's name"
    if matrix is not None and gpus is not None:
        try:
            wiring = read_topo(matrix, "nvidia-smi topo -m")
        except ClusterError as error:
            how += f" ({error})"
        else:
            if max(gpus) < wiring.num_gpus:
                levels, note = node_levels(wiring.of(gpus), preset)
                return levels, f"detected{f' ({note})' if note else ''}"
    without = LINKS[usual].kind == "nvlink" and "PCI" in name.upper()
    return (in_node_level(preset, local, "pcie" if without else usual),), how


def _visible_gpus(environ: Mapping[str, str], local: int, visible: int) -> list[int] | None:
    """Return the driver's numbers of the ranks' GPUs, in the order of ranks; None where they have other names."""
    shown = environ.get("CUDA_VISIBLE_DEVICES", "")
    if not shown or visible < local:  # each rank sees its own alone: the first ones, in order
        return list(range(local))
    numbers = [part.strip() for part in shown.split(",")][:local]
    return [int(number) for number in numbers] if all(number.isdecimal() for number in numbers) else None


def _nvidia_smi_topology() -> str | None:
    """Return the output of `nvidia-smi topo -m`, or None where the tool cannot run."""
    try:
        ran = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout


def _cpu_cluster(local: int, nodes: int) -> Cluster:
    node = local_cluster(local)
    if nodes == 1:
        return node
    bandwidth = _CPU_NETWORK.bandwidth_bytes_per_s / local
    network = replace(_CPU_NETWORK, size=nodes, bandwidth_bytes_per_s=bandwidth)
    provenance = f"{node.provenance}; network assumed: 10 Gb/s per node"
    return Cluster(f"{node.name}-{nodes}-nodes", node.device, (*node.levels, network), "gloo", provenance)
