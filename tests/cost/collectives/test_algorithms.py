"""The closed forms of collectives, against collectives that are run message by message."""

from fractions import Fraction
from math import log2, prod

import pytest

from shardwright.cost.clusters.cluster import COLLECTIVES
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives import algorithms
from shardwright.cost.collectives.algorithms import Algorithm
from shardwright.cost.collectives.curve import CostLine
from shardwright.cost.collectives.groups import Link, group_of, links_of
from tests.cost.formulas import text_of
from tests.cost.simulated import Network, is_reduced, ring_all_gather, ring_reduce_scatter, shards, summands
from tests.each import each

FAST, SLOW = 1e11, 1e10
SPLITS = [(2,), (3,), (4,), (8,), (2, 2), (4, 2), (3, 4), (2, 3, 2)]


def links(*splits: int) -> tuple[Link, ...]:
    levels = tuple(Level(f"level{i}", k, FAST / 10**i, 10.0**-6 * 10**i, "nvlink") for i, k in enumerate(splits))
    return links_of(group_of((prod(splits),), 0, levels), levels)


def meeting(*splits: int):  # noqa: ANN201
    """The level at which two devices meet."""

    def level_of(a: int, b: int) -> int:
        capacity = 1
        for level, split in enumerate(splits):
            capacity *= split
            if a // capacity == b // capacity:
                return level
        raise AssertionError

    return level_of


def assert_sends(algorithm: Algorithm, network: Network, rounds: bool = True) -> None:
    """The busiest device sends over every level what the algorithm says, in as many rounds."""
    for level, step in enumerate(algorithm.steps):
        assert step.share == network.most_sent(level), f"{algorithm.name}, level {level}"
        if rounds:
            assert step.hops == network.rounds_at(level), f"{algorithm.name}, level {level}"


# ------------------------------------------------------------------------------------------------ against simulation


@each("n", range(2, 9))
def test_ring_in_one_level(n: int) -> None:
    parts = [(p,) for p in range(n)]
    network = summands(n)
    ring_reduce_scatter(network, list(range(n)), parts)
    assert_sends(algorithms.ring(links(n), 1), network)
    assert all(network.held[d][d] == frozenset(range(n)) for d in range(n))
    ring_all_gather(network, list(range(n)), parts)
    assert is_reduced(network)
    assert_sends(algorithms.ring(links(n), 2), network)


@pytest.mark.parametrize("splits", [(2, 2), (4, 2), (3, 4)])
def test_a_flat_ring_crosses_by_one_device_of_a_unit(splits: tuple[int, ...]) -> None:
    """NCCL has as many rings as devices in a unit, each with its own crossing: a device's share is 1/m of one ring."""
    n, (inside, _) = prod(splits), splits
    network = summands(n, meeting(*splits))
    ring_reduce_scatter(network, list(range(n)), [(p,) for p in range(n)])
    algorithm = algorithms.ring(links(*splits), 1)
    assert algorithm.steps[1].share == network.most_sent(1) / inside
    assert algorithm.steps[0].share == network.most_sent(0)


@pytest.mark.parametrize("splits", [(2, 2), (4, 2), (3, 4)])
def test_hierarchical(splits: tuple[int, ...]) -> None:
    """Reduce-scatter inside units, all-reduce across them, all-gather inside."""
    inside, across = splits
    n = inside * across
    network = summands(n, meeting(*splits))
    wide = [tuple(range(i * across, (i + 1) * across)) for i in range(inside)]  # the part that the i-th members sum
    for phase in (ring_reduce_scatter, None, ring_all_gather):
        if phase is None:
            for i in range(inside):
                row, parts = [u * inside + i for u in range(across)], [(p,) for p in wide[i]]
                ring_reduce_scatter(network, row, parts)
                ring_all_gather(network, row, parts)
        else:
            for u in range(across):
                phase(network, [u * inside + i for i in range(inside)], wide)
    assert is_reduced(network)
    algorithm = algorithms.hierarchical(links(*splits), 2)
    assert_sends(algorithm, network, rounds=False)
    # rounds of units side by side run at once
    assert [step.hops for step in algorithm.steps] == [network.rounds_at(0) // across, network.rounds_at(1) // inside]


@each("splits", [(2,), (4,), (8,), (2, 2), (2, 4), (4, 2)])
def test_halving_doubling(splits: tuple[int, ...]) -> None:
    n = prod(splits)
    network = summands(n, meeting(*splits))
    mine = [tuple(range(n)) for _ in range(n)]
    distances = [2**i for i in range(int(log2(n)))]  # neighbours first: the most bytes go the shortest way
    for distance in distances:
        halves = {d: (mine[d][: len(mine[d]) // 2], mine[d][len(mine[d]) // 2 :]) for d in range(n)}
        kept = {d: halves[d][1 if d & distance else 0] for d in range(n)}
        network.round([(d, d ^ distance, kept[d ^ distance]) for d in range(n)], reduce=True)
        mine = [kept[d] for d in range(n)]
    assert_sends(algorithms.halving_doubling(links(*splits), 1), network)
    for distance in reversed(distances):
        network.round([(d, d ^ distance, mine[d]) for d in range(n)], reduce=False)
        mine = [mine[d] + mine[d ^ distance] for d in range(n)]
    assert is_reduced(network)
    assert_sends(algorithms.halving_doubling(links(*splits), 2), network)


@each("n", range(2, 10))
def test_binomial_broadcast(n: int) -> None:
    network = Network(n, lambda a, b: 0, [dict.fromkeys(range(n), frozenset([0])) if d == 0 else {} for d in range(n)])
    have = [0]
    while len(have) < n:
        pairs = list(zip(have, range(len(have), n), strict=False))
        network.round([(source, target, tuple(range(n))) for source, target in pairs], reduce=False)
        have += [target for _, target in pairs]
    assert all(len(held) == n for held in network.held)
    assert_sends(algorithms.binomial(links(n)), network)


@each("splits", SPLITS)
def test_direct_exchange(splits: tuple[int, ...]) -> None:
    """Everyone sends 1/n of his share to everyone, whatever level they meet at."""
    n, level_of = prod(splits), meeting(*splits)
    peers = [sum(level_of(0, other) == level for other in range(1, n)) for level in range(len(splits))]
    algorithm = algorithms.direct_exchange(links(*splits))
    assert [step.hops for step in algorithm.steps] == peers
    assert [step.share for step in algorithm.steps] == [Fraction(p, n * n) for p in peers]


@each("n", range(2, 9))
def test_shards_are_gathered(n: int) -> None:
    network = shards(n)
    ring_all_gather(network, list(range(n)), [(p,) for p in range(n)])
    assert is_reduced(network)
    assert_sends(algorithms.ring(links(n), 1), network)


# ---------------------------------------------------------------------------------------------------------- relations


@each("n", [2, 3, 8])
@each("passes", [1, 2])
def test_hierarchical_is_flat_where_there_is_one_level(n: int, passes: int) -> None:
    flat, nested = algorithms.ring(links(n), passes), algorithms.hierarchical(links(n), passes)
    assert (flat.line, [s.share for s in flat.steps]) == (nested.line, [s.share for s in nested.steps])


@each("splits", SPLITS)
@each("collective", COLLECTIVES)
def test_no_algorithm_sends_less_than_it_must(splits: tuple[int, ...], collective: str) -> None:
    """A device sends (n−1)/n of what others must get, or all of it where a switch sums."""
    n, found = prod(splits), links(*splits)
    needed = {"all_reduce": 2 * (n - 1) / n, "all_to_all": (n - 1) / n**2, "broadcast": 1.0}
    widest = max(x.inside * x.bytes_per_s for x in found)
    for algorithm in algorithms.candidates(collective, found):  # type: ignore[arg-type]
        least = 1.0 if "nvls" in algorithm.name else needed.get(collective, (n - 1) / n)
        assert algorithm.line.s_per_byte >= least / widest / (1 + 1e-12), algorithm.name
        assert algorithm.line.latency_s > 0


def test_the_switch_needs_half_of_a_ring() -> None:
    assert algorithms.nvls(links(8)).line.s_per_byte == pytest.approx(9 / 8 / FAST)


def test_a_torus_takes_its_dimensions_one_after_the_other() -> None:
    level = Level("torus", 16, FAST, 1e-6, "network", "torus", 1.0, (4, 4))
    found = links_of(group_of((16,), 0, (level,)), (level,))
    by_dimension, ring = algorithms.hierarchical(found, 2), algorithms.ring(found, 2)
    assert by_dimension.line.latency_s == pytest.approx(2 * 6e-6)  # 3 hops a dimension
    assert ring.line.latency_s == pytest.approx(2 * 15e-6)
    assert by_dimension.line.s_per_byte == ring.line.s_per_byte == pytest.approx(2 * 15 / 16 / FAST)


# --------------------------------------------------------------------------------------------------------------- text


def test_formulas() -> None:
    both = links(8, 4)
    assert text_of(algorithms.ring(links(8), 2)) == "14·α(level0) + 7/4·S/B(level0)"
    assert text_of(algorithms.ring(both, 1), "b·s·h·2") == (
        "28·α(level0) + 3·α(level1) + max(31/32·b·s·h·2/B(level0), 31/256·b·s·h·2/B(level1))"
    )
    assert text_of(algorithms.hierarchical(both, 2), "x+1") == (
        "14·α(level0) + 6·α(level1) + 7/4·(x+1)/B(level0) + 3/16·(x+1)/B(level1)"
    )


@each("splits", SPLITS)
@each("collective", COLLECTIVES)
def test_the_text_says_what_the_line_does(splits: tuple[int, ...], collective: str) -> None:
    """Evaluated as arithmetic, the formula is the time."""
    found = links(*splits)
    for algorithm in algorithms.candidates(collective, found):  # type: ignore[arg-type]
        text = text_of(algorithm, "1e6").replace("·", "*")
        for link in found:
            text = text.replace(f"α({link.name})", str(link.hop_s))
            bandwidth = link.exchange_bytes_per_s if collective == "all_to_all" else link.bytes_per_s
            text = text.replace(f"B({link.name})", str(bandwidth))
        assert eval(text) == pytest.approx(algorithm.line.time_s(1e6))


def test_a_line_is_straight() -> None:
    assert CostLine(1.0, 2.0).time_s(3.0) == 7.0


@each("n", range(1, 10))
def test_what_one_device_of_a_switch_sends(n: int) -> None:
    """Of the full tensor; the one place of these shares."""
    gathered = Fraction(n - 1, n)
    shares = {
        "all_reduce": 2 * gathered, "all_gather": gathered, "reduce_scatter": gathered, "all_to_all": gathered / n,
        "broadcast": 1,
    }  # fmt: skip
    assert {collective: algorithms.on_a_switch(collective, n).share for collective in COLLECTIVES} == shares
    hops = dict.fromkeys(COLLECTIVES, n - 1) | {"all_reduce": 2 * (n - 1)}
    assert {collective: algorithms.on_a_switch(collective, n).hops for collective in COLLECTIVES} == hops
