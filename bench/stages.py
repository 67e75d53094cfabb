"""Plans with pipeline stages beside the best of a grid: stages × tensor × data parallel × microbatches × schedules.

The grid is what people set up by hand, and knows nothing of the search over stages: each stage has a mesh of data
parallel, or ZeRO, outside and tensor parallel of up to 8 devices inside, with the layouts of the fastest sum of these
roles. To each belong all numbers of microbatches from that of the stages on, the lifetimes of gathered weights, the
kinds of recomputation and the orders of microbatches. The timeline costs them all, blocks spread by what each takes.

    python -m bench.stages [--only TEXT]    prints a table; 1 where a plan is slower than the best of its grid
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch

from bench.grid_cases import llama
from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.recompute import RECOMPUTES
from shardwright.search.exact.folding import fold
from shardwright.search.exact.solving import Candidate, Solver, over_time
from shardwright.search.request.restrict import DATA, TENSOR, ZERO
from shardwright.search.request.spaces import batch_size, degrees, microbatch_counts
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified

MODELS = {
    "Llama-0.5B": llama(1024, 16, 4096, 16, batch=32, seq=2048),
    "Llama-1B": llama(2048, 16, 8192, 32, batch=64, seq=2048),
    "Llama-1B, batch 512": llama(2048, 16, 8192, 32, batch=512, seq=2048),
    "deep, 96 layers": llama(1024, 96, 4096, 16, batch=64, seq=1024),
    "Llama-8B": llama(4096, 32, 14336, 32, batch=64, seq=2048),
    "Llama-13B": llama(5120, 40, 13824, 40, batch=128, seq=2048),
    "Llama-70B": llama(8192, 80, 28672, 64, batch=64, seq=4096),
}
CLUSTERS = {
    "Llama-0.5B": (("rtx-4090-box", 1), ("rtx-4090-box", 2), ("a10-box", 2), ("l40s-box", 2), ("rtx-4090-box", 4)),
    "Llama-1B": (
        ("rtx-4090-box", 1), ("rtx-4090-box", 2), ("a10-box", 2), ("l40s-box", 2), ("dgx-h100", 1), ("dgx-a100", 2),
        ("rtx-4090-box", 8),
    ),
    "Llama-1B, batch 512": (("rtx-4090-box", 4), ("rtx-4090-box", 8), ("l40s-box", 8)),
    "deep, 96 layers": (("rtx-4090-box", 1), ("a10-box", 2), ("rtx-4090-box", 4), ("dgx-h100", 1)),
    "Llama-8B": (
        ("l40s-box", 2), ("l40s-box", 4), ("rtx-4090-box", 4), ("dgx-h100", 1), ("dgx-h100", 2), ("dgx-a100", 2),
        ("rtx-4090-box", 8),
    ),
    "Llama-13B": (("l40s-box", 4), ("dgx-a100", 2), ("dgx-h100", 2), ("rtx-4090-box", 8)),
    "Llama-70B": (("dgx-h100", 8), ("dgx-a100", 8)),
}  # fmt: skip
CASES = [(model, preset, nodes) for model, clusters in CLUSTERS.items() for preset, nodes in clusters]
MOST_TENSOR, MOST_STAGES = 8, 16
_CHUNKS = (2, 4)
_FAR = 1.3
"""Where 1F1B takes so many times as long as the best way, other orders of the same are left out."""


class Way(NamedTuple):
    """A cell of the grid, but for the lifetime of gathered weights and the order."""

    stages: int
    mesh: Mesh
    roles: tuple[str, ...]


def ways(cluster: Cluster) -> Iterator[Way]:
    """Every way to share the devices among stages, and those of each among data and tensor parallel."""
    n = cluster.num_devices
    for stages in (1, *(p for p in degrees(n) if p <= MOST_STAGES)):
        own = n // stages
        for tensor in (1, *(t for t in degrees(own) if t <= MOST_TENSOR)):
            for data in (DATA, ZERO) if own > tensor else (DATA,):
                yield Way(stages, Mesh(("dp", "tp"), (own // tensor, tensor)), (data, TENSOR))


class Grid:
    """The best way, found by trying all of them."""

    def __init__(self, graph: Graph, cluster: Cluster) -> None:
        self.folded, self.solver, self.size = fold(graph), Solver(cluster, Certified()), batch_size(graph)
        self.best, self.num_costed = (inf, ""), 0
        self.ideal_s = sum(self.solver.work_s(self.folded, Execution()).values()) / cluster.num_devices

    def run(self) -> tuple[float, str]:
        """Seconds and words of the best one."""
        for way in ways(self.solver.cluster):
            for many in microbatch_counts(self.size):
                if many >= way.stages and self.size // many % way.mesh.sizes[0] == 0:
                    self._try(way, many)
        return self.best

    def _try(self, way: Way, many: int) -> None:
        """Cost the lifetimes and modes of a way; skip those that are slower than one that fits, or idle too long."""
        if self.ideal_s * (1 + (way.stages - 1) / (many * max(_CHUNKS))) >= self.best[0]:
            return
        for zero in ("zero-1", "zero-2", "zero-3") if ZERO in way.roles else ("zero-1",):
            for mode in RECOMPUTES:
                try:
                    fits = self._costed(way, many, zero, Execution.of(recompute=mode, num_stages=way.stages))
                except PlanError:
                    continue
                if fits:
                    break
            else:
                continue
            if mode == "none":
                break

    def _costed(self, way: Way, many: int, zero: Zero, run: Execution) -> bool:
        found = self.solver.solve(
            self.folded, over_time(way.mesh, many), way.roles, "grid", run, (zero,), zero, cutoff_s=0.0
        )
        self._take(found, run, way, many, zero)
        if way.stages > 1 and found.prediction.step_s < _FAR * self.best[0]:
            self._take(found, run.having(schedule="zero-bubble"), way, many, zero)
            for chunks in _CHUNKS if many % way.stages == 0 else ():
                self._take(found, run.having(schedule="interleaved", chunks_per_stage=chunks), way, many, zero)
        return found.fits

    def _take(self, found: Candidate, run: Execution, way: Way, many: int, zero: Zero) -> None:
        try:
            prediction = self.solver.predicted(found.graph, run, self.folded.repeats)
        except PlanError:  # fewer blocks than chunks
            return
        self.num_costed += 1
        if self.solver.fits(prediction) and prediction.step_s < self.best[0]:
            words = f"{way.stages} stages, {way.mesh} {'/'.join(way.roles)}, {many} microbatches, {zero}"
            self.best = (
                prediction.step_s,
                f"{words}, {run.recompute}, {run.schedule.name} × {run.schedule.chunks_per_stage}",
            )


def main(arguments: list[str] | None = None) -> int:
    """Compare; 1 where a plan is slower."""
    parser = argparse.ArgumentParser(prog="python -m bench.stages", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT", help='cases that hold it, as "Llama-1B, 2 × l40s-box"')
    only, slower = parser.parse_args(arguments).only, 0
    torch.set_num_threads(1)
    certified, graphs = Certified(), dict[str, Graph]()
    for model, preset, nodes in CASES:
        name = f"{model}, {nodes} × {preset}"
        if only not in name:
            continue
        if model not in graphs:
            graphs[model] = capture(*MODELS[model]()).graph
        graph, cluster = graphs[model], Cluster.preset(preset, nodes=nodes)
        times = [time.process_time()]
        grid = Grid(graph, cluster)
        grid_s, words = grid.run()
        times.append(time.process_time())
        planner = Planner(cluster, certified, rules=certified.by_name())
        plain = planner.plan(graph, stages=1)
        times.append(time.process_time())
        plan = Planner(cluster, certified, rules=certified.by_name()).plan(graph, stages="auto")
        times.append(time.process_time())
        own, run = plan.prediction.step_s, plan.execution
        slower += own > grid_s * (1 + 1e-9)
        print(
            f"{name}: plan {own * 1e3:.1f} ms ({run.schedule.num_stages} stages of {plan.mesh}, {run.schedule.name} × "
            f"{run.schedule.chunks_per_stage}), without stages {plain.prediction.step_s * 1e3:.1f} ms; "
            f"grid {grid_s * 1e3:.1f} ms ({words}; {grid.num_costed} costed); CPU: grid, plain, plan "
            f"{', '.join(f'{b - a:.0f} s' for a, b in pairwise(times))}",
            flush=True,
        )
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
