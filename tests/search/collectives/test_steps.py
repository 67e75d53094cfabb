"""What limits channels, and how transfers in time become steps."""

from fractions import Fraction

import pytest

from shardwright.cost.clusters.networks import preset_topology
from shardwright.cost.clusters.shapes import ring
from shardwright.pcg.collectives.collective import Chunk, Collective, collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Link, Resource, Topology, joined
from shardwright.pcg.errors import ShardwrightError
from shardwright.search.collectives.channels import limits, rails
from shardwright.search.collectives.exact import solve
from shardwright.search.collectives.greedy import greedy
from shardwright.search.collectives.symmetry import symmetries
from shardwright.search.collectives.timing import backwards, in_steps, on


def test_of_limits_on_the_same_channels_the_lowest_counts() -> None:
    links = (Link(0, 1, Fraction(10)), Link(1, 0, Fraction(10)))
    topology = Topology("pair", 2, links, resources=(Resource("slow", Fraction(4), frozenset({(0, 1)})),))
    assert sorted(limits(topology, symmetries(topology, []))) == [(4, ((0, 1),)), (10, ((1, 0),))]


def test_a_transfer_that_passes_a_resource_twice_counts_twice() -> None:
    both = Resource("bus", Fraction(10), frozenset({(0, 2), (2, 1)}))
    bus = Topology("bus", 2, tuple(joined([(0, 2, 10, 0.0), (1, 2, 10, 0.0)])), ("switch",), (both,))
    assert [one.channels for one in limits(bus, symmetries(bus, [])) if len(one.channels) > 1] == [((0, 1), (0, 1))]
    assert solve(bus, collective("broadcast", 2), 1, 1) == (None, True)
    assert solve(bus, collective("broadcast", 2), 1, 2).schedule


def test_schedules_run_backwards_keep_their_ways() -> None:
    edges = [(0, 2), (2, 5), (5, 1), (0, 3), (3, 4), (4, 1)]
    two_ways = Topology("two ways", 2, tuple(joined((a, b, 10, 0.0) for a, b in edges)), ("a", "b", "c", "d"))
    broadcast = Schedule("broadcast", collective("broadcast", 2), (Transfer(0, 0, 1, 0),))
    (move,) = backwards(broadcast, two_ways.reversed(), two_ways).transfers
    assert move.via == (5, 2)
    assert two_ways.path(1, 0) == ((1, 4), (4, 3), (3, 0))
    (other,) = on(two_ways, broadcast, lambda src, dst: ((0, 3), (3, 4), (4, 1))).transfers
    assert other.via == (3, 4)


def test_one_limit_of_each_orbit() -> None:
    assert len(limits(ring(6, 10), symmetries(ring(6, 10)))) == 2  # either way round
    switch = preset_topology("star:4")
    assert [len(limit.channels) for limit in limits(switch, symmetries(switch))] == [3, 3]  # out of a rank, and in


def test_rails_lead_everywhere_or_are_none() -> None:
    pairs = [(0, 1, 20, 0.0), (2, 3, 20, 0.0)]
    straight = Topology("straight", 4, tuple(joined([*pairs, (0, 2, 10, 0.0)])))
    assert rails(straight, symmetries(straight, [])) == set(straight.channels)
    crossed = Topology("crossed", 4, tuple(joined([*pairs, (0, 3, 10, 0.0)])))
    assert rails(crossed, symmetries(crossed, [])) is None


def test_a_chunk_that_cannot_reach_a_target_is_an_error() -> None:
    line = Topology("line", 3, tuple(joined([(0, 1, 10, 0.0), (1, 2, 10, 0.0)])))
    over = Collective("custom", 3, (Chunk(Fraction(1), (0,), (2,)),))
    with pytest.raises(
        ShardwrightError, match="on 'line': expected a way for chunk 0 to rank 2 over its other targets"
    ):
        greedy(line, over, 10.0, symmetries(line, []))
    assert len(greedy(line, over, 10.0, symmetries(line, []), paths={0: [0, 1, 2]}).transfers) == 2


def test_a_step_begins_where_something_is_read_or_late() -> None:
    whole = collective("broadcast", 4, 2)
    chain = [(0.0, Transfer(0, 0, 1, 0)), (0.1, Transfer(0, 0, 3, 1)), (0.2, Transfer(0, 1, 2, 0))]
    later = [(0.3, Transfer(0, 2, 3, 0)), (5.0, Transfer(0, 0, 1, 1)), (5.1, Transfer(0, 1, 2, 1))]
    steps = in_steps("chain", whole, chain + later, shortest_s=1.0).steps
    assert [[(t.src, t.dst, t.chunk) for t in step] for step in steps] == [
        [(0, 1, 0), (0, 3, 1)],
        [(1, 2, 0)],
        [(2, 3, 0)],
        [(0, 1, 1)],
        [(1, 2, 1)],
    ]


def test_steps_keep_the_order_of_each_connection() -> None:
    whole = collective("broadcast", 3, 2)
    started = [(0.0, Transfer(0, 0, 1, 1)), (0.1, Transfer(0, 0, 1, 0)), (0.2, Transfer(0, 0, 2, 1))]
    steps = in_steps("broadcast", whole, [*started, (0.3, Transfer(0, 0, 2, 0))], shortest_s=1.0).steps
    assert [[(t.dst, t.chunk) for t in step] for step in steps] == [[(1, 1)], [(1, 0), (2, 1)], [(2, 0)]]


def test_what_reaches_no_target_is_left_out() -> None:
    whole = collective("gather", 3, root=0)
    started = [(0.0, Transfer(0, 1, 2, 1)), (1.0, Transfer(0, 1, 0, 1)), (2.0, Transfer(0, 2, 0, 2))]
    assert [(t.step, t.src, t.dst) for t in in_steps("gather", whole, started, 1.0).transfers] == [(0, 1, 0), (1, 2, 0)]
