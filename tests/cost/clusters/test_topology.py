"""Levels and their topologies: every field is checked, and a grid joins all of its units."""

import math
from dataclasses import replace

import pytest

from shardwright.cost.clusters.topology import LINK_KINDS, TOPOLOGIES, Level
from shardwright.pcg.errors import ClusterError
from tests.each import each

NETWORK = Level("network", 16, 2e10, 4e-6)
TORUS = Level("torus", 16, 2e10, 4e-6, "network", "torus", dims=(4, 4))


def test_defaults() -> None:
    assert (NETWORK.kind, NETWORK.topology, NETWORK.oversubscription, NETWORK.dims) == ("network", "switch", 1.0, ())


@each("kind", LINK_KINDS)
@each("topology", TOPOLOGIES)
def test_every_topology_of_every_kind(kind: str, topology: str) -> None:
    dims = (2, 2, 4) if topology == "torus" else ()
    level = replace(NETWORK, kind=kind, topology=topology, dims=dims)
    assert hash(level) == hash(replace(level))


def test_dims_are_a_tuple_of_ints() -> None:
    assert replace(TORUS, dims=[2.0, 8]).dims == (2, 8)
    assert replace(TORUS, topology="mesh").dims == (4, 4)


def test_oversubscription_shares_the_bandwidth() -> None:
    assert NETWORK.shared_bytes_per_s == 2e10
    assert replace(NETWORK, oversubscription=4).shared_bytes_per_s == 5e9


@each(
    ("level", "size", "expected"),
    [
        (NETWORK, 4, replace(NETWORK, size=4)),
        (NETWORK, 32, replace(NETWORK, size=32)),
        (replace(NETWORK, topology="ring"), 4, replace(NETWORK, size=4, topology="mesh", dims=(4,))),
        (replace(NETWORK, topology="ring"), 32, replace(NETWORK, size=32, topology="ring")),
        (
            replace(NETWORK, topology="mesh"),
            6,
            replace(NETWORK, size=6, topology="mesh", bandwidth_bytes_per_s=2e10 * (5 / 15)),
        ),
        (replace(NETWORK, topology="mesh"), 1, replace(NETWORK, size=1, topology="mesh")),
        (TORUS, 3, replace(TORUS, size=3, topology="mesh", dims=(3,))),
        (TORUS, 8, replace(TORUS, size=8, topology="mesh", dims=(2, 4))),
        (TORUS, 6, replace(TORUS, size=6, topology="mesh", dims=(6,))),
        (TORUS, 32, replace(TORUS, size=32, topology="mesh", dims=(32,))),
        (TORUS, 16, TORUS),
    ],
)
def test_resized(level: Level, size: int, expected: Level) -> None:
    assert level.resized(size) == expected


@each(
    ("field", "value", "problem"),
    [
        ("kind", "wifi", r"kind: expected one of 'nvlink', 'pcie', 'network', 'host', got 'wifi'; choose one"),
        ("topology", "star", r"topology: expected one of 'switch', .*, 'fat-tree', got 'star'; choose one"),
        ("oversubscription", 0.5, r"oversubscription: expected a number of at least 1, got 0\.5; give it in times"),
        ("oversubscription", 0, r"oversubscription: expected a positive number, got 0; give it in times what"),
        ("oversubscription", math.inf, r"oversubscription: expected a positive number, got inf"),
        ("oversubscription", "4", r"oversubscription: expected a positive number, got '4'"),
        ("dims", 16, r"dims: expected a list of positive integers, got 16; give the grid, such as \[4, 4\]"),
        ("dims", (), r"dims: expected the grid of the torus, got none; give dims whose product is 16"),
        ("dims", (4, 0), r"dims\[1\]: expected a positive integer, got 0; it is how many units lie along one"),
        ("dims", (4, 3), r"dims: expected a grid of 16 units, got \[4, 3\], which joins 12; the other units have no l"),
        ("topology", "ring", r"dims: expected none for topology 'ring', got \[4, 4\]; remove them or make it a"),
    ],
)
def test_errors(field: str, value: object, problem: str) -> None:
    with pytest.raises(ClusterError, match=rf"^Level\.{problem}"):
        replace(TORUS, **{field: value})
