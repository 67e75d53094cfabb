"""Families are proven for any number of ranks, their wrong twins refuted, and builders build their members."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import pytest

from shardwright.pcg.collectives.builders.lines import ring_all_gather
from shardwright.pcg.collectives.builders.table import BUILDERS, build
from shardwright.pcg.collectives.schedule import Schedule, Transfer, all_reduce_of
from shardwright.verifier.collectives.families import (
    FAMILIES,
    PROVEN,
    Claim,
    Family,
    around,
    members,
    of_builder,
    pick,
    refuted,
)
from tests.each import some

GRIDS = ((2,), (3,), (4,), (7,), (8,), (16,), (2, 2), (3, 2), (2, 4), (4, 4), (2, 3, 2))
TWINS: Mapping[str, tuple[Claim, Callable[[Family], Family]]] = {
    "a step too few": ("done", lambda f: f._replace(runs=lambda n, t: f.runs(n, f.after(t)))),
    "a step too late": ("first", lambda f: f._replace(first=f.first + 1)),
    "from another rank": ("there", lambda f: f._replace(sender=lambda n, t, r, c: around(n, f.sender(n, t, r, c), 1))),
    "from itself": ("there", lambda f: f._replace(sender=lambda n, t, r, c: r)),
    "another chunk": ("there", lambda f: f._replace(gets=lambda n, t, r, c: f.gets(n, t, r, around(n, c, 1)))),
    "again": ("new", lambda f: f._replace(gets=lambda n, t, r, c: f.held(n, f.after(t), r, c))),
    "only chunk 0": ("grows", lambda f: f._replace(gets=lambda n, t, r, c: pick(c == 0, f.gets(n, t, r, c), c < 0))),
    "too much held": ("first", lambda f: f._replace(held=lambda n, t, r, c: f.held(n, f.after(t), r, c))),
    "a clock that stands": ("ends", lambda f: f._replace(after=lambda t: t)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_proven_and_their_wrong_twins_are_not(name: str) -> None:
    family = FAMILIES[name]
    assert refuted(family) == []
    for twin, (claim, change) in TWINS.items():
        (found,) = refuted(change(family), claim)
        assert found.example, f"{twin}: refuted by an example"


def test_recursive_doubling_adds_whole_buffers() -> None:
    assert [name for name, family in FAMILIES.items() if not refuted(family, "whole")] == ["doubling"]
    for n in (2, 4, 8, 16):
        sent = {(step, src, dst) for step, src, dst, *_ in members((n,), of_builder("doubling", (n,)))}
        assert {t[:3] for t in build("doubling", "all_reduce", (n,)).transfers} == sent


def claimed(name: str, grid: tuple[int, ...], schedule: Schedule) -> set[Transfer]:
    """What the families say of a builder's all-gather."""
    nested = name in ("hierarchical", "xy", "mesh", "torus")
    dims, total = grid if nested else (prod(grid),), len(schedule.collective.chunks) // prod(grid)
    pieces = ((piece, members(dims, of_builder(name, dims, piece))) for piece in range(total))
    return {t._replace(chunk=t.chunk * total + piece) for piece, own in pieces for t in own}


@pytest.mark.parametrize("name", PROVEN)
def test_builders_build_members(name: str) -> None:
    grids = [grid for grid in GRIDS if BUILDERS[name].sizes.fit(grid)]
    for grid in some(grids, 3):
        for pieces in (1, 2):
            gather = build(name, "all_gather", grid, pieces)
            assert set(gather.transfers) == claimed(name, grid, gather), grid
            if "reduce_scatter" not in BUILDERS[name].makes:
                continue
            scatter = build(name, "reduce_scatter", grid, pieces)
            back = ring_all_gather(prod(grid), pieces, range(prod(grid))[::-1]) if name == "ring" else gather
            assert set(scatter.reversed().transfers) == set(back.transfers)
            assert build(name, "all_reduce", grid, pieces).transfers == all_reduce_of(scatter, gather).transfers
