"""Compare the searched plan with the best of a grid: mesh × microbatches × lifetimes × recomputation, brute force.

The grid is what people set up by hand, enumerated here and costed by the timeline. On meshes of one or two axes each
axis has a role of its own: data parallel, ZeRO (inside or outside of it), and innermost tensor parallel of up to 8
devices, context parallel, or, of a mixture of experts, expert parallel. To each belong all numbers of microbatches
that leave every device whole examples, the lifetimes of gathered weights, and the kinds of recomputation. Roles leave
an axis of data no choice; a tensor parallel one has the layouts of the fastest sum, whatever memory they take. Equal
blocks are folded and laid out alike.

A way is left out only where it cannot be the best one that fits, whatever its layouts. It computes for as long as all
operators take in their fastest choice. When its forward ends, it holds weights and moments, and all activations that
backward needs, each in its smallest choice; before the update, gradients too. So those are left out that compute for
longer than the best way by then takes, and those that hold more than there is.

    python -m bench.grid [--only TEXT]      what is missing of the grid and the plans; writes the page
    python -m bench.grid --grid-only        what is missing of the grid
    python -m bench.grid --planner-only     plans again, against the grid as it is kept
    python -m bench.grid --page             writes docs/search.md of what is kept

Results are kept in bench/data/grid.jsonl as they come, so what was interrupted goes on where it was. Beside each plan
the best way of its grid is costed again: where that is no longer what it was, costs have changed, and the page says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from math import inf, prod
from typing import NamedTuple

import torch

from bench import grid_page
from bench.grid_cases import CASES, Case
from bench.grid_store import Cell, Found, Key, Kind, kept, write
from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero
from shardwright.pcg.step.recompute import RECOMPUTES, Recompute
from shardwright.pcg.step.time import check_time
from shardwright.search.exact.folding import Folded, fold
from shardwright.search.exact.solving import Candidate, Solver, over_time
from shardwright.search.plan import most_frequent
from shardwright.search.request.restrict import CONTEXT, DATA, EXPERT, TENSOR, ZERO
from shardwright.search.request.spaces import batch_size
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified

BOUND = 0.03
"""How much slower than the best of the grid a plan may be."""
SETUPS = (
    (DATA,), (ZERO,), (TENSOR,), (CONTEXT,), (EXPERT,), (DATA, ZERO), (ZERO, DATA), (DATA, TENSOR), (ZERO, TENSOR),
    (ZERO, CONTEXT), (DATA, EXPERT), (ZERO, EXPERT),
)  # fmt: skip
"""Roles of the axes of a mesh, the outermost first."""
MOST_TENSOR = 8
_GRADIENT = 1 / 4
"""The gradient's share of what is stored of a weight: beside itself and two moments, all in one dtype."""


_SURE = 0.6
"""Of the bytes that are held at least: the problem counts values twice that share memory, as those of attention."""


class Way(NamedTuple):
    """A cell of the grid, but for the lifetime of gathered weights. `devices`: their mesh, without time."""

    devices: Mesh
    roles: tuple[str, ...]
    recompute: Recompute
    num_microbatches: int = 1

    @property
    def mesh(self) -> Mesh:
        return over_time(self.devices, self.num_microbatches)

    @property
    def execution(self) -> Execution:
        return Execution(recompute=self.recompute)

    @property
    def zeros(self) -> Sequence[Zero]:
        """The lifetimes that differ: of what is stored in slices; with one microbatch it is kept, or gathered again."""
        if ZERO not in self.roles:
            return ("zero-3",)
        return ZEROS if self.num_microbatches > 1 else ("kept", "zero-3")


def ways(num_devices: int, batch: int) -> Iterator[Way]:
    """The whole grid; the smaller degrees of tensor parallelism first."""
    pairs = [(n, num_devices // n) for n in range(2, num_devices // 2 + 1) if num_devices % n == 0]
    axes = [(sizes, roles) for sizes in ((num_devices,), *pairs) for roles in SETUPS if len(roles) == len(sizes)]
    for sizes, roles in sorted(axes, key=lambda axis: _degree(axis, TENSOR)):
        if TENSOR in roles and sizes[-1] > MOST_TENSOR:
            continue
        mesh, degree = Mesh(tuple("xy"[: len(sizes)]), sizes), _degree((sizes, roles), DATA, ZERO, EXPERT)
        counts = [n for n in range(1, batch // degree + 1) if batch % (n * degree) == 0]
        for mode, count in product(RECOMPUTES, reversed(counts)):
            yield Way(mesh, roles, mode, count)


def _degree(axes: tuple[Sequence[int], Sequence[str]], *wanted: str) -> int:
    return prod(size for size, role in zip(*axes, strict=True) if role in wanted)


class Floor(NamedTuple):
    """Lower bounds for all layouts of a way: seconds of compute, and bytes of memory."""

    computes_s: float
    holds_bytes: float


class Grid:
    """Costs the ways of one graph on one cluster.

    Attributes:
        best: of those that fit, by now; `zero`: its lifetime of gathered weights.
        num_ways, num_costed: how many there are with their lifetimes, and how many the timeline has costed.
        of_the_batch: values that depend on it; what is made of weights alone may be made once a step, or not kept.
    """

    def __init__(self, folded: Folded, solver: Solver) -> None:
        self.folded, self.solver = folded, solver
        self.best: Candidate | None = None
        self.zero: Zero = "zero-3"
        self.num_ways = self.num_costed = 0
        self.floor = cache(self._floor)
        self.of_the_batch = set[str]()
        for node in folded.graph.nodes:
            if node.op == "input" or not self.of_the_batch.isdisjoint(node.inputs):
                self.of_the_batch.add(node.name)

    @property
    def best_s(self) -> float:
        return inf if self.best is None else self.best.prediction.step_s

    def run(self) -> Candidate | None:
        """The best way of the grid that fits."""
        mixed = any(node.row is not None and node.row.sends for node in self.folded.graph.nodes)
        for way in ways(self.solver.cluster.num_devices, batch_size(self.folded.graph)):
            if EXPERT in way.roles and not mixed:
                continue
            self.num_ways += len(way.zeros)
            if not self._is_hopeless(way):
                self._try(way)
        return self.best

    def _try(self, way: Way) -> None:
        for zero in way.zeros:
            try:
                found = solve(self.folded, self.solver, way, zero)
                check_time(found.graph, way.execution)
            except PlanError:  # no layouts of these roles, statistics over the batch
                return
            self.num_costed += 1
            step = Floor(found.prediction.step_s, found.prediction.memory.total_bytes)
            if any(mine < least for mine, least in zip(step, self.floor(way), strict=True)):
                raise AssertionError(f"{way}: {step}, below {self.floor(way)}")
            if found.fits and found.prediction.step_s < self.best_s:
                self.best, self.zero = found, zero

    def _is_hopeless(self, way: Way) -> bool:
        """True if a way cannot win. More microbatches compute longer; n devices longer than 1/n of the time of one."""
        alone = Way(Mesh(("x",), (1,)), (DATA,), way.recompute)
        if self.floor(alone).computes_s / self.solver.cluster.num_devices >= self.best_s:
            return True
        if self.floor(way._replace(num_microbatches=1)).computes_s >= self.best_s:
            return True
        return self.floor(way).computes_s >= self.best_s or self.floor(way).holds_bytes > self.solver.limit_bytes

    def _floor(self, way: Way) -> Floor:
        try:
            problem, _ = self.solver.problem(self.folded, way.mesh, way.roles, way.execution, "zero-3")
        except PlanError:  # no attention
            return Floor(inf, inf)
        computes_s = stored_bytes = kept_bytes = 0.0
        for (kind, name), number in problem.index.items():
            time_s, least_bytes = (float(t[number].value.min()) for t in (problem.time_s, problem.kept_bytes))
            if kind == "storage":
                computes_s, stored_bytes = computes_s + time_s, stored_bytes + least_bytes
            elif name in self.of_the_batch:
                computes_s, kept_bytes = computes_s + time_s, kept_bytes + least_bytes
        holds_bytes = _SURE * max(stored_bytes, (1 - _GRADIENT) * stored_bytes + kept_bytes)
        return Floor(computes_s, holds_bytes + self.solver.cluster.device.context_bytes)


def solve(folded: Folded, solver: Solver, way: Way, zero: Zero) -> Candidate:
    """A way with one lifetime of gathered weights. A `PlanError` where it has no layouts, or nothing to make again."""
    return solver.solve(folded, way.mesh, way.roles, "grid", way.execution, (zero,), zero, cutoff_s=0.0)


def grid(graph: Graph, cluster: Cluster) -> Found:
    """The best way of the grid."""
    searched = Grid(fold(graph), Solver(cluster, Certified()))
    start = time.process_time()
    best = searched.run()
    cpu_s = round(time.process_time() - start, 1)
    if best is None:
        return Found("nothing fits", None, cpu_s, None, searched.num_ways, searched.num_costed)
    mesh, mode = dict(zip(best.mesh.names, best.mesh.sizes, strict=True)), best.execution.recompute
    assert isinstance(mode, str)
    cell = Cell(mesh, best.roles, searched.zero, mode)
    return Found(cell.words, best.prediction.step_s, cpu_s, cell, searched.num_ways, searched.num_costed)


def plan(graph: Graph, cluster: Cluster, cell: Cell | None) -> Found:
    """Return the planner's plan, and the time of the grid's best way under the same costs."""
    planner = Planner(cluster, certified := Certified(), rules=certified.by_name())
    start = time.process_time()
    plan = planner.plan(graph)
    cpu_s = round(time.process_time() - start, 1)
    grid_s = None if cell is None else step_s(fold(graph), Solver(cluster, Certified()), cell)
    if plan.prediction.memory.total_bytes > planner.limit_bytes:
        return Found("nothing fits", None, cpu_s, grid_s=grid_s)
    mode, mesh = plan.execution.recompute, dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    again = [] if mode == "none" else [f"{mode} recomputation" if isinstance(mode, str) else "recomputation by block"]
    kind = mode if isinstance(mode, str) else "by block"
    way = ", ".join([str(plan.mesh), *most_frequent(plan.graph), *again])
    bound_gap = plan.prediction.step_s / plan.report.bound_s - 1 if plan.report.bound_s else None
    return Found(way, plan.prediction.step_s, cpu_s, grid_s=grid_s, mesh=mesh, recompute=kind, bound_gap=bound_gap)


def step_s(folded: Folded, solver: Solver, cell: Cell) -> float:
    """Return the seconds of a step in one way of the grid."""
    mesh = Mesh.of(**cell.mesh)
    devices = Mesh.of(**{name: size for name, size in cell.mesh.items() if name != TIME})
    way = Way(devices, tuple(cell.roles), cell.recompute, mesh.num_microbatches)
    return solve(folded, solver, way, cell.zero).prediction.step_s


def missing(case: Case, only: str, results: Mapping[Key, Found], kinds: Sequence[Kind]) -> list[tuple[Key, Cluster]]:
    """Return a case's missing results: the grid, then the plan, which is made anew where nothing else is wanted."""
    todo = list[tuple[Key, Cluster]]()
    for preset, machines in case.clusters:
        where = f"{machines} × {preset}"
        keys = [Key("grid", case.name, where), Key("plan", case.name, where)]
        if only in f"{case.name}, {where}":
            cluster = Cluster.preset(preset, nodes=machines)
            if kinds == ("plan",):
                todo += [(key, cluster) for key in keys[1:] if keys[0] in results]
            else:
                todo += [(key, cluster) for key in keys if key.kind in kinds and key not in results]
    return todo


def main(arguments: Sequence[str] | None = None) -> int:
    """Find what is asked for; 1 where a plan is further from the best of the grid than it may be."""
    parser = argparse.ArgumentParser(prog="python -m bench.grid", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", default="", metavar="TEXT", help='cases that hold it, as "Llama-70B, 8 × dgx-h100"')
    parser.add_argument("--grid-only", action="store_const", dest="kinds", const=("grid",), help="plan nothing")
    parser.add_argument("--planner-only", action="store_const", dest="kinds", const=("plan",),
                        help="plan again, keep the grid")  # fmt: skip
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for case in [] if options.page else CASES:
        if not (todo := missing(case, options.only, kept(), options.kinds or ("grid", "plan"))):
            continue
        model, batch = case.build()
        graph = capture(model, batch, precision=case.precision).graph
        for key, cluster in todo:
            found = grid(graph, cluster) if key.kind == "grid" else plan(graph, cluster, kept()[key.of_grid].cell)
            write({**kept(), key: found})
            print(f"{key}: {found}", flush=True)
    rows = grid_page.rows(kept())
    grid_page.write(rows, BOUND)
    return int(any(row.gap > BOUND for row in rows))


if __name__ == "__main__":
    sys.exit(main())
