"""The algorithms that gloo runs between CPU processes, and how long they take.

gloo has one algorithm per collective, as `ProcessGroupGloo` of torch 2.13 calls them:

    all_reduce       ring, in segments
    all_gather       ring
    reduce_scatter   the all-reduce, of which every rank keeps its slice (measured here: as long as one, and more)
    all_to_all       direct exchange
    broadcast        binomial tree: ⌈log₂ n⌉ rounds of the whole tensor
"""

from __future__ import annotations

from functools import lru_cache

from shardwright.cost.clusters.cluster import Collective
from shardwright.cost.collectives import algorithms
from shardwright.cost.collectives.algorithms import Algorithm
from shardwright.cost.collectives.curve import CostLine, Curve, straight
from shardwright.cost.collectives.groups import Link

# Start of a collective before its first hop: our measurement of 4 bytes between two ranks of one machine (EPYC Zen 4,
# torch 2.13), less one hop.
BASE_S = 100e-6
# Start of a message whose receiver waits for it, in a step, where ranks compute before and after: `bench.pipelines`
# measures 150 to 240 µs of 64 KiB, 290 to 420 µs of 128 KiB. Half a round trip of 4 bytes takes 35 to 90 µs.
SEND_S = 200e-6


def algorithm(collective: Collective, links: tuple[Link, ...]) -> Algorithm:
    """Return the algorithm that gloo runs for a collective over `links`."""
    match collective:
        case "all_reduce" | "reduce_scatter":
            return algorithms.ring(links, 2)
        case "all_gather":
            return algorithms.ring(links, 1)
        case "all_to_all":
            return algorithms.direct_exchange(links)
        case "broadcast":
            return algorithms.binomial(links)


@lru_cache(maxsize=4096)
def curve(collective: Collective, links: tuple[Link, ...]) -> Curve:
    """Return the seconds of `collective` over `links`."""
    chosen = algorithm(collective, links)
    return straight(CostLine(BASE_S + chosen.line.latency_s, chosen.line.s_per_byte), chosen.name)
