"""NCCL's selector and the time of what it chooses."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.tuning import Tuning
from shardwright.cost.clusters.cluster import Collective
from shardwright.cost.clusters.topology import Level
from shardwright.cost.collectives import nccl
from shardwright.cost.collectives.curve import Curve
from shardwright.cost.collectives.groups import Link, group_of, links_of
from shardwright.cost.collectives.nccl import AMPERE, BLACKWELL, HOPPER, VOLTA, Generation, generation
from tests.each import each

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
MIB = 2**20


def machine(gpus: int, nodes: int = 1, gb_per_s: float = 360.0, network_gb_per_s: float = 45.0) -> tuple[Level, ...]:
    inside = Level("nvlink", gpus, gb_per_s * 1e9, 1.25e-6, "nvlink")
    return (inside, Level("network", nodes, network_gb_per_s * 1e9, 3.35e-6, "network", "rail"))


def links(levels: tuple[Level, ...], *mesh: int, axis: int = 0) -> tuple[Link, ...]:
    sizes = mesh or (prod(level.size for level in levels),)
    return links_of(group_of(sizes, axis, levels), levels)


def curve(collective: Collective, found: tuple[Link, ...], rows: Generation = HOPPER) -> Curve:
    return nccl.curve(collective, found, rows)


def names(collective: Collective, found: tuple[Link, ...], rows: Generation = HOPPER) -> list[str]:
    """What is chosen, as sizes grow."""
    chosen = [piece.name for piece in curve(collective, found, rows).pieces]
    return [name for i, name in enumerate(chosen) if name not in chosen[:i]]


# ----------------------------------------------------------------------------------------------------------- selector


def test_latencies_and_bandwidths_of_the_table() -> None:
    """tuning.cc by hand: a ring of 8 on one node."""
    rings = {c.name: c for c in nccl.candidates("all_reduce", links(machine(8)), HOPPER)}
    assert rings["ring LL"].latency_s == pytest.approx((6.6 + 14 * 0.6) * 1e-6)
    assert rings["ring LL128"].latency_s == pytest.approx((14 + 14 * 1.9) * 1e-6)
    assert rings["ring Simple"].latency_s == pytest.approx((8.4 + 14 * 3.4) * 1e-6)
    assert rings["tree LL"].latency_s == pytest.approx((6.8 + 14 * 0.6) * 1e-6)
    assert rings["ring LL"].s_per_byte == pytest.approx(14 / 8 / 141e9)
    assert rings["ring LL128"].s_per_byte == pytest.approx(14 / 8 / (0.92 * 360e9))
    assert rings["ring Simple"].s_per_byte == pytest.approx(14 / 8 / 360e9)
    assert rings["tree Simple"].s_per_byte == pytest.approx(2 / (0.92 * 360e9))
    assert rings["tree LL"].s_per_byte == pytest.approx(2 / (0.92 * 360e9 / 3.8))
    assert rings["nvls"].estimate_s_per_byte == pytest.approx(6 / 5 / (0.85 * 360e9))
    assert rings["nvls"].s_per_byte == pytest.approx(9 / 8 / (0.85 * 360e9))


def test_latencies_across_nodes() -> None:
    rings = {c.name: c for c in nccl.candidates("all_reduce", links(machine(8, 4)), HOPPER)}
    assert rings["ring LL"].latency_s == pytest.approx((6.6 + 2 * 28 * 1.0 + 2 * 3 * 2.7) * 1e-6)  # posts take longer
    assert rings["ring Simple"].latency_s == pytest.approx(1.4 * (8.4 + 2 * 28 * 3.4 + 2 * 3 * 14) * 1e-6)
    assert rings["tree LL"].latency_s == pytest.approx((6.8 + 2 * (7 * 0.6 + 2 * 5.0)) * 1e-6)
    assert rings["nvls tree"].latency_s == pytest.approx((25 + 2 * 2 * 18) * 1e-6)


def test_what_is_chosen_on_8_volta() -> None:
    """Published switches of that machine: LL to LL128 between 512 KiB and 1 MiB, to Simple between 8 and 16 MiB."""
    rings = [
        c for c in nccl.candidates("all_reduce", links(machine(8, gb_per_s=120)), VOLTA) if c.name.startswith("ring")
    ]

    def chosen(num_bytes: float) -> str:
        return min(rings, key=lambda choice: choice.estimate(num_bytes).time_s(num_bytes)).name

    assert [chosen(x * MIB) for x in (0.5, 1, 8, 16)] == ["ring LL", "ring LL128", "ring LL128", "ring Simple"]


def test_generations_choose_by_their_hardware() -> None:
    inside = links(machine(8))
    assert names("all_reduce", inside, HOPPER) == ["ring LL, opening", "ring LL", "nvls"]
    assert names("all_reduce", inside, AMPERE) == ["ring LL, opening", "ring LL", "ring LL128", "ring Simple"]
    assert names("all_gather", inside, HOPPER) == ["ring LL, opening", "ring LL", "ring LL128", "ring Simple"]
    assert "tree LL" in names("all_reduce", links(machine(8, 64)), AMPERE)
    assert any(name.startswith("nvls tree") for name in names("all_reduce", links(machine(8, 2)), BLACKWELL))
    assert not any("tree" in name for name in names("all_gather", links(machine(8, 64))))


@pytest.mark.parametrize(
    "found",
    [
        links(machine(2)),  # NVLS needs three
        links((replace(machine(8)[0], kind="pcie"),)),
        links((replace(machine(8)[0], topology="mesh"),)),
        links(machine(8, 4), 4, 8, axis=0),  # one device a node
    ],
    ids=["two", "pcie", "no switch", "across"],
)
def test_where_the_switch_cannot_sum(found: tuple[Link, ...]) -> None:
    assert not any("nvls" in choice.name for choice in nccl.candidates("all_reduce", found, HOPPER))


def test_pcie_has_no_ll128() -> None:
    pcie = links((replace(machine(8, gb_per_s=20)[0], kind="pcie"),))
    assert {c.name for c in nccl.candidates("all_reduce", pcie, AMPERE)} == {
        f"{form} {protocol}" for form in ("ring", "tree") for protocol in ("LL", "Simple")
    }


@each(
    ("name", "rows"),
    [
        ("V100-32", VOLTA),
        ("T4", VOLTA),
        ("A100-80", AMPERE),
        ("A10", AMPERE),
        ("L40S", AMPERE),
        ("H100-SXM", HOPPER),
        ("NVIDIA H200", HOPPER),
        ("GH200", HOPPER),
        ("B200", BLACKWELL),
        ("GB200", BLACKWELL),
        ("B300", BLACKWELL),
        ("something new", AMPERE),
    ],
)
def test_generations_by_name(name: str, rows: Generation) -> None:
    assert generation(name) is rows


def test_the_choice_need_not_be_the_fastest() -> None:
    """The library takes the least estimate; the time is that of its choice."""
    found = links(machine(8))
    slower = nccl.curve("all_reduce", found, HOPPER, Tuning((("nvls", 3.0),), (("nvls", 3.0),)).factors)
    assert slower.at(64 * MIB).name == "nvls"
    ring = next(c for c in nccl.candidates("all_reduce", found, HOPPER) if c.name == "ring Simple")
    assert slower.time_s(64.0 * MIB) > ring.time(64 * MIB).time_s(64 * MIB)


# --------------------------------------------------------------------------------------------------------------- time


def test_time_stands_still_while_channels_open() -> None:
    whole = curve("all_reduce", links(machine(8)))
    first = 4096 * 8
    assert (
        whole.time_s(first / 2) < whole.time_s(float(first)) == whole.time_s(4.0 * first) < whole.time_s(24.0 * first)
    )


def test_an_nvls_chunk_waits_for_two_stages() -> None:
    (nvls,) = [c for c in nccl.candidates("all_reduce", links(machine(8)), HOPPER) if c.name == "nvls"]
    heads = 16 * 8
    for num_bytes, chunk in ((heads * 16384, 16384), (heads * 40000, 16384), (4e9, 131072)):
        expected = 25e-6 + (num_bytes + 2 * heads * chunk) * nvls.s_per_byte
        assert nvls.time(num_bytes).time_s(num_bytes) == pytest.approx(expected)
    small = nvls.time(1000.0)
    assert small.time_s(1000.0) == pytest.approx(25e-6 + 3000 * nvls.s_per_byte)


def test_a_long_way_counts_beyond_what_the_tables_hold() -> None:
    near, far = machine(8, 2), (machine(8)[0], replace(machine(8, 2)[1], latency_s=10e-3))
    for collective in COLLECTIVES:
        delay_s = curve(collective, links(far)).time_s(1.0) - curve(collective, links(near)).time_s(1.0)
        assert delay_s >= 9e-3
    faster = (machine(8)[0], replace(machine(8, 2)[1], latency_s=0.0))
    assert curve("all_reduce", links(faster)).time_s(1.0) == curve("all_reduce", links(near)).time_s(1.0)


def test_tuning_moves_one_choice_alone() -> None:
    found = links(machine(8))
    tuned = nccl.curve("all_reduce", found, HOPPER, Tuning((("ring LL", 1.1),)).factors)
    plain = curve("all_reduce", found)
    assert tuned.time_s(8.0) == pytest.approx(1.1 * plain.time_s(8.0), rel=1e-3)
    assert tuned.time_s(1e9) == plain.time_s(1e9)


def test_tuning_moves_each_choice_by_its_own_factors() -> None:
    """Half as fast to begin with, and three times as long for each byte."""

    def factors(name: str) -> tuple[float, float]:
        return 2.0, 3.0

    found = links(machine(8))
    for collective in (*COLLECTIVES, "all_to_all"):
        plain, tuned = curve(collective, found), nccl.curve(collective, found, HOPPER, factors)
        assert tuned.time_s(0.0) == pytest.approx(2 * plain.time_s(0.0), rel=1e-9), collective
        assert tuned.time_s(1e12) == pytest.approx(3 * plain.time_s(1e12), rel=1e-3), collective


MACHINES = [machine(8), machine(2), machine(4, 2), machine(8, 64), machine(8, 2048), machine(1, 8), machine(8, 3, 20.0)]
sizes = st.floats(0, 1e11)
SLACK = 1.5
"""The selector's: NVLS for two or three chunks waits longer than its estimate says."""


@each("rows", [VOLTA, AMPERE, HOPPER, BLACKWELL], ids=["volta", "ampere", "hopper", "blackwell"])
@each("levels", MACHINES, ids=lambda levels: "x".join(str(level.size) for level in levels))
@given(a=sizes, b=sizes)
def test_promises(levels: tuple[Level, ...], rows: Generation, a: float, b: float) -> None:
    """Never falls with the size, never beats the links; an all-reduce is no slower than its halves by much."""
    found = links(levels)
    n, narrowest = prod(link.split for link in found), min(link.inside * link.bytes_per_s for link in found)
    for collective in COLLECTIVES:
        fewer, more = (curve(collective, found, rows).time_s(x) for x in sorted([a, b]))
        assert 0 < fewer <= more * (1 + 1e-9)
        assert curve(collective, found, rows).time_s(a) >= (n - 1) / n * a / narrowest


@each("rows", [VOLTA, AMPERE, HOPPER, BLACKWELL], ids=["volta", "ampere", "hopper", "blackwell"])
@each("levels", MACHINES, ids=lambda levels: "x".join(str(level.size) for level in levels))
def test_an_all_reduce_is_hardly_slower_than_its_halves(levels: tuple[Level, ...], rows: Generation) -> None:
    found = links(levels)
    whole, *halves = (curve(name, found, rows) for name in ("all_reduce", "reduce_scatter", "all_gather"))
    for num_bytes in np.logspace(0, 11, 500).tolist():
        assert whole.time_s(num_bytes) <= SLACK * sum(half.time_s(num_bytes) for half in halves)
