"""The cluster that a process runs on: by its launcher's environment, the devices that torch sees, and the driver."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.local import local_cluster, saved_cluster
from shardwright.cost.clusters.presets import GPUS, LINKS, assumed_network, gpu_device, in_node_level
from shardwright.cost.clusters.topology import Level
from shardwright.pcg.errors import ClusterError, DistributedError
from shardwright.pcg.launcher import device_index, find_launch

# Names that torch gives, and presets; the first match counts, and of its presets the one with the nearest memory.
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
_CPU_NETWORK = Level("network", 1, 1.1e9, 50e-6)  # 10 Gb/s TCP


def detect_cluster(environ: Mapping[str, str] = os.environ) -> Cluster:
    """The cluster of a process with this environment; one node's GPUs as `calibrate` measured them, if it has.

    Under torchrun, `srun` or `mpirun` (`pcg.launcher`) as many ranks as it started; else this machine's GPUs or one
    CPU rank.
    Other nodes cannot be seen: they are taken to be like this one, the bandwidth to them is assumed, and the provenance
    says so.

    Raises:
        ClusterError: the environment contradicts itself, or the GPUs are in no preset or of several kinds.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        sized = {"RANK": "0", "LOCAL_RANK": "0", **environ}  # which rank it is makes no difference
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
    return (_gpu_cluster if uses_gpus else _cpu_cluster)(local, world // local)


def _gpu_cluster(local: int, nodes: int) -> Cluster:
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(local)]
    names = sorted({properties.name for properties in found})
    if len(names) > 1:
        advice = "show torch only those of one kind (CUDA_VISIBLE_DEVICES), or describe the cluster in a file"
        raise ClusterError(f"Cluster.detect: this machine has GPUs of several kinds: {', '.join(names)}; {advice}")
    saved = saved_cluster(local, names[0], "cuda") if nodes == 1 else None
    if saved is not None:
        return saved
    memory_bytes = min(properties.total_memory for properties in found)
    preset = _preset_of(names[0], memory_bytes)
    device = replace(gpu_device(preset), memory_bytes=memory_bytes)
    link, how = _link(preset, names[0], local)
    levels = (in_node_level(preset, local, link),)
    provenance = f"datasheet: {preset} {GPUS[preset].source}; memory detected, links {how}"
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
    return min(presets, key=lambda preset: abs(gpu_device(preset).memory_bytes - memory_bytes))


def _link(preset: str, name: str, local: int) -> tuple[str, str]:
    """The row of `LINKS` between this node's GPUs, and how that is known.

    A GPU that comes with and without NVLink has it where the driver says so; without a driver's word, by its name.
    """
    usual = GPUS[preset].link
    if local == 1 or LINKS[usual].kind != "nvlink":
        return usual, "as usual for this GPU"
    matrix = _nvidia_smi_topology()
    if matrix is None:
        return ("pcie" if "PCI" in name.upper() else usual), "by the GPU's name"
    return (usual if has_nvlink(matrix, local) else "pcie"), "detected"


def has_nvlink(matrix: str, local: int) -> bool:
    """Whether every one of the first `local` GPUs has NVLinks to another of them, by `nvidia-smi topo -m`.

    A row of the matrix is a GPU and what joins it to each GPU: `X` for itself, `NV12` for 12 NVLinks, else PCIe or the
    processors.
    """
    rows = [line.split() for line in matrix.splitlines()]
    links = {row[0]: row[1 : 1 + local] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and len(row) > local}
    mine = [links.get(f"GPU{index}", []) for index in range(local)]
    return all(any(re.fullmatch(r"NV\d+", entry) for entry in row) for row in mine)


def _nvidia_smi_topology() -> str | None:
    """What `nvidia-smi topo -m` prints, without the terminal's underlining; None where it cannot be asked."""
    try:
        ran = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return re.sub(r"\x1b\[[0-9;]*m", "", ran.stdout)


def _cpu_cluster(local: int, nodes: int) -> Cluster:
    node = local_cluster(local)
    if nodes == 1:
        return node
    bandwidth = _CPU_NETWORK.bandwidth_bytes_per_s / local
    network = replace(_CPU_NETWORK, size=nodes, bandwidth_bytes_per_s=bandwidth)
    provenance = f"{node.provenance}; network assumed: 10 Gb/s per node"
    return Cluster(f"{node.name}-{nodes}-nodes", node.device, (*node.levels, network), "gloo", provenance)
