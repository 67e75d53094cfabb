"""Plans of the matrix: the layouts that every model is run under, and the clusters that they are planned for."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from bench.accuracy import Kind
from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster, CollectiveLine, Level
from shardwright.cost.clusters.device import Device
from shardwright.cost.clusters.local import default_cluster
from shardwright.cost.predict import predict
from shardwright.cost.timeline.memory import SAFE_SHARE
from shardwright.pcg.choice import WHOLE, Choice
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS, Zero, with_lifetimes
from shardwright.pcg.step.precisions import Precision
from shardwright.pcg.step.recompute import RECOMPUTES, Recompute, RecomputeByBlock
from shardwright.pcg.types import TensorType
from shardwright.search.check import check_plan
from shardwright.search.plan import Plan
from shardwright.search.request.restrict import DATA, TENSOR, ZERO
from shardwright.search.tree.planner import Planner
from shardwright.verifier.choices import Certified

CERTIFIED = Certified()
"""The choices that carry a certificate; nothing else enters a plan."""
Lifetimes = Zero | Literal["mixed"]
"""Of all gathered parameters, or of one after the other another one."""


@dataclass(frozen=True)
class RandomSubset:
    """Keeps each certified choice with probability `share`, decided by its name and the seed; "R" always.

    `always`: by node, another choice that is kept: the one that cuts it into microbatches.
    """

    seed: int
    share: float
    always: Mapping[str, Choice] = field(default_factory=dict, compare=False)

    def __call__(self, node: Node, operands: Sequence[TensorType], blocked: Sequence[Choice] = ()) -> frozenset[Choice]:
        kept = (WHOLE, self.always.get(node.name))
        found = CERTIFIED(node, operands, blocked)
        return frozenset(c for c in found if c in kept or self._keeps(f"{node.name}/{c}"))

    def _keeps(self, name: str) -> bool:
        return random.Random(zlib.crc32(f"{self.seed}/{name}".encode())).random() < self.share


@dataclass(frozen=True)
class Case:
    """One column of the matrix: forced roles on a mesh, or, where there are none, the search's own choice.

    Attributes:
        name: what it is called.
        num_ranks: of its mesh.
        mesh: with the axis of time, if a step has microbatches.
        roles: of its axes of devices.
        fast_links: whether links cost nothing.
        zero: how long gathered parameters stay, "mixed": not all equally long; None: as long as the search says.
        recompute: what backward makes again; None: what the search says.
        kind: in what the model is trained.
        share: the part of the memory that its plan would take which is there.
        subset: what may be chosen of what is certified; None: all of it.
        num_stages: of a pipeline, each of which has the mesh.
        per_microbatch: the modules whose statistics are taken of each microbatch.
    """

    name: str
    num_ranks: int
    mesh: Mesh | None = None
    roles: tuple[str, ...] | None = None
    fast_links: bool = False
    zero: Lifetimes | None = None
    recompute: Recompute | RecomputeByBlock | None = None
    kind: Kind = "fp32"
    share: float | None = None
    subset: RandomSubset | None = None
    num_stages: int = 1
    per_microbatch: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}, {self.num_ranks} ranks"

    @property
    def cluster(self) -> Cluster:
        return fast_links(self.num_ranks) if self.fast_links else default_cluster(self.num_ranks)

    def suits(self, graph: Graph) -> bool:
        """True if the model has what the recomputation is about: blocks, or attention."""
        try:
            made_again(graph, Execution(recompute=self.recompute or "none"))
        except PlanError:
            return False
        return True

    def plan(self, graph: Graph, model: str) -> Plan:
        """The plan of a serial graph for this case, from a fresh planner, and proven to be that graph's."""
        plan = self._searched(graph, model, self.cluster)
        if self.share is not None:
            memory_bytes = int(self.share * plan.prediction.memory.total_bytes / SAFE_SHARE)
            device = replace(self.cluster.device, memory_bytes=memory_bytes)
            plan = self._searched(graph, model, replace(self.cluster, device=device))
        if self.zero is not None:
            zeros: Sequence[Zero] = ZEROS if self.zero == "mixed" else [self.zero]
            leaves = enumerate(plan.graph.leaves("parameter"))
            each: dict[str, Zero] = {leaf.name: zeros[number % len(zeros)] for number, leaf in leaves}
            changed = with_lifetimes(plan.graph, each)
            plan = replace(plan, graph=changed, prediction=predict(changed, plan.cluster, plan.execution))
        check_plan(plan, graph, CERTIFIED)
        return plan

    def _searched(self, graph: Graph, model: str, cluster: Cluster) -> Plan:
        precision: Precision | None = "amp_bf16" if self.kind == "amp_bf16" else None
        certified = self.subset or CERTIFIED
        planner = Planner(cluster, certified, precision=precision, per_microbatch=self.per_microbatch)
        given = self.mesh is not None
        return planner.plan(
            graph, model, mesh=self.mesh, roles=self.roles, recompute=self.recompute, compared=not given,
            stages=self.num_stages if self.num_stages > 1 else None,
        )  # fmt: skip


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
        yield Case(text, mesh.num_devices, mesh, roles, False, zero, recompute, "fp64")


TRAINING = (
    *(case for mb in (1, 2, 4) for case in trained(ZERO, Mesh.of(mb=mb, dp=2), (ZERO,), ZEROS[mb == 1 :])),
    *trained(DATA, Mesh.of(mb=4, dp=2), (DATA,)),
    *trained(TENSOR, Mesh.of(mb=2, tp=2), (TENSOR,)),
    *trained("hybrid", Mesh.of(mb=2, replica=2, shard=2), (DATA, ZERO), ZEROS, ("none", MIXTURE)),
    *trained("zero × tensor", Mesh.of(mb=2, dp=2, tp=2), (ZERO, TENSOR), ("zero-1", "zero-3"), ("selective",)),
)
"""What people train with, in fp64: microbatches, lifetimes of parameters, what is made again, one axis and two."""
CASES = (*forced(2), *searched(2), *forced(4), *TWO_AXES, *searched(4))
