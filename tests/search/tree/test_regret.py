"""A plan that is left free is no slower than one with something pinned: a few cheap cases (`make regret` has more)."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from bench.regret import MOST, Anew, Bench, Model, Pinned, Result, add, kept, section
from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.mesh import Mesh
from shardwright.search.tree.planner import Planner
from tests.each import each, some
from tests.search.graphs import blocks, cluster, every_choice

GRAPH = blocks(batch=64, width=64, layers=8, seq=64)
NEEDED_BYTES = 11_804_672
"""Of the plan that keeps everything, in one microbatch."""


def gpus(num_devices: int, share: float, latency_s: float) -> Cluster:
    """With a part of the memory that is needed to keep everything."""
    own = cluster(num_devices, memory_bytes=int(share * NEEDED_BYTES), latency_s=latency_s)
    return replace(own, device=replace(own.device, kind="cuda"))


@each("num_devices, share, latency_s", some([(4, 0.9, 1e-6), (8, 0.25, 1e-6), (8, 0.9, 1e-4)], 1))
def test_no_pin_makes_a_plan_faster(num_devices: int, share: float, latency_s: float) -> None:
    bench = Bench("blocks", Model(lambda: (None, {}), (None,)), lambda model, precision: GRAPH)  # type: ignore[arg-type]
    result = bench.result(f"{num_devices} {share}", gpus(num_devices, share, latency_s), 3)
    assert result.regrets
    assert result.worst[0] <= MOST, result.worst[1]


def test_the_best_mesh_is_tried_with_roles_too() -> None:
    """Layouts of the least sum are not those of the least step here."""
    search = Planner(gpus(8, 0.9, 1e-4), every_choice)
    free = search.plan(GRAPH)
    pinned = search.plan(GRAPH, mesh=Mesh.of(x=2, y=4), roles=("zero", "data"))
    assert free.prediction.step_s <= pinned.prediction.step_s * (1 + MOST)


def test_results_are_kept_and_shown(tmp_path: Path) -> None:
    """What does not fit free, and does with a pin, is the worst."""
    pins = [Pinned({"mesh": {"x": 2}, "roles": ["zero"]}, 1.0), Pinned({"stages": [8, 4]}, None)]
    results = [Result("a", "1 b", 1.01, "way", 1.0, pins), Result("c", "1 b", None, "way", 1.0, pins)]
    for result in results:
        add(result, tmp_path / "kept")
    found = kept(tmp_path / "kept")
    assert list(found.values()) == results
    rows = section(found).splitlines()[-2:]
    assert "+inf%" in rows[0]
    assert "+1.00% | mesh [x=2], roles zero |" in rows[1]
    assert "1 of 2" in rows[1]


def test_a_free_plan_anew_is_compared_with_all_that_is_kept() -> None:
    slower, alone = Anew("a", 1.02, 1.0, 1.0, 1.0, "way"), Anew("b", 1.0, inf, inf, 1.0, "way")
    assert slower.regret == pytest.approx(0.02)
    assert "1.0200 s, was 1.0000 s, regret +2.00%" in str(slower)
    assert alone.regret == 0.0
