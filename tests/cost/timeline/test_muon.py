"""What Muon's shared update adds to a step."""

from __future__ import annotations

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import details
from shardwright.cost.timeline.muon import NOTHING, orthogonalized
from shardwright.cost.timeline.program import Programs
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.execution import DEFAULT
from shardwright.search.tree.planner import Planner
from tests.search.graphs import every_choice, mlp

MUON = DEFAULT.assuming(optimizer="muon")
GPUS = Cluster.preset("dgx-h100", nodes=2)


def of(graph: Graph, times: int = 1) -> tuple[float, float, float]:
    found = orthogonalized(steps := Steps(graph, GPUS, MUON), dict.fromkeys(Steps(graph, GPUS, MUON).parameters, times))
    assert orthogonalized(Steps(graph, GPUS, DEFAULT), dict.fromkeys(steps.parameters, times)) == NOTHING
    return found.compute_s, sum(found.gather_s.values()), sum(found.return_s.values())


def planned(roles: str, mesh: dict[str, int]) -> Graph:
    return Planner(GPUS, every_choice).plan(mlp(64, 1024, 4096), mesh=mesh, roles=[roles] * len(mesh)).graph


def test_parts_are_gathered_and_whole_matrices_only_returned() -> None:
    sharded, whole = of(planned("zero", {"x": 16})), of(planned("data", {"x": 16}))
    peak_s = 5 * 2 * 1024**2 * (2 * 4096 + 1024) / GPUS.device.peak_flops_per_s("bf16")  # each rank has one, or none
    assert peak_s < sharded[0] == whole[0] < 3 * peak_s  # small matrices do not reach it
    assert sharded[1] > 0 == whole[1]
    assert whole[2] > 4 * sharded[2] > 0


def test_a_prediction_has_the_iterations_and_both_exchanges() -> None:
    programs = Programs(planned("zero", {"x": 16}), GPUS)
    own, adam = details(programs, MUON).prediction, details(programs, DEFAULT).prediction
    steps = programs.steps(MUON)
    found = orthogonalized(steps, dict.fromkeys(steps.parameters, 1))
    sgd = details(programs, DEFAULT.assuming(optimizer="momentum")).prediction  # with as many states of matrices
    assert own.communication_s == pytest.approx(adam.communication_s + found.exchange_s)
    assert own.optimizer_s >= sgd.optimizer_s + found.compute_s
    assert own.step_s >= sgd.step_s + found.compute_s + found.exchange_s
    assert own.communication_bytes == adam.communication_bytes + sum(found.exchanged)
