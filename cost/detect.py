"""The cluster that a process runs on: torchrun's environment, and the devices that torch sees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from shardwright.cost.cluster import Cluster, Level
from shardwright.cost.local import local_cluster
from shardwright.cost.presets import GPUS, NETWORK_HOP_S, NETWORK_SHARE, gpu_device, in_node_level
from shardwright.pcg.errors import ClusterError

# What `torch.cuda.get_device_name` says, and the preset; the first match counts.
_GPU_NAMES = (
    (r"V100.*32GB", "V100-32"),
    (r"V100", "V100-16"),
    (r"A100.*80GB", "A100-80"),
    (r"A100", "A100-40"),
    (r"H100.*PCIe", "H100-PCIe"),
    (r"H100", "H100-SXM"),
    (r"H200", "H200"),
    (r"B200", "B200"),
    (r"L40S", "L40S"),
    (r"MI300X", "MI300X"),
    (r"A10\b", "A10"),
    (r"RTX 4090", "RTX-4090"),
    (r"\bT4\b", "T4"),
)
_NETWORK_BYTES_PER_S = 12.5e9  # per node: 100 Gb/s, as nothing on a node says what joins it to the others
_CPU_NETWORK = Level("network", 1, 1.1e9, 50e-6)  # 10 Gb/s TCP


def detect_cluster(environ: Mapping[str, str]) -> Cluster:
    """The cluster of a process with this environment.

    Under torchrun, `WORLD_SIZE` ranks in nodes of `LOCAL_WORLD_SIZE`; without it, this machine's GPUs or one CPU rank.
    Bandwidth between nodes cannot be seen: it is assumed, and the provenance says so.

    Raises:
        ClusterError: the environment contradicts itself, or the GPU is in no preset.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    world = _count(environ, "WORLD_SIZE", default=max(1, num_gpus))
    local = _count(environ, "LOCAL_WORLD_SIZE", default=world)
    if world % local:
        raise ClusterError(
            f"LOCAL_WORLD_SIZE={local} does not divide WORLD_SIZE={world}; start the same number of ranks on every node"
        )
    if num_gpus >= local:
        return _gpu_cluster(torch.cuda.get_device_name(0), _gpu_memory_bytes(), local, world // local)
    return _cpu_cluster(local, world // local)


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, str(default))
    if not value.isdecimal() or int(value) < 1:
        advice = "start the run by torchrun, or unset it"
        raise ClusterError(f"environment: {name}: expected a positive integer, got {value!r}; {advice}")
    return int(value)


def _gpu_memory_bytes() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory


def _gpu_cluster(name: str, memory_bytes: int, local: int, nodes: int) -> Cluster:
    preset = next((preset for pattern, preset in _GPU_NAMES if re.search(pattern, name)), None)
    if preset is None:
        known = ", ".join(GPUS)
        advice = "describe it in a file and use Cluster.load(path)"
        raise ClusterError(f"Cluster.detect: no figures for the GPU {name!r}, only for {known}; {advice}")
    device = replace(gpu_device(preset), memory_bytes=memory_bytes)
    levels = (in_node_level(GPUS[preset], local),)
    provenance = f"datasheet: {preset} {GPUS[preset].source}; memory detected"
    if nodes > 1:
        levels += (Level("network", nodes, _NETWORK_BYTES_PER_S * NETWORK_SHARE / local, NETWORK_HOP_S),)
        provenance += "; network assumed: 100 Gb/s per node"
    return Cluster(f"detected-{preset}", device, levels, "nccl", provenance)


def _cpu_cluster(local: int, nodes: int) -> Cluster:
    node = local_cluster(local)
    if nodes == 1:
        return node
    bandwidth = _CPU_NETWORK.bandwidth_bytes_per_s / local
    network = replace(_CPU_NETWORK, size=nodes, bandwidth_bytes_per_s=bandwidth)
    provenance = f"{node.provenance}; network assumed: 10 Gb/s per node"
    return Cluster(f"{node.name}-{nodes}-nodes", node.device, (*node.levels, network), "gloo", provenance)
