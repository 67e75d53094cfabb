"""Ways of chunks are proven for any number of ranks, their wrong twins refuted, and builders' chunks take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import pytest

from shardwright.pcg.collectives.builders.table import BUILDERS as BUILT
from shardwright.pcg.collectives.builders.table import build
from shardwright.verifier.collectives.families import Claim, around, pick
from shardwright.verifier.collectives.ways import BUILDERS, WAYS, ChunkPaths, moved, proven_kinds, refuted

GRIDS = ((2,), (3,), (5,), (8,), (9,), (2, 2), (3, 4), (2, 1, 3), (2, 3, 2))
TWINS: Mapping[str, tuple[Claim, Callable[[ChunkPaths], ChunkPaths]]] = {
    "a step too few": ("done", lambda w: w._replace(runs=lambda n, t: w.runs(n, t + 1))),
    "a step too late": ("starts", lambda w: w._replace(at=lambda n, t, c, d: w.at(n, t + 1, c, d))),
    "to another rank": ("done", lambda w: w._replace(at=lambda n, t, c, d: w.at(n, t, c, around(n, d, 1)))),
    "past the last rank": ("inside", lambda w: w._replace(at=lambda n, t, c, d: w.at(n, t, c, d) + t)),
    "never an end": ("ends", lambda w: w._replace(runs=lambda n, t: n >= 2)),
    "chunk 0 stays": ("done", lambda w: w._replace(at=lambda n, t, c, d: pick(c == 0, c, w.at(n, t, c, d)))),
}


@pytest.mark.parametrize("name", WAYS)
def test_ways_are_proven_and_their_wrong_twins_are_not(name: str) -> None:
    assert refuted(WAYS[name]) == []
    for twin, (claim, change) in TWINS.items():
        (found,) = refuted(change(WAYS[name]), claim)
        assert found.example, f"{twin}: refuted by an example"


@pytest.mark.parametrize("name", BUILDERS)
def test_chunks_of_builders_take_their_ways(name: str) -> None:
    way, is_nested = BUILDERS[name]
    for grid in (grid for grid in GRIDS if BUILT[name].sizes.fit(grid)):
        dims = grid if is_nested else (prod(grid),)
        for pieces in (1, 2):
            own = {t._replace(chunk=t.chunk * pieces + j) for t in moved(dims, way) for j in range(pieces)}
            assert set(build(name, "all_to_all", grid, pieces).transfers) == own, grid


def test_what_is_proven_is_said_by_kind() -> None:
    assert proven_kinds("ring", BUILT["ring"].makes) == ["all_gather", "reduce_scatter", "all_reduce"]
    assert proven_kinds("bruck", BUILT["bruck"].makes)[-1] == "all_to_all"
    assert proven_kinds("tree", BUILT["tree"].makes) == []
