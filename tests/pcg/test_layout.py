"""Layouts: text, duals, the order of nested shards, and that cutting and putting together are inverse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.pcg.errors import LayoutError
from shardwright.pcg.interpret import denote, scatter
from shardwright.pcg.layout import (
    C,
    Layout,
    Layouts,
    P,
    R,
    S,
    check_layouts,
    format_layouts,
    innermost,
    local_shape,
    shard_order,
)
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.types import TensorType
from tests.each import each
from tests.pcg.strategies import examples, layouts_for, meshes, shapes
from tests.pcg.typed import make_mesh

ALL = [R, C, P, S(0), S(3), S(1, 4)]


@each("layout", ALL, ids=str)
def test_text_round_trip(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_text() -> None:
    assert [str(layout) for layout in ALL] == ["R", "C", "P", "S(0)", "S(3)", "S(1,4)"]
    assert Layout.parse("S(1, 4)") == S(1, 4)
    assert format_layouts((S(0), R), Mesh.of(dp=2, tp=2)) == "dp: S(0), tp: R"


@each("text", ["", "Q", "S", "S()", "S(-1)", "S(0,0)", "S(0,1,2)", "R ", "s(0)"])
def test_what_is_not_a_layout(text: str) -> None:
    with pytest.raises(LayoutError, match=r"layout '.*' is not one of R, C, P, S\(dim\) or S\(dim,blocks\)"):
        Layout.parse(text)


def test_duals() -> None:
    assert [layout.dual for layout in ALL] == [R, P, C, S(0), S(3), S(1, 4)]
    assert [layout.dual.dual for layout in ALL] == ALL


# ---- nested shards ----


@each(
    ("layouts", "sizes", "order"),
    [
        ((R, P), (2, 2), ()),
        ((S(0), S(1)), (2, 2), ((0, 0, 1), (1, 1, 1))),
        ((S(1), S(0)), (2, 2), ((1, 0, 1), (0, 1, 1))),
        ((S(0), S(0)), (2, 3), ((0, 0, 1), (1, 0, 1))),
        ((S(0, 4), S(0)), (2, 2), ((1, 0, 1), (0, 0, 2))),
        ((S(0, 4), S(0, 4)), (2, 3), ((0, 0, 4), (1, 0, 4))),
        ((S(0, 2), S(0)), (3, 2), ((1, 0, 1), (0, 0, 1))),
    ],
)
def test_shard_order(layouts: Layouts, sizes: tuple[int, ...], order: tuple[tuple[int, int, int], ...]) -> None:
    assert shard_order((24, 12), layouts, sizes) == order


@each(
    ("shape", "layouts", "sizes", "reason"),
    [
        ((8,), (S(1),), (2,), r"S\(1\) names dimension 1 of a tensor of rank 1"),
        ((8,), (S(-1),), (2,), r"S\(-1\) names dimension -1 of a tensor of rank 1"),
        ((8,), (S(0, 0),), (2,), r"S\(0,0\) has 0 blocks"),
        ((10,), (S(0),), (4,), r"dimension 0 has size 10, not divisible by 4"),
        ((12,), (S(0), S(0)), (4, 2), r"dimension 0 has size 12 \(3 after outer shards\), not divisible by 2"),
        ((12,), (S(0, 4),), (2,), r"dimension 0 has size 12 in 4 blocks, not divisible by 2"),
        ((6,), (S(0, 2),), (2,), r"dimension 0 has size 6 in 2 blocks, not divisible by 2"),
        (
            (12,),
            (S(0), S(0, 3)),
            (2, 2),
            r"dimension 0 cannot hold 3 blocks inside the 2 parts of outer axes",
        ),
        (
            (24,),
            (S(0, 3), S(0, 2)),
            (2, 3),
            r"dimension 0 cannot hold 3 blocks inside the 6 parts of outer axes",
        ),
    ],
)
def test_layouts_that_do_not_fit(shape: tuple[int, ...], layouts: Layouts, sizes: tuple[int, ...], reason: str) -> None:
    mesh = make_mesh(*sizes)
    with pytest.raises(LayoutError, match=rf"%x: shape .* cannot have layout \(.*\): {reason}; choose axis sizes"):
        check_layouts(shape, layouts, mesh, "%x")


def test_one_layout_per_axis() -> None:
    with pytest.raises(LayoutError, match=r"%x: 1 layouts for the 2 axes of \[dp=2, tp=2\]"):
        check_layouts((8,), (R,), make_mesh(2, 2), "%x")


def test_innermost() -> None:
    assert [innermost((S(0), S(0)), axis) for axis in (0, 1)] == [False, True]
    assert [innermost((S(0, 4), S(0)), axis) for axis in (0, 1)] == [True, False]
    assert [innermost((S(0), S(1)), axis) for axis in (0, 1)] == [True, True]
    assert [innermost((S(0), R, S(0)), axis) for axis in (0, 2)] == [False, True]


def held(extent: int, layouts: Layouts, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> np.ndarray:
    """The indices that a device holds of one dimension, from the digits that `layout.py` describes."""
    index, prefixes = np.arange(extent), {}
    mask = np.ones(extent, bool)
    for axis, layout in enumerate(layouts):
        if layout.is_shard:
            prefix = prefixes.get(layout.blocks, layout.blocks)
            prefixes[layout.blocks] = prefix * sizes[axis]
            mask &= index // (extent // (prefix * sizes[axis])) % sizes[axis] == coordinate[axis]
    return index[mask]


@given(st.data())
@examples(150)
def test_a_shard_is_a_digit_of_the_index(data: st.DataObject) -> None:
    mesh, extent = data.draw(meshes()), data.draw(st.sampled_from([24, 48, 96, 144]))
    layouts = data.draw(layouts_for((extent,), mesh, "SSSR"))
    parts = scatter(np.arange(extent), layouts, mesh)
    for coordinate, part in zip(mesh.coordinates(), parts, strict=True):
        np.testing.assert_array_equal(part, held(extent, layouts, mesh.sizes, coordinate))
    assert local_shape((extent,), layouts, mesh.sizes) == parts[0].shape


@given(st.data())
@examples(200)
def test_denote_inverts_scatter(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    layouts = data.draw(layouts_for(shape, mesh))
    array = np.random.default_rng(0).integers(-99, 99, shape)
    value = TensorType(shape, "int64", layouts)
    parts = scatter(array, layouts, mesh, seed=data.draw(st.integers(0, 9)))
    assert all(part.shape == value.local_shape(mesh) for part in parts)
    np.testing.assert_array_equal(denote(parts, value, mesh), array)
