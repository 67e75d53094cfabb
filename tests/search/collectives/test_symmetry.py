"""Symmetries: groups that move every rank, and what they do to chunks."""

from fractions import Fraction

import pytest

from shardwright.cost.clusters.networks import preset_topology
from shardwright.pcg.collectives.collective import Chunk, Collective, collective
from shardwright.pcg.errors import ShardwrightError
from shardwright.search.collectives.symmetry import chunk_images, is_symmetry, symmetries
from tests.each import each


@each(
    ("name", "order"),
    [("dgx1", 4), ("dgx-a100:4", 32), ("amd-z52", 8), ("torus:4x4x2", 32), ("mesh:4x4", 4), ("mesh:4x3", 1),
     ("unlike", 8), ("fat-tree", 16), ("mi250:2", 8), ("ndv2", 8)],
)  # fmt: skip
def test_groups_of_presets(name: str, order: int) -> None:
    topology = preset_topology(name)
    group = symmetries(topology)
    assert len(group) == len(set(group)) == order
    assert group[0] == tuple(range(topology.num_ranks))
    for image in group:
        assert sorted(image) == list(group[0])
        assert is_symmetry(topology, image)
        assert image == group[0] or all(rank != to for rank, to in enumerate(image))
    products = {tuple(one[rank] for rank in other) for one in group for other in group}
    assert products == set(group)


def test_what_is_no_symmetry() -> None:
    swap = (1, 0, *range(2, 8))
    assert not is_symmetry(preset_topology("dgx1"), swap)
    assert is_symmetry(preset_topology("dgx-a100:1"), swap)
    nics = preset_topology("dgx1:2")  # two ranks share a NIC
    assert not is_symmetry(nics, tuple(rank // 8 * 8 + (rank + 1) % 8 for rank in range(16)))


def test_offsets_are_checked() -> None:
    dgx1 = preset_topology("dgx1")
    assert symmetries(dgx1, [(4, 8)]) == [(0, 1, 2, 3, 4, 5, 6, 7), (4, 5, 6, 7, 0, 1, 2, 3)]
    with pytest.raises(ShardwrightError, match=r"'dgx1': expected a symmetry that moves all ranks, got \[1, 2"):
        symmetries(dgx1, [(1, 8)])
    for offset in ((8, 8), (1, 3), (0, 8), (1, 0)):
        with pytest.raises(ShardwrightError, match="expected a shift below a period that divides 8, got"):
            symmetries(dgx1, [offset])


def test_images_of_chunks() -> None:
    group = symmetries(preset_topology("dgx1"), [(4, 8)])
    assert chunk_images(collective("all_gather", 8, 2), group) == [tuple(range(16)), (*range(8, 16), *range(8))]
    assert chunk_images(collective("broadcast", 8), group) is None
    assert chunk_images(collective("all_gather", 8, weights=[1, 2] * 4), group) is not None
    assert chunk_images(collective("all_gather", 8, weights=range(1, 9)), group) is None
    lonely = Collective("custom", 8, (Chunk(Fraction(1), (0,), (4,)), Chunk(Fraction(1), (4,), (0,))))
    assert chunk_images(lonely, group) == [(0, 1), (1, 0)]
