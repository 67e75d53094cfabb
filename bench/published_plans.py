"""Published runs as plans of this project: captured, laid out as they were run, and how each step was executed.

The model is captured with one block for all (`bench.decoders`), the exact search lays it out on the mesh of one
pipeline stage within the roles that the run's parallelism allows, and `Execution` says the rest. Nothing here knows a
time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from bench.decoders import BLOCK, DECODERS, Decoder, captured
from bench.published import Run
from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Solver
from shardwright.search.request.asked import LayoutPin, parse
from shardwright.search.request.limits import NO_LIMITS, Limits
from shardwright.search.request.restrict import CONTEXT, DATA, TENSOR, ZERO
from shardwright.verifier.choices import Certified

MACHINES = {"h100": "dgx-h100", "a100-80": "dgx-a100", "a100-40": "dgx-a100-40"}
"""The presets of the machines: 8 GPUs; llm-foundry's A100 nodes have 1600 Gb/s networks, as these presets have."""
GPUS_PER_NODE = 8
CONTEXT_WHOLE = [pin for pin in parse("*=cp:whole") if isinstance(pin, LayoutPin)]
"""Megatron's ranks that share a sequence have whole weights."""


@dataclass(frozen=True)
class Planned:
    """A published run, ready to be predicted: the parallel graph of one microbatch on the mesh of one stage."""

    run: Run
    graph: Graph
    execution: Execution

    @property
    def repeats(self) -> dict[str, int]:
        return {BLOCK: decoder(self.run).layers}

    @property
    def cluster(self) -> Cluster:
        return cluster(self.run.gpu, self.run.num_gpus)


def decoder(run: Run) -> Decoder:
    """The sizes of a run's model."""
    return DECODERS[run.model.split(" ")[0]]


def cluster(gpu: str, num_gpus: int) -> Cluster:
    """Whole machines, or a part of one."""
    nodes = max(1, num_gpus // GPUS_PER_NODE)
    return Cluster.preset(MACHINES[gpu], nodes, min(num_gpus, GPUS_PER_NODE))


def mesh_and_roles(run: Run) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh of one stage, the tensor-parallel axis innermost; every axis of one device is left out."""
    data = ZERO if run.sharding in ("FULL_SHARD", "SHARD_GRAD_OP") else DATA
    axes = [("dp", run.data, data), ("cp", run.context, CONTEXT), ("tp", run.tensor, TENSOR)]
    used = [axis for axis in axes if axis[1] > 1]
    return Mesh(tuple(n for n, _, _ in used), tuple(s for _, s, _ in used)), tuple(role for _, _, role in used)


def execution(run: Run) -> Execution:
    """Return the execution of a run. llm-foundry ran eagerly; Megatron fuses what is pointwise."""
    megatron = run.table == "Megatron-Bridge"
    return Execution.of(
        precision=run.precision,
        compiled=megatron,
        recompute="full" if run.recompute else "none",
        num_microbatches=run.num_microbatches,
        num_stages=run.stages,
        chunks_per_stage=run.chunks,
        schedule="interleaved" if run.chunks > 1 else "1f1b",
        shard_optimizer=run.sharding == "OPTIMIZER",
        late_gathers=run.late_gathers,
    )


def planned(run: Run, certified: Certified) -> Planned:
    """Capture and lay out one run."""
    serial = captured(decoder(run), run.data * run.microbatch, run.seq, even=run.context > 1)
    mesh, roles = mesh_and_roles(run)
    solver, whole = Solver(cluster(run.gpu, mesh.num_devices), certified), Limits(tuple(CONTEXT_WHOLE))
    limits = whole if run.context > 1 else NO_LIMITS
    return Planned(run, solver.solve(Folded(serial), mesh, roles, run.name, limits=limits).graph, execution(run))


def all_planned(runs: Iterable[Run]) -> list[Planned]:
    """Every run, on all cores; capture takes most of the time."""
    with ProcessPoolExecutor(os.cpu_count(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(_planned, runs, chunksize=4))


def _planned(run: Run) -> Planned:
    return planned(run, Certified())
