"""Programs of equal stages, and typed graphs of equal blocks, for tests of the timeline."""

from __future__ import annotations

from functools import cache

from shardwright.cost.clusters.device import Device
from shardwright.cost.timeline.segments import ChunkSegments, Stage, StepProgram
from shardwright.cost.timeline.tasks import COMPUTE, Buffer, Segment, Task
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.search.tree.planner import Planner
from tests.search.graphs import blocks, cluster, every_choice

DEVICE = Device("test", 2**40, 1e12, {"fp32": 1e12}, 1.0, 0.0, "cpu")


def uniform(execution: Execution, forward_s: float = 1.0, backward_s: float = 2.0, hop_s: float = 0.0) -> StepProgram:
    """Equal stages whose chunks keep one byte until backward has ended; where that has two parts, they are equal."""
    two = execution.schedule.name == "zero-bubble"
    forward = Segment((Task("f", COMPUTE, forward_s),), (Buffer("activations", 1, 0, ()),))
    given_back = (Buffer("activations", 1, None, (0,)),)
    first = Segment((Task("b", COMPUTE, backward_s / 2 if two else backward_s),), () if two else given_back)
    second = Segment((Task("w", COMPUTE, backward_s / 2),), given_back) if two else Segment()
    stage = Stage(
        tuple(ChunkSegments(f"chunk {c}", forward, first, second) for c in range(execution.schedule.chunks_per_stage)),
        {},
        Segment(),
        DEVICE,
    )
    num_virtual = execution.schedule.num_stages * execution.schedule.chunks_per_stage
    return StepProgram(execution, (stage,) * execution.schedule.num_stages, (hop_s,) * (num_virtual - 1))


@cache
def planned(role: str, layers: int = 1, num_devices: int = 4, link_bytes_per_s: float = 1e9) -> Graph:
    """An embedding, `layers` blocks and a loss, typed on one axis that keeps to a role."""
    planner = Planner(cluster(num_devices, link_bytes_per_s=link_bytes_per_s), every_choice)
    graph = blocks(batch=8, width=64, layers=layers, seq=8)
    return planner.solve(graph, Mesh.of(x=num_devices), (role,), "test").graph
