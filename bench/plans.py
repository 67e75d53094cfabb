"""What the matrix plans: the layouts that every model is run under, and the clusters that they are planned for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster, CollectiveLine, Level
from shardwright.cost.clusters.device import Device
from shardwright.cost.clusters.local import default_cluster
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.recompute import RECOMPUTES, Recompute, RecomputeByBlock
from shardwright.search.check import check_plan
from shardwright.search.plan import Plan
from shardwright.search.planner import Planner
from shardwright.search.restrict import DATA, TENSOR, ZERO
from shardwright.verifier.choices import Certified

CERTIFIED = Certified()
"""The choices that carry a certificate; nothing else enters a plan."""


@dataclass(frozen=True)
class Case:
    """One column of the matrix: forced roles on a mesh, or, where there are none, the search's own choice.

    Attributes:
        name: what it is called.
        num_ranks: of its mesh.
        mesh: with the axis of time, if a step has microbatches.
        roles: of its axes of devices.
        fast_links: whether links cost nothing.
        zero: how long gathered parameters stay; None: as long as the search says.
        recompute: what backward makes again; None: what the search says.
        double: in fp64, the weights after several steps compared as well.
    """

    name: str
    num_ranks: int
    mesh: Mesh | None = None
    roles: tuple[str, ...] | None = None
    fast_links: bool = False
    zero: Zero | None = None
    recompute: Recompute | RecomputeByBlock | None = None
    double: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.num_ranks} ranks"

    @property
    def cluster(self) -> Cluster:
        return fast_links(self.num_ranks) if self.fast_links else default_cluster(self.num_ranks)

    def suits(self, graph: Graph) -> bool:
        """Whether the model has what is to be made again: blocks, attention."""
        try:
            made_again(graph, Execution(recompute=self.recompute or "none"))
        except PlanError:
            return False
        return True

    def plan(self, graph: Graph, model: str) -> Plan:
        """The plan of a serial graph for this case, from a fresh planner, and proven to be that graph's."""
        planner = Planner(self.cluster, CERTIFIED)
        given = self.mesh is not None
        plan = planner.plan(
            graph, model, mesh=self.mesh, roles=self.roles, recompute=self.recompute, compared=not given
        )
        if self.zero is not None:
            leaves = plan.graph.leaves("parameter")
            plan = replace(plan, graph=with_lifetimes(plan.graph, {leaf.name: self.zero for leaf in leaves}))
        check_plan(plan, graph, CERTIFIED)
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
MIXTURE: RecomputeByBlock = (("*0", "full"), ("*", "selective"))
"""The first of equal blocks wholly, the others their attention only."""


def _named(recompute: Recompute | RecomputeByBlock) -> str:
    return recompute if isinstance(recompute, str) else "mixture"


def trained(
    name: str,
    mesh: Mesh,
    roles: tuple[str, ...],
    zeros: Sequence[Zero | None] = (None,),
    recomputes: Sequence[Recompute | RecomputeByBlock] = (*RECOMPUTES, MIXTURE),
) -> Iterator[Case]:
    """A layout with every lifetime and everything made again of these, in fp64."""
    for zero, recompute in product(zeros, recomputes):
        text = f"{zero or name}, {mesh.num_microbatches} microbatches, {_named(recompute)}"
        text = f"{name}: {text}" if zero and name != ZERO else text
        yield Case(text, mesh.num_devices, mesh, roles, False, zero, recompute, True)


TRAINING = (
    *(case for mb in (1, 2, 4) for case in trained(ZERO, Mesh.of(mb=mb, dp=2), (ZERO,), ZEROS[mb == 1 :])),
    *trained(DATA, Mesh.of(mb=4, dp=2), (DATA,)),
    *trained(TENSOR, Mesh.of(mb=2, tp=2), (TENSOR,)),
    *trained("hybrid", Mesh.of(mb=2, replica=2, shard=2), (DATA, ZERO), ZEROS, ("none", MIXTURE)),
    *trained("zero × tensor", Mesh.of(mb=2, dp=2, tp=2), (ZERO, TENSOR), ("zero-1", "zero-3"), ("selective",)),
)
"""What people train with, in fp64: microbatches, lifetimes of parameters, what is made again, one axis and two."""
CASES = (*forced(2), *searched(2), *forced(4), *TWO_AXES, *searched(4))
