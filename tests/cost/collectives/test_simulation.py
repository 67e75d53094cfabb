"""Schedules followed over links: closed forms, what waits for what, and what is shared."""

from fractions import Fraction

import pytest

from shardwright.cost.clusters.networks import preset_topology
from shardwright.cost.clusters.shapes import ring, star
from shardwright.cost.collectives.simulation import simulate
from shardwright.pcg.collectives.bounds import least_seconds_per_byte
from shardwright.pcg.collectives.builders.table import build
from shardwright.pcg.collectives.collective import Chunk, Collective, collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Link, Resource, Topology, joined
from shardwright.pcg.errors import ShardwrightError
from tests.each import each

LINE = Topology("line", 3, tuple(joined([(0, 1, 100, 0.5), (1, 2, 50, 0.25)])))


@each(("ranks", "kind", "phases"), [(4, "all_gather", 1), (7, "reduce_scatter", 1), (5, "all_reduce", 2)])
def test_a_ring_takes_its_closed_form(ranks: int, kind: str, phases: int) -> None:
    found = simulate(build("ring", kind, (ranks,)), ring(ranks, 10, 0.1), 70 * ranks)
    assert found.seconds == pytest.approx(phases * (ranks - 1) * (7 + 0.1))
    both_ways = found.utilisation((0, 1)) + found.utilisation((1, 0))
    assert both_ways == pytest.approx(7 / 7.1)
    assert found.utilisation((0, 2)) == 0


def test_a_chain_is_filled_while_its_links_are_busy() -> None:
    chunks = collective("broadcast", 3, 4)
    chain = [Transfer(chunk + hop, hop, hop + 1, chunk) for chunk in range(4) for hop in (0, 1)]
    found = simulate(Schedule("chain", chunks, tuple(chain)), LINE, 400)
    assert found.seconds == pytest.approx(1 + 0.5 + 4 * 2 + 0.25)  # a chunk, then four over the slow link
    assert found.arrivals_s[0] == pytest.approx(1.5)


@each("kind", ["all_gather", "all_to_all"])
def test_a_switch_serves_all_ports_at_once(kind: str) -> None:
    switch = star(6, 10, 0.2)
    schedule = build("direct", kind, (6,))
    bound = least_seconds_per_byte(switch, schedule.collective).seconds_per_byte
    assert simulate(schedule, switch, 600).seconds == pytest.approx(float(bound * 600) + 0.2)


def test_the_slowest_of_a_path_takes_longest_and_its_latencies_add_up() -> None:
    links = (*joined([(0, 2, 100, 0.5), (2, 1, 10, 0.25)]),)
    relayed = Topology("relayed", 2, links, ("switch",))
    whole = Collective("custom", 2, (Chunk(Fraction(1), (0,), (1,)),))
    assert simulate(Schedule("one", whole, (Transfer(0, 0, 1, 0),)), relayed, 20).seconds == pytest.approx(2.75)


def test_links_that_share_a_resource_take_turns() -> None:
    links = tuple(joined((0, rank, 10, 0.0) for rank in (1, 2)))
    nic = Resource("NIC", Fraction(10), frozenset(((0, 1), (0, 2))))
    direct = build("direct", "broadcast", (3,))
    assert simulate(direct, Topology("free", 3, links), 20).seconds == pytest.approx(2)
    assert simulate(direct, Topology("shared", 3, links, resources=(nic,)), 20).seconds == pytest.approx(4)


def test_what_is_replaced_waits_for_its_readers_and_sums_for_nobody() -> None:
    rates = {(0, 1): 10, (1, 2): 1, (2, 0): 10, (1, 0): 10, (2, 1): 10}
    triangle = Topology("triangle", 3, tuple(Link(a, b, Fraction(rate)) for (a, b), rate in rates.items()))
    both = Collective("custom", 3, (Chunk(Fraction(1), (0, 1, 2), (2,)),), reduces=True)
    slow = Transfer(0, 1, 2, 0, "reduce")  # 10 seconds
    for after in (Transfer(1, 0, 1, 0, "copy"), Transfer(1, 0, 1, 0, "reduce")):
        assert simulate(Schedule("s", both, (slow, after)), triangle, 10).seconds == pytest.approx(11)
    sums = (Transfer(0, 0, 1, 0, "reduce"), Transfer(1, 2, 1, 0, "reduce"), Transfer(2, 1, 0, 0, "reduce"))
    assert simulate(Schedule("s", both, sums), triangle, 10).arrivals_s == pytest.approx((1, 1, 2))


def test_a_connection_keeps_its_order_unless_it_need_not() -> None:
    chunks = Collective("custom", 3, (Chunk(Fraction(1, 2), (0,), (2,)), Chunk(Fraction(1, 2), (1,), (2,))))
    relayed = (Transfer(0, 0, 1, 0), Transfer(1, 1, 2, 0), Transfer(2, 1, 2, 1))  # chunk 1 is there from the start
    schedule = Schedule("s", chunks, relayed)
    assert simulate(schedule, LINE, 100).starts_s == pytest.approx((0, 1, 2))
    assert simulate(schedule, LINE, 100, in_order=False).starts_s == pytest.approx((0, 1, 0))


def test_a_transfer_without_a_path_is_an_error() -> None:
    with pytest.raises(ShardwrightError, match="no link from 2 to 0"):
        simulate(build("direct", "all_gather", (3,)), LINE, 10)


def test_ranks_are_not_in_lock_step() -> None:
    mesh = preset_topology("mesh:4x4")
    schedule = build("tidal", "all_reduce", (4, 4))
    in_step = schedule.time_s(mesh, 2**20)
    assert 0.5 * in_step < simulate(schedule, mesh, 2**20).seconds != in_step
