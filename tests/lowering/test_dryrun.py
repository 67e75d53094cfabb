"""The dry run: it sends what ranks send, holds what they hold, and what differs from the prediction is told."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch.distributed as dist

from shardwright.cost.predict import predict
from shardwright.lowering.dryrun import dry_run
from shardwright.pcg.graph import Graph
from shardwright.pcg.layout import Layout, Layouts, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.reports.dryrun import DryRunReport
from shardwright.search.plan import Plan, SearchReport
from tests.each import each
from tests.lowering.parallelize import follow, parallelize
from tests.search.graphs import cluster, mlp

GRID = Mesh.of(dp=2, tp=2)


def planned(graph: Graph) -> Plan:
    """A plan for the graph, with its prediction."""
    where = cluster(graph.mesh.num_devices)
    return Plan(graph, where, "test", "", predict(graph, where), (), SearchReport(0.0, 1, 0.0, 1 << 60))


def report(graph: Graph, rank: int = 0) -> DryRunReport:
    return DryRunReport(planned(graph), dry_run(graph, rank))


def layered(mesh: Mesh, *, zero: str = "", tensor: str = "") -> Graph:
    """Four layers: the batch along all axes but `tensor`, along which weights are split; stored in slices on `zero`."""
    serial = mlp(batch=1024, width=512, hidden=2048, layers=4, residual=True)

    def stored(name: str, own: Layout) -> Layouts:
        """Along each axis; a weight that is split both ways is so along two dimensions."""
        other = S(1 - own.dim if tensor else 0)
        return tuple(own if axis == tensor else other if axis == zero else R for axis in mesh.names)

    leaves = [str(leaf.attr("target")) for leaf in serial.leaves("parameter")]
    storage = {name: stored(name, S(0) if name.endswith("up") else S(1)) for name in leaves}
    data = tuple(i for i, axis in enumerate(mesh.names) if axis != tensor)
    storage["x"] = tuple(S(0, prod(mesh.sizes[:i])) if i in data else R for i in range(len(mesh)))
    return parallelize(serial, mesh, follow(serial, mesh, data), storage)


PLANS: dict[str, Callable[[], Graph]] = {
    "data": lambda: layered(Mesh.of(dp=4)),
    "zero": lambda: layered(Mesh.of(dp=8), zero="dp"),
    "data and tensor": lambda: layered(Mesh.of(dp=8, tp=8), tensor="tp"),
    "hybrid": lambda: layered(Mesh.of(dp=8, zero=8), zero="zero"),
    "zero and tensor": lambda: layered(Mesh.of(dp=8, tp=8), zero="dp", tensor="tp"),
}


@each("name", PLANS)
def test_the_prediction_is_what_runs(name: str) -> None:
    found = report(PLANS[name]())
    assert found.findings == [], str(found)
    assert sum(found.run.messages.values()) > 3, str(found)
    assert not dist.is_initialized()
