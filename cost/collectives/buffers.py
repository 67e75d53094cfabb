"""Device memory that NCCL keeps for its connections, beside the tensors that it moves.

A rank has one communicator for each process group: for every mesh axis that a plan communicates on, and for the column
of pipeline stages that it is in. From the source of NVIDIA/nccl, 2.27 and 2.28:

    connection   the receiver has a buffer for each protocol (init.cc: LL 8 lines · 512 threads · 8 steps · 16 bytes,
                 LL128 120 elements · 640 threads · 8 steps · 8 bytes, Simple 4 MiB), the sender a small one; pages are
                 of 2 MiB. That makes 10 and 2 MiB (p2p.cc), which issue 1685 of NVIDIA/nccl logged. Over the network
                 both ends have such buffers on the device, but LL's, which is the host's (net.cc, GPUDirect RDMA)
    ring         each channel receives from one neighbour and sends to another
    tree         within a node the same neighbours the other way; across nodes one device of each node has, over the two
                 trees, two peers on average
    nvls         16 channels · 2 directions · devices of the node, at most 32 · 8 steps · 128 KiB (nvls.cc); across
                 nodes every device has the peers of a tree on every channel
    send         between two devices, both ways: twice as many channels as they have NVLinks, else 2, made a power of
                 two (paths.cc): 32 between H100s, as in issue 1685. Across hosts, which have at most 8 devices (one
                 NVLink domain may span several), halved until those of all members fit the communicator's
    shared       of every communicator, for sends over the network, even where there are none: channels, as a power of
                 two, · 16 · 512 KiB within NVLink, 128 KiB beyond (net.cc). 64 channels: 512 MiB, as in issue 2363. As
                 much again where it receives so

An algorithm is connected when it is first chosen (2.22 and later): here, each that `nccl.curve` has at some size. No
GPU of ours has confirmed the sums. Left out: communicators that ranks use once, such as that of all of them; shares
between communicators that were split; weights gathered after the update of a sharded optimizer; 64 channels on
Blackwell; CollNet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import ceil, prod

from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster
from shardwright.cost.collectives import nccl
from shardwright.cost.collectives.communication import Communication
from shardwright.cost.collectives.groups import Link
from shardwright.cost.collectives.nccl import Generation
from shardwright.pcg.graph import Graph
from shardwright.pcg.moves import Move, fused_moves

_PAGE_BYTES = 1 << 21
_STEPS = 8
PROTOCOL_BYTES = {"LL": 8 * 512 * _STEPS * 16, "LL128": 120 * 640 * _STEPS * 8, "Simple": 1 << 22}
"""The bytes of one connection's receiver, by protocol."""


def _pages(num_bytes: int) -> int:
    return ceil(num_bytes / _PAGE_BYTES) * _PAGE_BYTES


RECEIVE_BYTES, SEND_BYTES = _pages(sum(PROTOCOL_BYTES.values())), _PAGE_BYTES
BOTH_BYTES = RECEIVE_BYTES + SEND_BYTES
"""The bytes of one receiver and one sender on a channel, within a node."""
NETWORK_BYTES = 2 * _pages(PROTOCOL_BYTES["LL128"] + PROTOCOL_BYTES["Simple"])
"""The bytes of one receiver and one sender on a channel, over the network."""
MOST_NVLS_HEADS, MOST_IN_HOST = 32, 8
NVLS_HEAD_BYTES = nccl.NVLS_CHANNELS * 2 * _STEPS * (128 << 10)
SHARED_STEPS, NVLINK_CHUNK_BYTES, CHUNK_BYTES = 16, 512 << 10, 128 << 10
NETWORK_GB_PER_S_PER_CHANNEL = 14
NVLINK_GB_PER_S = {nccl.HOPPER: 20.6, nccl.BLACKWELL: 40.1}
"""The rate of one NVLink, one way; 20 for the other generations (topo.h)."""


def axes_bytes(graph: Graph, cluster: Cluster, moves: Iterable[tuple[str, Move]] | None = None) -> float:
    """Return one device's buffer bytes for collectives along all axes of a typed graph's mesh; 0 under gloo.

    `moves`: the graph's `fused_moves`, each with the tensor that it starts from, where they are known.
    """
    if cluster.backend != "nccl":
        return 0.0
    rows, communication = nccl.generation(cluster.device.name), Communication(cluster, graph.mesh.device_sizes)
    by_axis = collectives_of(graph, moves).items()
    return sum(group_bytes(collectives, communication.links(axis), rows) for axis, collectives in by_axis)


def stages_bytes(cluster: Cluster, num_stages: int, stage_size: int) -> float:
    """Return one device's buffer bytes for the stages before and after it in the pipeline; 0 under gloo."""
    if cluster.backend != "nccl" or num_stages == 1:
        return 0.0
    links = Communication(cluster, (num_stages, stage_size)).links(0)
    rows = nccl.generation(cluster.device.name)
    return _shared_bytes(links, rows) + _sends_bytes(min(2, num_stages - 1), links, rows)


def collectives_of(graph: Graph, moves: Iterable[tuple[str, Move]] | None = None) -> Mapping[int, Collection[str]]:
    """Return, by mesh axis, the collectives that a typed graph's moves and operators run, forward or backward."""
    by_axis = defaultdict[int, set[str]](set)
    for split in dict.fromkeys(node.split for node in graph.nodes):
        for axis, choice in enumerate(split):
            if choice.exchange is not None:
                by_axis[axis].add(choice.exchange.collective)
    for start, move in moves if moves is not None else (move[1:] for move in fused_moves(graph)):
        forward, backward = move.collectives()
        for name in (forward, backward if graph.types[start].grad else ""):
            if name in COLLECTIVES:
                by_axis[move.axis].add(name)
    return by_axis


def group_bytes(collectives: Collection[str], links: Sequence[Link], rows: Generation) -> float:
    """Return one device's buffer bytes for a group over `links` that runs `collectives`, averaged over a node."""
    if not links or not collectives:
        return 0.0
    channels, nodes, inside = nccl.num_channels(links, rows), nccl.num_nodes(links), _inside(links)
    at_border, peers = (1 / inside, min(2, nodes - 1)) if nodes > 1 else (0.0, 0)
    total = _shared_bytes(links, rows)
    chosen = _algorithms(collectives, links, rows)
    if "ring" in chosen:
        total += channels * (BOTH_BYTES * (1 - at_border) + NETWORK_BYTES * at_border)
    if "tree" in chosen:
        total += channels * (BOTH_BYTES * (1 - 1 / inside) + NETWORK_BYTES * peers * at_border)
    if "nvls" in chosen:
        total += NVLS_HEAD_BYTES * min(inside, MOST_NVLS_HEADS) + channels * NETWORK_BYTES * peers
    if "all_to_all" in collectives:
        total += _sends_bytes(inside - 1, links, rows)
    elif "permute" in collectives:
        total += _sends_bytes(min(2, inside - 1), links, rows)
    return total


def _algorithms(collectives: Collection[str], links: Sequence[Link], rows: Generation) -> set[str]:
    """Return the algorithms ("ring", "tree", "nvls") that NCCL chooses at some size; on a torus, always a ring."""
    names_of_algorithms = set[str]()
    for collective in (name for name in COLLECTIVES if name in collectives and name != "all_to_all"):
        if any(link.grid for link in links):
            names_of_algorithms.add("ring")
            continue
        names = (piece.name.split()[0] for piece in nccl.curve(collective, tuple(links), rows).pieces)
        names_of_algorithms.update(name if name in ("tree", "nvls") else "ring" for name in names)
    return names_of_algorithms


def _sends_bytes(num_peers: int, links: Sequence[Link], rows: Generation) -> float:
    """Return the bytes of connections with peers of the same node, and of receiving over the network."""
    near = min(num_peers, _inside(links) - 1)
    received = _shared_bytes(links, rows) if nccl.num_nodes(links) > 1 else 0.0
    return near * _channels_per_peer(links, rows) * BOTH_BYTES + received


def _shared_bytes(links: Sequence[Link], rows: Generation) -> float:
    chunk = NVLINK_CHUNK_BYTES if all(link.kind == "nvlink" for link in links) else CHUNK_BYTES
    return float(_power_of_two(nccl.num_channels(links, rows)) * SHARED_STEPS * chunk)


def _channels_per_peer(links: Sequence[Link], rows: Generation) -> int:
    """Return the least number of channels that any two members need."""
    channels, size = _power_of_two(nccl.num_channels(links, rows)), nccl.num_nodes(links) * _inside(links)
    per_peer = _power_of_two(min(_links_of(link, rows) for link in links))
    across = nccl.num_nodes(links) > 1 or size > MOST_IN_HOST
    while across and per_peer > 1 and per_peer * size > channels:
        per_peer //= 2
    return min(per_peer, channels)


def _links_of(link: Link, rows: Generation) -> int:
    pair = link.bytes_per_s / (1 if link.switched else link.split - 1) / 1e9
    match link.kind:
        case "nvlink":
            return 2 * max(1, int(pair / NVLINK_GB_PER_S.get(rows, 20.0)))
        case "network":
            return max(2, ceil(link.bytes_per_s / 1e9 / NETWORK_GB_PER_S_PER_CHANNEL))
        case _:
            return 2


def _inside(links: Sequence[Link]) -> int:
    """Return the number of a group's members in one node."""
    return prod(link.split for link in links if link.kind != "network")


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
