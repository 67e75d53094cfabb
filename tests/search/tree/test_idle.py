"""Clusters of which no mesh of all devices is good: plans for fewer of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.search.plan import Idle, Plan
from shardwright.search.tree.idle import parts_with_shares
from shardwright.search.tree.planner import Planner
from tests.search.graphs import blocks, cluster, every_choice, mlp


def _plan(num_devices: int, batch: int, width: int = 512) -> Plan:
    planner = Planner(cluster(num_devices, link_bytes_per_s=1e12, latency_s=1e-9), every_choice)
    return planner.plan(mlp(batch, width, width), microbatches=1, recompute="none", compared=False)


def test_devices_that_a_batch_does_not_divide_among_stay_idle() -> None:
    cases = (1, 8), (3, 8), (7, 8), (21, 8), (7, 14), (8, 1)
    found = {case: _plan(*case) for case in cases}
    used = {key: plan.cluster.num_devices for key, plan in found.items()}
    assert used == {(1, 8): 1, (3, 8): 2, (7, 8): 4, (21, 8): 16, (7, 14): 7, (8, 1): 8}
    for (n, _), plan in found.items():
        assert plan.mesh.num_devices == plan.cluster.num_devices
        assert (plan.idle.num_devices if plan.idle else 0) == n - plan.cluster.num_devices
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    plan = found[7, 8]
    assert plan.idle is not None
    assert plan.idle.reason.startswith("the batch of 8 does not divide among 7, and on all of them a step takes ")
    assert "4 devices and 3 idle" in repr(plan)
    [on_all] = [other for other in plan.alternatives if other.mesh.num_devices == 7]
    assert on_all.prediction.step_s > 1.1 * plan.prediction.step_s


def test_a_single_example_is_shared_by_sequence_and_widths_on_any_number_of_devices() -> None:
    """Of 2016 = 21 · 96, 2048 and 2039 positions, the last a prime; why other devices are idle is said."""
    used = dict[tuple[int, int], int]()
    for n, seq in product((1, 3, 7, 21), (2016, 2048, 2039)):
        planner = Planner(cluster(n, link_bytes_per_s=1e12, latency_s=1e-9), every_choice)
        plan = planner.plan(blocks(1, 64, layers=1, seq=seq), recompute="none", compared=False)
        used[n, seq] = plan.cluster.num_devices
        assert plan.mesh.num_devices == plan.cluster.num_devices
        assert (plan.idle is None) == (used[n, seq] == n)
        if plan.idle is not None:
            assert plan.idle.reason.startswith(f"the batch of 1 does not divide among {n}, and on all of them a step")
    assert {n: used[n, 2016] for n in (1, 3, 7, 21)} == {1: 1, 3: 3, 7: 7, 21: 21}
    assert {n: used[n, 2039] for n in (1, 3, 7, 21)} == {1: 1, 3: 2, 7: 4, 21: 16}


def test_what_is_asked_for_is_kept_to_on_all_devices_or_on_a_part() -> None:
    planner = Planner(cluster(7, link_bytes_per_s=1e12, latency_s=1e-9), every_choice)
    plan = planner.plan(mlp(8, 512, 512), microbatches=1, recompute="none", compared=False, pins="x>=7")
    assert (plan.mesh.num_devices, plan.idle) == (7, None)
    part = planner.plan(mlp(8, 512, 512), microbatches=1, recompute="none", compared=False, pins="data=4")
    assert part.mesh.num_devices == 4
    why = "the batch of 8 does not divide among 7, and on all of them nothing keeps to what was asked for"
    assert part.idle == Idle(planner.cluster.name, 3, why)
    with pytest.raises(PlanError, match="no mesh of 7 devices keeps to all"):
        planner.plan(mlp(8, 512, 512), microbatches=1, recompute="none", compared=False, pins="data=5")


def test_parts_are_judged_by_each_mesh_and_those_that_divide_all_devices_are_among_them() -> None:
    """Of two examples of 1536 positions on 16 devices; 12 may be more than the widths of 32 have shares for."""
    graph = blocks(2, 32, seq=3 * 512)
    found = [(part.num_devices, mesh.sizes) for part, mesh in parts_with_shares(cluster(16), graph)]
    assert found == [(12, (12,)), (12, (2, 6)), (8, (8,)), (8, (2, 4)), (1, (1,))]


def test_a_width_that_divides_gives_all_devices_work() -> None:
    assert _plan(7, 8, 448).idle is None


def test_where_memory_is_short_fewer_devices_can_be_the_only_way() -> None:
    """Weights of 2048 x 2048 have no 7 slices."""
    where = cluster(7, link_bytes_per_s=1e12, memory_bytes=2**28)
    plan = Planner(where, every_choice).plan(mlp(8, 2048, 2048), compared=False)
    assert plan.prediction.memory.total_bytes <= plan.report.limit_bytes
    assert plan.idle is not None
    assert plan.idle.reason == "the batch of 8 does not divide among 7, and on all of them no plan fits"


def test_a_mesh_of_fewer_devices_leaves_the_others_idle() -> None:
    planner = Planner(Cluster.preset("dgx-h100", 3, 7), every_choice)
    plan = planner.plan(mlp(), mesh=Mesh.of(x=2, y=4), compared=False)
    assert plan.idle == Idle("dgx-h100", 13, "a mesh of 8 was asked for")
    assert [level.size for level in plan.cluster.levels] == [4, 2]
    with pytest.raises(
        PlanError, match=r"mesh \[x=16\] has 16 devices: of cluster dgx-h100 \(3 × 7\), no equal shares"
    ):
        planner.plan(mlp(), mesh=Mesh.of(x=16))


def test_a_file_may_compare_with_all_devices_only_where_some_are_idle() -> None:
    plan = _plan(7, 8)
    with pytest.raises(PlanError, match=r"alternatives\[\d\].mesh: \[x=7\] has 7 devices, the cluster 4"):
        Plan.from_json(replace(plan, idle=None).to_json())
