"""Memory that no tensor is in: the driver's, and that of the library's connections."""

from __future__ import annotations

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.buffers import axes_bytes, stages_bytes
from shardwright.cost.timeline.program import Programs, program
from shardwright.cost.timeline.timeline import SLACK, simulate
from shardwright.pcg.step.execution import Execution
from tests.cost.programs import planned
from tests.each import each
from tests.search.graphs import cluster

STAGES = [1, 2, 4]


@each("stages", STAGES)
@each("role", ["data", "zero", "tensor"])
def test_every_stage_has_its_context_and_its_connections(role: str, stages: int) -> None:
    graph, gpus = planned(role, 6), Cluster.preset("dgx-h100", 2)
    run = Execution.of(num_stages=stages, num_microbatches=stages)
    connections = axes_bytes(graph, gpus) + stages_bytes(gpus, stages, 4)
    assert 0 < axes_bytes(graph, gpus) <= connections
    for stage in simulate(program(graph, gpus, run)).stages:
        memory = stage.memory
        assert memory.context_bytes == gpus.device.context_bytes > 0
        assert memory.communication_bytes == connections
        allocated = memory.total_bytes - memory.slack_bytes - memory.context_bytes - memory.communication_bytes
        assert memory.slack_bytes == pytest.approx(SLACK["cuda"] * allocated, abs=1)


def test_stages_of_several_kinds_have_their_own() -> None:
    """The links inside each stage are its own; those between them are the cluster's."""
    graph, mixed = planned("data", 6), Cluster.mixed([("dgx-h100", 1), ("dgx-a100", 1)])
    run = Execution.of(num_stages=4, num_microbatches=4)
    found = [stage.memory.communication_bytes for stage in simulate(program(graph, mixed, run)).stages]
    own = [axes_bytes(graph, mixed.part(range(first, first + 4))) for first in (0, 4, 8, 12)]
    assert own[0] == own[1] != own[2] == own[3]
    assert found == [num_bytes + stages_bytes(mixed, 4, 4) for num_bytes in own]


def test_programs_of_other_numbers_of_stages_do_not_share_connections() -> None:
    graph, gpus = planned("data", 6), Cluster.preset("dgx-h100", 2)
    programs = Programs(graph, gpus)
    for stages in (4, 2, 4):
        made = programs.program(Execution.of(num_stages=stages, num_microbatches=4))
        expected = axes_bytes(graph, gpus) + stages_bytes(gpus, stages, 4)
        assert [stage.state["communication"] for stage in made.stages] == [expected] * stages


def test_cpus_keep_neither() -> None:
    memory = simulate(program(planned("tensor", 3), cluster(4))).fullest.memory
    assert (memory.context_bytes, memory.communication_bytes) == (0, 0)
