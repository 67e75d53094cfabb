"""What limits channels, and how transfers in time become steps."""

from fractions import Fraction

from shardwright.cost.clusters.networks import preset_topology
from shardwright.cost.clusters.shapes import ring
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Transfer
from shardwright.pcg.collectives.topology import Link, Resource, Topology
from shardwright.search.collectives.channels import limits
from shardwright.search.collectives.symmetry import symmetries
from shardwright.search.collectives.timing import in_steps


def test_of_limits_on_the_same_channels_the_lowest_counts() -> None:
    links = (Link(0, 1, Fraction(10)), Link(1, 0, Fraction(10)))
    topology = Topology("pair", 2, links, resources=(Resource("slow", Fraction(4), frozenset({(0, 1)})),))
    assert sorted(limits(topology, symmetries(topology, []))) == [(4, ((0, 1),)), (10, ((1, 0),))]


def test_one_limit_of_each_orbit() -> None:
    assert len(limits(ring(6, 10), symmetries(ring(6, 10)))) == 2  # either way round
    switch = preset_topology("star:4")
    assert [len(limit.channels) for limit in limits(switch, symmetries(switch))] == [3, 3]  # out of a rank, and in


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


def test_what_reaches_no_target_is_left_out() -> None:
    whole = collective("gather", 3, root=0)
    started = [(0.0, Transfer(0, 1, 2, 1)), (1.0, Transfer(0, 1, 0, 1)), (2.0, Transfer(0, 2, 0, 2))]
    assert [(t.step, t.src, t.dst) for t in in_steps("gather", whole, started, 1.0).transfers] == [(0, 1, 0), (1, 2, 0)]
