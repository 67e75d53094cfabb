"""What calibration times of the lowering."""

from __future__ import annotations

from math import prod

import pytest
import torch.distributed as dist

from shardwright.cost.clusters.cluster import COLLECTIVES
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.overheads import collective


def shapes(num_bytes: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Of what every collective returns, and whether it has a gradient."""
    group = dist.new_group(list(range(dist.get_world_size())))
    assert isinstance(group, dist.ProcessGroup)
    found = {name: collective(name, group, num_bytes, "cpu")() for name in COLLECTIVES if name != "broadcast"}
    collective("broadcast", group, num_bytes, "cpu")()
    return {name: (tuple(result.shape), result.requires_grad) for name, result in found.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_collectives_are_those_of_parallel_operators(num_ranks: int) -> None:
    num_bytes = 2**12
    for found in run_ranks(shapes, num_ranks, 60.0, args=(num_bytes,)):
        assert all(grad for _, grad in found.values())
        whole = found["all_gather"][0]
        assert found["all_reduce"][0] == whole
        assert num_bytes <= 4 * prod(whole) < num_bytes + 4 * num_ranks**3
        assert found["reduce_scatter"][0] == (whole[0] // num_ranks, whole[1])
        assert found["all_to_all"][0] == (whole[0], whole[1] // num_ranks)
