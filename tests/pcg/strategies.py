"""Hypothesis strategies: meshes, shapes and layouts that fit each other."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from shardwright.pcg.layout import C, Layout, Layouts, P, R, S, shard_order
from shardwright.pcg.mesh import Mesh
from tests.pcg.typed import AXES

SIZES = st.sampled_from([1, 2, 2, 3, 4])
EXTENTS = st.sampled_from([1, 4, 6, 8, 12, 24, 48])


@st.composite
def meshes(draw: st.DrawFn, max_axes: int = 3) -> Mesh:
    sizes = draw(st.lists(SIZES, max_size=max_axes))
    return Mesh(AXES[: len(sizes)], tuple(sizes))


@st.composite
def shapes(draw: st.DrawFn, max_rank: int = 3) -> tuple[int, ...]:
    return tuple(draw(st.lists(EXTENTS, max_size=max_rank)))


@st.composite
def layouts_for(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh, kinds: str = "RCSP") -> Layouts:
    """Random layouts that a tensor of this shape can have; an axis that finds no shard is R."""
    found: list[Layout] = [R] * len(mesh)
    whole = {"R": R, "C": C, "P": P}
    for axis in draw(st.permutations(range(len(mesh)))):
        kind = draw(st.sampled_from(kinds))
        if kind != "S":
            found[axis] = whole[kind]
            continue
        shards = [S(dim, blocks) for dim in range(len(shape)) for blocks in (1, 1, 2, 3, 4, 6, 8)]
        for shard in draw(st.permutations(shards)):
            wanted = (*found[:axis], shard, *found[axis + 1 :])
            if not isinstance(shard_order(shape, wanted, mesh.sizes), str):
                found[axis] = shard
                break
    return tuple(found)


def examples(number: int) -> settings:
    """Settings of a property test, for machines of any speed."""
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])
