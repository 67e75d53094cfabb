"""Random networks with relays, links one way, shared resources and unlike rates: all kinds, sizes and weights."""

import random
from fractions import Fraction
from itertools import pairwise

from shardwright.pcg.collectives.collective import KINDS, RULES
from shardwright.pcg.collectives.topology import Link, Resource, Topology
from shardwright.pcg.errors import ClusterError
from shardwright.search.collectives.sketch import Sketch
from shardwright.search.collectives.synthesis import synthesize
from tests.search.collectives.right import assert_right


def network(draw: random.Random) -> Topology | None:
    ranks, relays = draw.randrange(2, 7), draw.randrange(3)
    order = draw.sample(range(ranks + relays), ranks + relays)
    pairs: set[tuple[int, int]] = {*pairwise(order), *((a, b) for a, b in (draw.sample(order, 2) for _ in order))}
    edges = sorted({*pairs, *((b, a) for a, b in pairs if draw.random() < 0.9)})
    links = tuple(Link(a, b, Fraction(draw.choice((10, 20, 25)) * 10**8), draw.choice((0.0, 1e-6))) for a, b in edges)
    shared = frozenset(draw.sample(edges, 2))
    nic = Resource("shared", Fraction(draw.choice((5, 50)) * 10**8), shared)
    try:
        return Topology("random", ranks, links, tuple(f"relay {n}" for n in range(relays)), (nic,))
    except ClusterError:  # not connected
        return None


def test_random_networks() -> None:
    judged = 0
    for seed in range(48):
        draw = random.Random(seed)
        topology, kind = network(draw), KINDS[seed % 8]
        if topology is None:
            continue
        ranks, root = topology.num_ranks, draw.randrange(topology.num_ranks)
        units = RULES[kind].num_units(ranks, root)
        weights = [1, *(draw.randrange(4) for _ in range(units - 1))] if draw.random() < 0.4 and units > 1 else None
        size, sketch = draw.choice((1e3, 1e6, 1e9)), Sketch(pieces=(3,))
        for found in synthesize(topology, kind, size, root=root, weights=weights, budget_s=0.1, sketch=sketch):
            assert_right(found.schedule, topology)
            assert found.seconds >= found.bound_s * (1 - 1e-9), (seed, kind)
            judged += 1
    assert judged > 40
