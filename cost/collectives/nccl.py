"""The algorithms that NCCL runs, and how long they take.

NCCL has algorithms (ring, double binary tree, NVLS: sums in the NVSwitch, NVLS tree: the same in nodes and trees across
them) and protocols (LL: 8 bytes with a flag each, LL128: 120 of 128 bytes, Simple: large chunks). It takes the pair
with the least **estimate** by its own tables, which need not be the fastest. So does this module: `candidates` returns
the pairs, `curve` the time of the chosen pair at every size.

    estimate   latency + S / bandwidth: src/graph/tuning.cc of NVIDIA/nccl, 2.27, with the links' own bandwidth in place
               of its table of links
    time       the same, and how the protocols cut the tensor: ring LL gives a channel 4096·n bytes before it opens the
               next (enqueue.cc), and a lone channel has half the bandwidth that the search for channels gave it, so
               time rises at once, then stands still while channels open; NVLS passes chunks through three stages, two
               of which wait for the first chunk. NVLS sends (n+1)/n of the tensor where the estimate says 6/5.

Left out: CollNet (needs switches that sum), NVLS for all-gather and reduce-scatter (never estimated faster within a
node), the PAT algorithm, and NCCL's estimate of two nodes by the links inside them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import floor, log2, prod

from shardwright.cost.clusters.cluster import Collective
from shardwright.cost.collectives import algorithms
from shardwright.cost.collectives.curve import CostLine, Curve, CurvePiece, crossings, intervals, least_of, rising
from shardwright.cost.collectives.groups import Link

PROTOCOLS = ("LL", "LL128", "Simple")

# tuning.cc. Base and hop latencies in µs by protocol; a network's hop, bandwidths in GB/s.
BASE_US = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4)}
HOP_US = {
    ("nvlink", "tree"): (0.6, 1.25, 4.0),
    ("nvlink", "ring"): (0.6, 1.9, 3.4),
    ("pcie", "tree"): (1.0, 1.9, 4.0),
    ("pcie", "ring"): (1.0, 2.5, 5.7),
    ("network", "tree"): (5.0, 8.5, 14.0),
    ("network", "ring"): (2.7, 4.0, 14.0),
}
NVLS_US, NVLS_NETWORK_US = 25.0, 18.0
POST_US = 1.0  # posting to the network, at least, for each step of a ring across nodes; three times for Simple
SIMPLE_ACROSS_NODES = 1.4  # a ring all-reduce under Simple across nodes waits this much longer
# By octave of the size from 64 bytes on: trees are slower than their line in between.
TREE_CORRECTION = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
# The part of a link's latency that those figures include: the mean of LL and LL128 ring hops, which the presets give.
INCLUDED_US = {"nvlink": 1.25, "pcie": 1.75, "host": 1.75, "network": 3.35}
# enqueue.cc: a channel of a ring under LL is opened for each 512 threads · 8 bytes · n.
LL_BYTES_PER_CHANNEL_AND_RANK = 4096
# enqueue.cc: chunk of NVLS, up to a tensor of so many (channels · n · chunk of the next row).
NVLS_CHANNELS = 16
NVLS_CHUNKS = ((2 * 32768, 16384), (8 * 65536, 32768), (64 * 131072, 65536), (float("inf"), 131072))
NVLS_WAITING_STAGES = 2


Factors = Callable[[str], tuple[float, float]]
"""Factors on latency and time per byte, by phase of an algorithm under a protocol, such as "ring LL, opening"."""


def untuned(phase: str) -> tuple[float, float]:
    """Return factors of 1, which leave the source's figures as they are."""
    return 1.0, 1.0


@dataclass(frozen=True, slots=True)
class Generation:
    """Rows of tuning.cc by (1, 2, more) nodes, in GB/s: LL in total, LL128 and trees per channel.

    `channel` is the bandwidth that the search for channels tries first (search.cc); it fits as many as it can into
    twice the links' bandwidth.
    """

    ll: tuple[float, float, float]
    ring_ll128: float
    tree: tuple[float, float, float]
    tree_ll128: tuple[float, float, float]
    channel: float
    nvls_efficiency: float = 0.0  # none


VOLTA = Generation((39.0, 39.0, 20.4), 20.0, (26.5, 18.5, 10.0), (20.0, 20.0, 20.0), 20.0)
AMPERE = Generation((87.7, 22.5, 19.0), 20.0, (24.0, 23.6, 17.8), (20.0, 20.0, 20.0), 20.0)
HOPPER = Generation((141.0, 45.0, 35.0), 36.7, (38.7, 41.4, 36.0), (36.7, 36.7, 29.0), 30.0, 0.85)
BLACKWELL = Generation((141.0, 45.0, 35.0), 40.0, (38.7, 41.4, 36.0), (36.7, 36.7, 29.0), 45.0, 0.74)

# By the device's name; the first match counts. AMD's RCCL keeps the selector; its own tables are not modelled.
GENERATIONS = (
    (r"V100|\bT4\b", VOLTA),
    (r"B[123]00", BLACKWELL),
    (r"H[12]00|H20\b|H800", HOPPER),
    (r"", AMPERE),
)


def generation(device_name: str) -> Generation:
    """Return NCCL's rows for a GPU: Ampere's for an unknown one, the older of several ("A100-80 + H100-SXM")."""
    names = device_name.split(" + ")
    of_names = [next(rows for pattern, rows in GENERATIONS if re.search(pattern, name)) for name in names]
    return min(of_names, key=lambda rows: rows.ll)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm under a protocol. The slopes of NCCL's estimate and of the time change with the size."""

    name: str
    latency_s: float
    estimate_s_per_byte: float
    s_per_byte: float
    correction: tuple[float, ...] = ()  # of tuning.cc, by octave
    first_bytes: float = 0.0  # a ring under LL: bytes of the first channel, and its seconds per byte
    first_s_per_byte: float = 0.0
    heads: int = 0  # NVLS: how many chunks are under way at once

    def starts(self) -> list[float]:
        """Return the sizes at which a slope changes."""
        octaves = [64.0 * 2**i for i in range(len(self.correction) + 1)] if self.correction else []
        opening = [self.first_bytes, self._all_open_bytes] if self.first_bytes else []
        waiting: list[float] = []
        if self.heads:
            ends = [0.0, *(self.heads * end for end, _ in NVLS_CHUNKS)]
            filled = [self.heads * chunk for _, chunk in NVLS_CHUNKS]
            waiting = [
                *ends[1:-1],
                *(x for x, low, high in zip(filled, ends, ends[1:], strict=False) if low < x < high),
            ]
        return octaves + opening + waiting

    def estimate(self, num_bytes: float) -> CostLine:
        """Return NCCL's own line around `num_bytes`."""
        octave = floor(log2(num_bytes / 64)) if num_bytes >= 64 else -1
        corrected = self.correction[octave] if 0 <= octave < len(self.correction) else 1.0
        return CostLine(self.latency_s, self.estimate_s_per_byte / corrected)

    def time(self, num_bytes: float, factors: Factors = untuned) -> CostLine:
        """Return the line of the time around `num_bytes`."""
        latency, slope = factors(self.phase(num_bytes))
        s_per_byte = self.s_per_byte * slope
        ahead, behind = self._carried(num_bytes)
        return CostLine(self.latency_s * latency + ahead * s_per_byte, behind * s_per_byte)

    def phase(self, num_bytes: float) -> str:
        """Return the name, and ", opening" while channels are still being opened."""
        return f"{self.name}, opening" if num_bytes < self._all_open_bytes else self.name

    def _carried(self, num_bytes: float) -> tuple[float, float]:
        """Return (a, b): around this size, time is that of a + b · size bytes on all channels together."""
        if self.heads:
            waiting = self.heads * next(chunk for end, chunk in NVLS_CHUNKS if num_bytes < self.heads * end)
            stages = NVLS_WAITING_STAGES
            return (stages * waiting, 1.0) if num_bytes >= waiting else (0.0, 1.0 + stages)
        if num_bytes < self.first_bytes:
            return 0.0, self.first_s_per_byte / self.s_per_byte
        if num_bytes < self._all_open_bytes:
            return self._all_open_bytes, 0.0
        return 0.0, 1.0

    @property
    def _all_open_bytes(self) -> float:
        """The size at which the line of all channels meets the first channel's time for its part."""
        return self.first_bytes * max(1.0, self.first_s_per_byte / self.s_per_byte)


@lru_cache(maxsize=4096)
def curve(
    collective: Collective, links: tuple[Link, ...], rows: Generation, factors: Factors = untuned, algorithm: str = ""
) -> Curve:
    """Return the seconds of `collective` over `links`, in pieces named by NCCL's choice.

    `algorithm` restricts the choice, as NCCL_ALGO does: "ring", "tree" or "nvls".
    """
    if collective == "all_to_all":
        return _exchange(links, factors)
    choices = [candidate for candidate in candidates(collective, links, rows) if candidate.name.startswith(algorithm)]
    starts = sorted({0.0, *(start for candidate in choices for start in candidate.starts())})
    pieces: list[CurvePiece] = []
    for start, end in intervals(starts):
        lines = [candidate.estimate(start) for candidate in choices]
        for point, beyond in intervals([start, *sorted(x for x in crossings(lines) if start < x < end)], end):
            least = least_of(lines, point, beyond)
            pieces.append(CurvePiece(point, choices[least].time(point, factors), choices[least].phase(point)))
    return rising(pieces)


def candidates(collective: Collective, links: Sequence[Link], rows: Generation) -> list[Candidate]:
    """Return NCCL's choices; LL128 needs stores of 128 bytes to arrive whole, which PCIe does not promise."""
    whole = not any(link.kind in ("pcie", "host") for link in links)
    protocols = [protocol for protocol in PROTOCOLS if protocol != "LL128" or whole]
    choices = [_ring(collective, links, rows, protocol) for protocol in protocols]
    if collective == "all_reduce":
        choices += [_tree(links, rows, protocol) for protocol in protocols]
        inner = links[0]
        if rows.nvls_efficiency and inner.kind == "nvlink" and inner.switched and inner.split > 2:
            choices.append(_nvls(links, rows))
    return choices


def _ring(collective: Collective, links: Sequence[Link], rows: Generation, protocol: str) -> Candidate:
    p, bus, channels = PROTOCOLS.index(protocol), _bus(links), num_channels(links, rows)
    nodes, n = num_nodes(links), prod(link.split for link in links)
    across = nodes > 1
    form = (
        algorithms.chain(links) if collective == "broadcast" else algorithms.ring(links, algorithms.PASSES[collective])
    )
    share = form.line.s_per_byte * bus * 1e9  # of the tensor that the narrowest level carries
    hops_us = 0.0
    for step in form.steps:
        post_us = POST_US * (3 if protocol == "Simple" else 1) if across and step.link.kind != "network" else 0.0
        hops_us += step.hops * max(_hop_us(step.link, "ring", p), post_us)
    latency_us = BASE_US["ring"][p] + hops_us
    if protocol == "LL":
        bus = min(rows.ll[_column(nodes)], bus / 2)
    elif protocol == "LL128":
        bus = min(bus * (0.7 if n < 2 * nodes else 0.92), channels * rows.ring_ll128)
    elif across and collective == "all_reduce":
        latency_us *= SIMPLE_ACROSS_NODES
    slope, first = share / bus / 1e9, (0.0, 0.0)
    if protocol == "LL":
        first = (
            float(LL_BYTES_PER_CHANNEL_AND_RANK * n),
            max(slope, share / (min(rows.channel, _bus(links)) / 2) / 1e9),
        )
    return Candidate(f"{form.name} {protocol}", latency_us * 1e-6, slope, slope, (), *first)


def _tree(links: Sequence[Link], rows: Generation, protocol: str) -> Candidate:
    p, nodes, channels = PROTOCOLS.index(protocol), num_nodes(links), num_channels(links, rows)
    bus = min(_bus(links) * 0.92, channels * rows.tree[_column(nodes)])
    if protocol == "LL":
        bus = min(bus / 3.8, rows.ll[_column(nodes)])
    elif protocol == "LL128":
        bus = min(bus * (7 / 9 if nodes == 1 else 120 / 128), channels * rows.tree_ll128[_column(nodes)])
    steps = algorithms.tree(links, 2).steps
    latency_us = BASE_US["tree"][p] + sum(step.hops * _hop_us(step.link, "tree", p) for step in steps)
    slope = 2 / bus / 1e9
    return Candidate(f"tree {protocol}", latency_us * 1e-6, slope, slope, TREE_CORRECTION[p])


def _nvls(links: Sequence[Link], rows: Generation) -> Candidate:
    inner, n = links[0], links[0].split
    bus = inner.bytes_per_s * rows.nvls_efficiency
    if len(links) == 1:
        share = float(algorithms.nvls(links).steps[0].share)
        return Candidate("nvls", NVLS_US * 1e-6, 6 / 5 / bus, share / bus, heads=NVLS_CHANNELS * n)
    nodes, outer = num_nodes(links), _bus(links[1:]) * 1e9
    slope = 6 / 5 / min(bus, (outer if nodes == 2 else outer / 2) * rows.nvls_efficiency)
    beyond = sum(_wire_us(link) for link in links[1:])
    latency_us = NVLS_US + 2 * sum(step.hops for step in algorithms.tree(links[1:], 1).steps) * NVLS_NETWORK_US + beyond
    return Candidate("nvls tree", latency_us * 1e-6, slope, slope)


def _exchange(links: Sequence[Link], factors: Factors) -> Curve:
    """Return all-to-all, for which NCCL sends and receives, one pair after the other."""
    line = algorithms.direct_exchange(links).line
    latency, slope = factors("direct exchange")
    line = CostLine((send_base_s() + line.latency_s) * latency, line.s_per_byte * slope)
    return Curve((CurvePiece(0.0, line, "direct exchange"),))


def send_base_s() -> float:
    """Return the start time of a send, which goes by the Simple protocol."""
    return BASE_US["ring"][2] * 1e-6


def num_nodes(links: Sequence[Link]) -> int:
    """Return the number of nodes that a group spans."""
    return prod(link.split for link in links if link.kind == "network")


def _column(nodes: int) -> int:
    return min(nodes, 3) - 1


def _bus(links: Sequence[Link]) -> float:
    """Return the GB/s of a ring's channels together, at the narrowest level of a device."""
    return min(link.inside * link.bytes_per_s for link in links) / 1e9


def num_channels(links: Sequence[Link], rows: Generation) -> int:
    """Return the number of channels that NCCL's search finds (search.cc)."""
    return min(max(round(2 * _bus(links) / rows.channel), 2), 32)


def _hop_us(link: Link, algorithm: str, protocol: int) -> float:
    kind = "pcie" if link.kind == "host" else link.kind
    return HOP_US[kind, algorithm][protocol] + _wire_us(link)


def _wire_us(link: Link) -> float:
    """Return a hop's latency beyond the one that NCCL's figures include, as over a long way between sites."""
    return max(0.0, link.hop_s * 1e6 - INCLUDED_US[link.kind])
