"""Common machines, from published figures.

`machines.json` beside this file holds the published figures: GPUs, links and machines, each row with its source. A
cluster gets the part of them that sustained use reaches: a share of the datasheet's bandwidths, an efficiency of
matmuls; these shares are in the file too, with their sources. Memory is what the driver reports to programs: up to 7 %
more than the datasheet's decimal GB, and up to 2 % less where GDDR6 corrects errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, gcd
from pathlib import Path
from typing import Any

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.clusters.device import ATTENTION_BACKWARD_EFFICIENCY, ATTENTION_EFFICIENCY, Device
from shardwright.cost.clusters.topology import Level, LinkKind, Topology, slowest_level
from shardwright.pcg import checks
from shardwright.pcg.errors import ClusterError


@dataclass(frozen=True, slots=True)
class LinkRow:
    """A kind of link: the share of its datasheet bandwidth that collectives reach, and the latency of a hop."""

    name: str
    kind: LinkKind
    topology: Topology
    share: float
    hop_s: float
    source: str

    def level(self, size: int, gb_per_s: float) -> Level:
        """Return a level of `size` units whose devices each send `gb_per_s` by the datasheet."""
        return Level(self.name, size, gb_per_s * 1e9 * self.share, self.hop_s, self.kind, self.topology)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its datasheet, and the shares of its rates that kernels reach in a training run."""

    num_units: int
    memory_gib: float  # as the driver reports it
    memory_tb_per_s: float
    tflops: Mapping[str, float]
    link: str
    link_gb_per_s: float  # all links of one GPU together, one way
    host_gb_per_s: float  # to the host's memory, one way
    source: str
    matmul_efficiency: float
    memory_share: float
    nvlinks: int = 0  # of one GPU, to switches, bridges or other GPUs
    nvlink_gb_per_s: float = 0.0  # of one NVLink, one way
    attention_efficiency: float = ATTENTION_EFFICIENCY
    attention_backward_efficiency: float = ATTENTION_BACKWARD_EFFICIENCY


@dataclass(frozen=True, slots=True)
class Pod:
    """A group of `nodes` machines; one more level with the machines' own bandwidth joins the pods."""

    nodes: int
    name: str
    topology: Topology
    oversubscription: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A node: its GPUs and its network, in gigabytes per second per node, one way.

    `sockets`: how many processors have equal parts of the GPUs on their root complexes; it matters without NVLink.
    """

    gpu: str
    gpus: int
    network: str
    network_gb_per_s: float
    source: str
    pod: Pod | None = None
    sockets: int = 1


def _machine(row: Mapping[str, Any]) -> Machine:
    fields: dict[str, Any] = {**row, "pod": Pod(**row["pod"]) if "pod" in row else None}
    return Machine(**fields)


_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("machines.json").read_text(encoding="utf-8"))
ASSUMED_NETWORK_GB_PER_S = 12.5  # per node
_SHARES = {name: _TABLE[name]["value"] for name in ("matmul_efficiency", "memory_share")}
SOCKET_GB_PER_S: float = _TABLE["socket_gb_per_s"]["value"]
CONTEXT_BYTES: int = _TABLE["context_bytes"]["value"]
LINKS: dict[str, LinkRow] = {name: LinkRow(**row) for name, row in _TABLE["links"].items()}
GPUS: dict[str, Gpu] = {name: Gpu(**_SHARES | row) for name, row in _TABLE["gpus"].items()}
PRESETS: dict[str, Machine] = {name: _machine(row) for name, row in _TABLE["machines"].items()}


def preset_cluster(name: str, nodes: int = 1, devices_per_node: int | None = None) -> Cluster:
    """Return `nodes` times the machine `name` of `PRESETS`; a GPU keeps its share of the node's network.

    Raises:
        ClusterError: an unknown name, or a count that is not a positive integer, is more than the machine has, or makes
            no equal pods of a machine that comes in pods.
    """
    machine = _known(name, "Cluster.preset")
    used = _used(name, devices_per_node, "Cluster.preset")
    nodes = checks.positive_int(nodes, "Cluster.preset", "nodes", "the number of machines")
    return _cluster(name, (*_node_levels(machine, used), *_network_levels(name, nodes)))


def preset_mix(machines: Sequence[tuple[str, int] | tuple[str, int, int]]) -> Cluster:
    """Join machines of several kinds by one network, in the order of their ranks.

    `machines`: such as [("dgx-h100", 4), ("l40s-box", 1, 4)]: a name, the number of nodes and, if not all are used, the
    number of devices in each node. All ranks together have the slowest of the links. Nodes of unlike sizes are joined
    as by `Cluster.join`.

    Raises:
        ClusterError: as `preset_cluster` and `Cluster.join`.
    """
    parts: list[Cluster] = []
    for name, count, *used in machines:
        machine = _known(name, "Cluster.mixed")
        nodes = checks.positive_int(count, "Cluster.mixed", "nodes", "the number of machines")
        levels = _node_levels(machine, _used(name, used[0] if used else None, "Cluster.mixed"))
        parts.append(_cluster(name, (*levels, _network_level(machine, nodes))))
    if not parts:
        raise ClusterError("Cluster.mixed: expected machines, got none; give pairs such as ('dgx-h100', 4)")
    in_node = [cluster.num_devices // cluster.levels[-1].size for cluster in parts]
    unit = in_node[0] if len(set(in_node)) == 1 else gcd(*(cluster.levels[0].size for cluster in parts))
    num_units = sum(cluster.num_devices for cluster in parts) // unit
    return Cluster.join(parts, slowest_level([part.levels[-1] for part in parts], num_units))


def _used(name: str, given: int | None, owner: str) -> int:
    """Return the number of devices used in each node."""
    machine = _known(name, owner)
    used = machine.gpus if given is None else given
    used = checks.positive_int(used, owner, "devices_per_node", "the number of GPUs used in each machine")
    if used > machine.gpus:
        raise ClusterError(f"{owner}: {name!r} has {machine.gpus} devices per node, got {used}; take more nodes")
    return used


def machine_named(name: str) -> str:
    """Return the machine of a name; a GPU's name, in any case, stands for the first machine that has it."""
    has = (machine for machine, row in PRESETS.items() if row.gpu.casefold() == name.casefold())
    return name if name in PRESETS else next(has, name)


def _known(name: str, owner: str) -> Machine:
    if name not in PRESETS:
        raise ClusterError(f"{owner}: unknown machine {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def _cluster(name: str, levels: tuple[Level, ...]) -> Cluster:
    machine = PRESETS[name]
    provenance = f"datasheet: {machine.gpu} {GPUS[machine.gpu].source}; {machine.source}"
    return Cluster(name, gpu_device(machine.gpu), levels, "nccl", provenance)


def _network_levels(name: str, nodes: int) -> tuple[Level, ...]:
    """Return the levels that join `nodes` machines: none, a network, or a network in each pod and one of pods."""
    machine, pod = PRESETS[name], PRESETS[name].pod
    if nodes == 1:
        return ()
    if pod is None or nodes <= pod.nodes:
        return (_network_level(machine, nodes),)
    in_pod = max(size for size in range(1, pod.nodes + 1) if nodes % size == 0)
    if in_pod < pod.nodes / 2:
        raise ClusterError(
            f"Cluster.preset: {name!r} comes in pods of up to {pod.nodes} nodes, {nodes} nodes do not make equal pods "
            f"of at least half of that; take a multiple of {pod.nodes}, or at most one pod"
        )
    network = _network_level(machine, in_pod)
    spine = Level(
        name=pod.name,
        size=nodes // in_pod,
        bandwidth_bytes_per_s=network.bandwidth_bytes_per_s,
        latency_s=network.latency_s,
        topology=pod.topology,
        oversubscription=pod.oversubscription,
    )
    return (network, spine)


def _network_level(machine: Machine, nodes: int) -> Level:
    return LINKS[machine.network].level(nodes, machine.network_gb_per_s / machine.gpus)


def gpu_device(name: str) -> Device:
    """Return the GPU `name` of the table, at the rates that sustained use reaches."""
    gpu = GPUS[name]
    return Device(
        name=name,
        memory_bytes=round(gpu.memory_gib * 2**30),
        memory_bytes_per_s=gpu.memory_tb_per_s * 1e12 * gpu.memory_share,
        flops_per_s={precision: rate * 1e12 for precision, rate in gpu.tflops.items()},
        matmul_efficiency=gpu.matmul_efficiency,
        op_overhead_s=_TABLE["op_overhead_s"]["value"],
        kind="cuda",
        attention_efficiency=gpu.attention_efficiency,
        attention_backward_efficiency=gpu.attention_backward_efficiency,
        num_units=gpu.num_units,
        kernel_s=_TABLE["kernel_s"]["value"],
        host_bytes_per_s=gpu.host_gb_per_s * 1e9 * LINKS["pcie"].share,
        context_bytes=CONTEXT_BYTES,
    )


def _node_levels(machine: Machine, used: int) -> tuple[Level, ...]:
    """Return the levels that join `used` GPUs of a machine: one, or one under each processor and one of processors.

    Where the GPUs do not lie evenly under the processors, all have the narrower of the two.
    """
    under_one = machine.gpus // machine.sockets
    if used <= under_one:
        return (in_node_level(machine.gpu, used),)
    sharing = ceil(used / machine.sockets)
    between = LINKS["sockets"].level(machine.sockets, SOCKET_GB_PER_S / sharing)
    if used % machine.sockets:
        return (slowest_level([in_node_level(machine.gpu, used), between], used),)
    return in_node_level(machine.gpu, sharing), between


def in_node_level(gpu: str, size: int, link: str = "") -> Level:
    """Return a level of `size` GPUs of one node at the bandwidth that collectives reach, by `link` or their own."""
    row = GPUS[gpu]
    if link and link != row.link:
        return LINKS[link].level(size, row.host_gb_per_s)
    in_machines = max(machine.gpus for machine in PRESETS.values() if machine.gpu == gpu)
    return LINKS[row.link].level(max(size, in_machines), row.link_gb_per_s).resized(size)


def assumed_network(nodes: int, devices_per_node: int) -> Level:
    """Return the level that joins nodes with an unknown network: 100 Gb/s each."""
    return LINKS["ethernet"].level(nodes, ASSUMED_NETWORK_GB_PER_S / devices_per_node)
