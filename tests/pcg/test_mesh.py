"""Meshes: axes, ranks and coordinates, and every way to describe one wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.pcg.errors import GraphError
from shardwright.pcg.mesh import Mesh


def test_ranks_are_row_major() -> None:
    mesh = Mesh.of(dp=2, tp=3)
    assert mesh.num_devices == 6
    assert list(mesh.coordinates()) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [mesh.coordinate(rank) for rank in range(6)] == list(mesh.coordinates())


def test_a_mesh_without_axes_has_one_device() -> None:
    mesh = Mesh()
    assert (len(mesh), mesh.num_devices, list(mesh.coordinates()), str(mesh)) == (0, 1, [()], "[]")


def test_microbatches_are_members_but_no_devices() -> None:
    mesh = Mesh.of(mb=3, dp=2, tp=2)
    assert (mesh.num_members, mesh.num_devices, mesh.num_microbatches) == (12, 4, 3)
    assert (mesh.sizes, mesh.device_sizes) == ((3, 2, 2), (1, 2, 2))
    assert [mesh.coordinate(rank)[1:] for rank in range(4)] == list(Mesh.of(dp=2, tp=2).coordinates())
    plain = Mesh.of(dp=2)
    assert (plain.num_members, plain.num_microbatches, plain.device_sizes) == (2, 1, (2,))


def test_text_and_index() -> None:
    mesh = Mesh.of(dp=4, tp=2)
    assert str(mesh) == "[dp=4, tp=2]"
    assert (mesh.index("dp"), mesh.index("tp"), len(mesh)) == (0, 1, 2)


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (("dp",), (2, 2), r"mesh: 1 axis names for 2 sizes; give one size per name"),
        (("dp", "dp"), (2, 2), r"mesh: axis names \['dp', 'dp'\] repeat; give every axis its own name"),
        (("d p",), (2,), r"mesh: axis name 'd p' is not an identifier; use letters, digits and '_'"),
        (("dp",), (0,), r"mesh: axis 'dp' has size 0; expected a positive integer"),
        (("dp",), (True,), r"mesh: axis 'dp' has size True; expected a positive integer"),
        (("dp",), (2.0,), r"mesh: axis 'dp' has size 2.0; expected a positive integer"),
        (("dp",), ("2",), r"mesh: axis 'dp' has size '2'; expected a positive integer"),
        (("dp", "mb"), (2, 2), r"mesh: 'mb' names the microbatches and comes first, got \['dp', 'mb'\]"),
    ],
)
def test_impossible_meshes(names: tuple[str, ...], sizes: tuple[Any, ...], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Mesh(names, sizes)


def test_unknown_axis() -> None:
    with pytest.raises(GraphError, match=r"axis 'ep' is not in the mesh \[dp=2, tp=2\]; choose one of \['dp', 'tp'\]"):
        Mesh.of(dp=2, tp=2).index("ep")
