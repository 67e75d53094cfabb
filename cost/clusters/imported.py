"""Clusters from other tools' output: the wiring by `nvidia-smi` or NCCL, the hosts by Slurm."""

from __future__ import annotations

from pathlib import Path

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.presets import ASSUMED_NETWORK_GB_PER_S, GPUS, LINKS, gpu_device
from shardwright.cost.clusters.wiring import Wiring, node_levels, read_nccl, read_topo
from shardwright.pcg import checks
from shardwright.pcg.errors import ClusterError
from shardwright.pcg.hostlist import hosts_of


def imported_cluster(
    text: str, source: str, gpu: str, nodes: int = 1, network_gb_per_s: float | None = None
) -> Cluster:
    """Return `nodes` machines wired as `text`, the output of `nvidia-smi topo -m` or NCCL's topology in XML.

    `gpu`: the kind of all GPUs, one of `GPUS`. `network_gb_per_s`: of a node, one way; by default the sum of the
    network cards in NCCL's file, else an assumed 100 Gb/s. `source` names the text in errors.

    Raises:
        ClusterError, ScheduleError: a text of neither kind, or an unknown GPU.
    """
    if gpu not in GPUS:
        raise ClusterError(f"GPU {gpu!r} is not in the table; choose one of {', '.join(GPUS)}")
    nodes = checks.positive_int(nodes, "cluster import", "nodes", "the number of machines")
    is_xml = text.lstrip("\ufeff \t\r\n").startswith("<")
    wiring = (read_nccl if is_xml else read_topo)(text.lstrip("\ufeff"), source)
    levels, note = node_levels(wiring, gpu)
    provenance = f"datasheet: {gpu} {GPUS[gpu].source}; links by {'NCCL' if is_xml else 'nvidia-smi topo -m'}"
    if note:
        provenance += f" ({note})"
    if nodes > 1:
        rate, how = _network(wiring, network_gb_per_s)
        levels += (LINKS["ethernet"].level(nodes, rate / wiring.num_gpus),)
        provenance += f"; network {how}: {rate:g} GB/s per node"
    return Cluster(f"{nodes} × {wiring.num_gpus} {gpu}", gpu_device(gpu), levels, "nccl", provenance)


def num_hosts(given: str) -> int:
    """Return the number of different hosts in a Slurm host list, or in a file that holds one.

    Raises:
        ClusterError: no host list, or a file that cannot be read.
    """
    path = Path(given)
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else given
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{given}: cannot read the host list ({error})") from None
    return len(set(hosts_of(text)))


def _network(wiring: Wiring, given: float | None) -> tuple[float, str]:
    if given is not None:
        return given, "as given"
    if wiring.network_gb_per_s:
        return wiring.network_gb_per_s, "by its cards"
    return ASSUMED_NETWORK_GB_PER_S, "assumed"
