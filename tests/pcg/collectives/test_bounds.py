"""Bounds: the optima that others publish, every cut of small networks, and the steps of distances."""

import random
from fractions import Fraction
from itertools import combinations

import pytest

from shardwright.cost.clusters.networks import preset_topology
from shardwright.cost.clusters.shapes import ring
from shardwright.pcg.collectives.bounds import least_latency_s, least_seconds_per_byte, least_steps, rate_out_of
from shardwright.pcg.collectives.collective import Chunk, Collective, collective
from shardwright.pcg.collectives.topology import Link, Resource, Topology, joined
from tests.each import each

GB = 10**9


def bandwidth(name: str, kind: str) -> float:
    topology = preset_topology(name)
    return float(1 / least_seconds_per_byte(topology, collective(kind, topology.num_ranks)).seconds_per_byte) / GB


# ForestColl's optima of all-gather (arXiv 2402.06787), as its program prints them.
@each(
    ("name", "gb_per_s"),
    [("dgx-a100:1", 342.857), ("dgx-a100:2", 346.667), ("dgx-a100:4", 266.667), ("mi250:1", 342.857),
     ("mi250:2", 354.133)],
)  # fmt: skip
def test_optima_of_all_gather(name: str, gb_per_s: float) -> None:
    assert bandwidth(name, "all_gather") == pytest.approx(gb_per_s, abs=5e-4)
    assert bandwidth(name, "reduce_scatter") == pytest.approx(gb_per_s, abs=5e-4)


# The rounds per chunk that SCCL (PPoPP 2021) reaches on a DGX-1; an all-to-all has to pass between the sockets.
@each(
    ("kind", "rounds"),
    [("all_gather", Fraction(7, 6)), ("reduce_scatter", Fraction(7, 6)), ("gather", Fraction(7, 6)),
     ("scatter", Fraction(7, 6)), ("broadcast", Fraction(1, 6)), ("reduce", Fraction(1, 6)),
     ("all_to_all", Fraction(8, 3)), ("all_reduce", Fraction(14, 48))],
)  # fmt: skip
def test_rounds_of_a_dgx1(kind: str, rounds: Fraction) -> None:
    dgx1 = preset_topology("dgx1")
    what = collective(kind, 8)
    assert least_seconds_per_byte(dgx1, what).rounds(dgx1, what.unit) == rounds
    assert least_steps(dgx1, what) == 2


@each("side", [2, 4, 8])
def test_all_reduce_of_meshes_takes_half_of_two_phases(side: int) -> None:
    mesh = preset_topology(f"mesh:{side}x{side}")
    links = len(mesh.links)
    bound = least_seconds_per_byte(mesh, collective("all_reduce", side**2)).rounds(mesh, Fraction(1))
    assert bound == max(Fraction(2 * (side**2 - 1), links), Fraction(1, 2))


def random_topology(seed: int) -> Topology:
    draw = random.Random(seed)
    ranks, nodes = 4, 6
    pairs = {(node, (node + 1) % nodes) for node in range(nodes)}
    pairs |= {tuple(sorted(draw.sample(range(nodes), 2))) for _ in range(4)}
    links = tuple(joined((a, b, draw.randrange(1, 5), 1e-6) for a, b in pairs if (b, a) not in pairs or a < b))
    out_of_0 = frozenset((link.src, link.dst) for link in links if link.src == 0)
    shared = (Resource("NIC", Fraction(draw.randrange(1, 5)), out_of_0),)
    return Topology("random", ranks, links, ("x", "y"), shared)


def test_the_optimum_is_the_largest_ratio_of_all_cuts() -> None:
    for seed in range(25):
        topology = random_topology(seed)
        weights = [random.Random(seed).randrange(4) or 1 for _ in range(4)]
        ratios = []
        for size in range(1, 6):
            for side in map(frozenset, combinations(range(6), size)):
                if not all(rank in side for rank in range(4)):
                    share = Fraction(sum(weights[rank] for rank in side if rank < 4), sum(weights))
                    ratios.append(share / rate_out_of(topology, side))
        found = least_seconds_per_byte(topology, collective("all_gather", 4, weights=weights))
        assert found.seconds_per_byte == max(ratios), seed


def test_a_copy_starts_at_its_nearest_source_and_a_sum_needs_all() -> None:
    line = Topology("line", 4, tuple(joined((a, a + 1, GB, 0.0) for a in range(3))))
    chunk = (Chunk(Fraction(1), (0, 2), (3,)),)
    assert least_steps(line, Collective("custom", 4, chunk)) == 1
    assert least_steps(line, Collective("custom", 4, chunk, reduces=True)) == 3
    assert least_seconds_per_byte(line, Collective("custom", 4, chunk)).seconds_per_byte == Fraction(1, GB)


def test_a_target_can_take_all_from_its_fastest_source() -> None:
    fork = Topology("fork", 3, tuple(joined([(0, 2, 1, 0.0), (1, 2, 100, 0.0)])))
    chunks = (Chunk(Fraction(1), (0, 1), (2,)),)
    bound = least_seconds_per_byte(fork, Collective("custom", 3, chunks)).seconds_per_byte
    assert bound <= Fraction(1, 100)
    assert least_seconds_per_byte(fork, Collective("custom", 3, chunks, reduces=True)).seconds_per_byte == 1


def test_latencies_of_the_fastest_ways() -> None:
    slow = (Link(0, 2, Fraction(GB), 5.0), Link(2, 0, Fraction(GB), 5.0))
    line = Topology("line", 3, (*joined([(0, 1, GB, 1.0), (1, 2, GB, 2.0)]), *slow))
    assert least_latency_s(line, collective("all_gather", 3)) == 3
    assert least_latency_s(line, collective("broadcast", 3, root=1)) == 2
    nearest = (Chunk(Fraction(1), (0, 1), (2,)),)
    assert least_latency_s(line, Collective("custom", 3, nearest)) == 2
    assert least_latency_s(line, Collective("custom", 3, nearest, reduces=True)) == 3


def test_relays_take_no_step_and_what_is_moved_nowhere_takes_no_time() -> None:
    assert least_steps(preset_topology("fat-tree"), collective("all_gather", 16)) == 1
    still = Collective("custom", 2, (Chunk(Fraction(1), (0,), (0,)),))
    assert least_seconds_per_byte(ring(2, GB), still).seconds_per_byte == 0


def test_the_reason_names_the_cut() -> None:
    links = (Link(0, 1, Fraction(2 * GB)), Link(1, 0, Fraction(GB)))
    bound = least_seconds_per_byte(Topology("pair", 2, links), collective("all_gather", 2))
    assert bound.reason == "1/2 of the bytes enter rank 0 at 1 GB/s"
