"""What the matrix plans: the layouts that every model is run under, and the clusters that they are planned for."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster, CollectiveLine, Level
from shardwright.cost.clusters.device import Device
from shardwright.cost.clusters.local import default_cluster
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.search.check import check_plan
from shardwright.search.plan import Plan
from shardwright.search.planner import Planner
from shardwright.search.restrict import DATA, TENSOR, ZERO
from shardwright.verifier.choices import Certified

CERTIFIED = Certified()
"""The choices that carry a certificate; nothing else enters a plan."""


@dataclass(frozen=True)
class Case:
    """One column of the matrix: forced roles on a mesh, or, where there are none, the search's own choice."""

    name: str
    num_ranks: int
    mesh: Mesh | None = None
    roles: tuple[str, ...] | None = None
    fast_links: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.num_ranks} ranks"

    @property
    def cluster(self) -> Cluster:
        return fast_links(self.num_ranks) if self.fast_links else default_cluster(self.num_ranks)

    def plan(self, graph: Graph, model: str) -> Plan:
        """The plan of a serial graph for this case, from a fresh planner, and proven to be that graph's."""
        plan = Planner(self.cluster, CERTIFIED).plan(graph, model, mesh=self.mesh, roles=self.roles)
        check_plan(plan, graph)
        return plan


def fast_links(num_ranks: int) -> Cluster:
    """Slow devices on links that cost nothing, so that even a tiny model is worth splitting everywhere."""
    device = Device("slow", 2**33, 1e8, {"fp32": 1e8}, 1.0, 0.0, "cpu")
    lines = tuple(CollectiveLine(c, num_ranks, 0.0, 1e-18) for c in COLLECTIVES) if num_ranks > 1 else ()
    return Cluster("fast links", device, (Level("rank", num_ranks, 1e18, 0.0),), "gloo", "made up", lines)


def forced(num_ranks: int) -> tuple[Case, ...]:
    """Data parallel, ZeRO-3 and tensor parallel on one axis."""
    return (
        Case("data", num_ranks, Mesh(("dp",), (num_ranks,)), (DATA,)),
        Case("zero", num_ranks, Mesh(("dp",), (num_ranks,)), (ZERO,)),
        Case("tensor", num_ranks, Mesh(("tp",), (num_ranks,)), (TENSOR,)),
    )


def single() -> Case:
    """One device, with nothing to divide."""
    return Case("one rank", 1)


def searched(num_ranks: int) -> tuple[Case, ...]:
    """The search's own plans: for this machine, and for links that cost nothing."""
    return (Case("searched", num_ranks), Case("searched (fast links)", num_ranks, fast_links=True))


TWO_AXES = (
    Case("data × tensor", 4, Mesh(("dp", "tp"), (2, 2)), (DATA, TENSOR)),
    Case("zero × tensor", 4, Mesh(("dp", "tp"), (2, 2)), (ZERO, TENSOR)),
)
CASES = (*forced(2), *searched(2), *forced(4), *TWO_AXES, *searched(4))
