"""Measure how long it takes to cost one plan: a model like Llama-405B on 16,384 GPUs, and the same block on 8.

Three figures. *Costs*: every operator, collective and update of a candidate's graph, whose sum is what the search
compares. *Timeline*: the same candidate run, from its graph to stages, schedule and memory over time; a graph with
other layouts, mesh or precision shares nothing with those before it. *Again*: the timeline of one that differs in its
microbatches alone, and shares their pieces (`Programs`).

The model is captured with one block, on fake tensors, and planned once as data × tensor parallel; `repeats` makes 126
blocks of it. Seconds are CPU time of this process, which other processes do not change, at the median of several
rounds:

    python -m bench.timeline
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

from torch import Tensor, nn

from bench.search import fake_llama
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.predict import node_costs
from shardwright.cost.timeline.program import Programs, program
from shardwright.cost.timeline.steps import Steps
from shardwright.cost.timeline.timeline import simulate
from shardwright.cost.timeline.trace import trace
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.reports.units import percent, seconds, size
from shardwright.search.request.restrict import DATA, TENSOR
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified

BLOCK, NUM_BLOCKS = "model.layers.0", 126
ROUNDS = 9


def llama_405b(batch: int, seq: int = 8192) -> tuple[nn.Module, dict[str, Tensor]]:
    """transformers' Llama with the sizes of Llama-3.1-405B and one block, in bf16 on fake tensors."""
    return fake_llama(batch, seq, num_hidden_layers=1, hidden_size=16384, intermediate_size=53248,
                      num_attention_heads=128)  # fmt: skip


def planned(data: int, tensor: int) -> Graph:
    """The graph of one block, one sequence per data-parallel rank, typed on the mesh of one stage."""
    model, batch = llama_405b(data)
    cluster = Cluster.preset("dgx-h100", nodes=max(1, data * tensor // 8))
    mesh = Mesh(("dp", "tp"), (data, tensor))
    return Planner(cluster, Certified()).solve(capture(model, batch).graph, mesh, (DATA, TENSOR), "bench").graph


def cpu_s(what: Callable[[], object]) -> float:
    """Median CPU seconds."""
    taken: list[float] = []
    for _ in range(ROUNDS):
        gc.collect()
        start = time.process_time()
        what()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def report(name: str, graph: Graph, nodes: int, execution: Execution) -> None:
    """Print what costing takes, and what comes out."""
    cluster, repeats = Cluster.preset("dgx-h100", nodes=nodes), {BLOCK: NUM_BLOCKS}
    made = program(graph, cluster, execution, repeats)
    found = simulate(made)
    costs_s = cpu_s(lambda: node_costs(Steps(graph, cluster, DEFAULT)))
    first_s = cpu_s(lambda: simulate(program(graph, cluster, execution, repeats)))
    programs = Programs(graph, cluster, repeats)
    counts = iter(range(execution.assumed.num_microbatches, 10_000))
    again_s = cpu_s(lambda: simulate(programs.program(execution.having(num_microbatches=next(counts)))))
    trace_s = cpu_s(lambda: trace(found))
    busiest, fullest = found.busiest, found.fullest
    print(f"{name}: costs {seconds(costs_s)}, timeline {seconds(first_s)}, again with another number of microbatches "
          f"{seconds(again_s)}, trace {seconds(trace_s)}")  # fmt: skip
    print(f"  step {seconds(found.step_s)}, compute {percent(busiest.compute_s / found.step_s)}, exposed "
          f"{percent(busiest.exposed_s / found.step_s)}, bubble {percent(busiest.bubble_s / found.step_s)}, "
          f"peak {size(fullest.memory.total_bytes)}: {fullest.peak_at}")  # fmt: skip


def main() -> None:
    """Measure both sizes."""
    large = Execution.of("amp_bf16", compiled=True, num_stages=16, num_microbatches=16, shard_optimizer=True,
                      recompute="full")  # fmt: skip
    small = Execution.of("amp_bf16", compiled=True, num_microbatches=16, shard_optimizer=True, recompute="full")
    wide, narrow = planned(128, 8), planned(1, 8)
    report("16,384 GPUs, 16 stages of dp 128 × tp 8", wide, 2048, large)
    report("8 GPUs, 1 stage of dp 1 × tp 8", narrow, 1, small)


if __name__ == "__main__":
    main()
