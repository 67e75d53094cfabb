"""What gloo runs."""

import pytest

from shardwright.cost.clusters.cluster import Collective
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives import gloo
from shardwright.cost.collectives.groups import group_of, links_of
from tests.each import each

HOP, RATE = 1e-4, 1e9


def time_s(collective: Collective, n: int, num_bytes: float) -> float:
    level = Level("rank", n, RATE, HOP, "host")
    return gloo.curve(collective, links_of(group_of((n,), 0, (level,)), (level,))).time_s(num_bytes)


@each(
    ("collective", "hops", "share"),
    [
        ("all_reduce", 6, 6 / 4),
        ("reduce_scatter", 6, 6 / 4),
        ("all_gather", 3, 3 / 4),
        ("all_to_all", 3, 3 / 16),
        ("broadcast", 2, 2),
    ],
)
def test_one_algorithm_each(collective: Collective, hops: int, share: float) -> None:
    assert time_s(collective, 4, 1e6) == pytest.approx(gloo.BASE_S + hops * HOP + share * 1e6 / RATE)
