"""Topologies of TACCL's files: machines of one kind, with the links that TACCL has built in or those of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from shardwright.cost.clusters.networks import DGX1_NVLINKS, GB, Box, machines
from shardwright.pcg.collectives.files.taccl import TacclMachine
from shardwright.pcg.collectives.topology import Edge, Topology
from shardwright.pcg.errors import ClusterError


def taccl_topology(machine: TacclMachine, nodes: int = 1) -> Topology:
    """Return machines whose ranks share the NICs; NDv2 and DGX-2 have their links, others need them in the file.

    Raises:
        ClusterError: another name and no links, links of one way, or NICs that the ranks cannot share evenly.
    """
    per_nic, rest = divmod(machine.num_ranks, machine.num_nics)
    if rest:
        problem = f"expected NICs that {machine.num_ranks} ranks share evenly, got {machine.num_nics}"
        raise _error(machine, f"{problem}; correct nics_per_node")
    rate = machine.nic_rate / GB
    return machines(machine.name, [_box(machine)] * nodes, [rate] * nodes, per_nic, machine.nic_latency_s)


def _box(machine: TacclMachine) -> Box:
    word = machine.name.upper().replace("-", "").replace("_", "")
    if machine.links:
        return _wired(machine, _both_ways(machine), machine.rates)
    if word.startswith(("NDV2", "DGX1")) and machine.num_ranks == 8 and len(machine.rates) == 2:
        return _wired(machine, DGX1_NVLINKS, sorted(machine.rates))
    if word.startswith("DGX2"):
        switch, half_s = machine.num_ranks, machine.latency_s / 2
        return Box(switch, [(rank, switch, max(machine.rates), half_s) for rank in range(switch)], ("NVSwitch",))
    raise _error(
        machine, "expected a matrix of links, as only NDv2 and DGX-2 have theirs built in; add links to the file"
    )


def _both_ways(machine: TacclMachine) -> Mapping[Edge, int]:
    for (src, dst), kind in machine.links.items():
        if machine.links.get((dst, src)) != kind:
            raise _error(
                machine, f"links: expected the same link from {dst} to {src} as from {src} to {dst}; correct one"
            )
    return {edge: kind for edge, kind in machine.links.items() if edge[0] < edge[1]}


def _wired(machine: TacclMachine, kinds: Mapping[Edge, int], rates: Sequence[Fraction]) -> Box:
    """Return links whose kind counts from 1 in the list of rates."""
    return Box(machine.num_ranks, [(a, b, rates[kind - 1], machine.latency_s) for (a, b), kind in kinds.items()])


def _error(machine: TacclMachine, problem: str) -> ClusterError:
    return ClusterError(f"topology {machine.name!r}: {problem}")
