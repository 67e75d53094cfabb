"""The spaces that the search looks through: meshes, numbers of microbatches, and plans that people choose by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd, isqrt, prod
from typing import NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.pipelining import ScheduleName
from shardwright.search.request.asked import RecomputeMode
from shardwright.search.request.limits import NO_LIMITS, Limits
from shardwright.search.request.restrict import CONTEXT, DATA, EXPERT, FREE, RING, SEQUENCE, TENSOR, ULYSSES, ZERO

AXES = ("x", "y", "z", "w")
BATCH_AXES = ("dp", "zero")
"""The axes of plans by hand that divide the batch."""
LONGEST_FIRST: tuple[Zero, ...] = ("zero-1", "zero-2", "zero-3")
"""Lifetimes of gathered parameters: the longer, the less is sent and the more is kept."""
_MOST_TRIED = 2**30
"""The number of devices up to which divisors are found by trying."""
MOST_MICROBATCHES = 256


class Pipeline(NamedTuple):
    """A number of stages in a row, of a number of chunks each, in the order of a schedule.

    `devices`: of each stage, where their numbers differ.
    """

    stages: int = 1
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    devices: tuple[int, ...] = ()

    def __str__(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        return f"pipeline {'+'.join(map(str, self.devices)) or self.stages}{chunks} ({self.schedule})"

    def sizes_on(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the sizes of unlike stages along the first axis of the mesh, the largest one's; () for equal stages.

        Raises:
            PlanError: the stages have no such meshes.
        """
        if not self.devices:
            return ()
        rest = mesh.num_devices // mesh.sizes[0]
        if mesh.num_devices != max(self.devices) or any(n % rest or mesh.sizes[0] % (n // rest) for n in self.devices):
            raise PlanError(
                f"stages of {' + '.join(map(str, self.devices))} devices on mesh {mesh}: it has to be that of the "
                f"largest, with {max(self.devices)} devices, and the others' differ from it along axis "
                f"{mesh.names[0]!r} alone, in a size that divides {mesh.sizes[0]}; choose another mesh or other numbers"
            )
        return tuple(n // rest for n in self.devices)


class Space(NamedTuple):
    """Plans on one mesh of devices whose axes keep to their roles, with these lifetimes of gathered parameters.

    `limits`: what else its layouts keep to. `pipeline`: its stages, each of which has such a mesh.
    """

    name: str
    mesh: Mesh
    roles: tuple[str, ...]
    zeros: tuple[Zero, ...] = LONGEST_FIRST
    limits: Limits = NO_LIMITS
    pipeline: Pipeline = Pipeline()

    def run(self, execution: Execution, recompute: RecomputeMode) -> Execution:
        """Return how this space's plans are run with this recomputation."""
        stages = self.pipeline
        run = execution.scheduled(
            num_stages=stages.stages,
            name=stages.schedule,
            chunks_per_stage=stages.chunks,
            stage_sizes=stages.sizes_on(self.mesh),
        )
        return replace(run, recompute=recompute)

    def with_roles(self, roles: tuple[str, ...]) -> Space:
        """Return the space whose axes have these roles, which are part of its name."""
        return self._replace(name=f"{self.name}, {' x '.join(roles)}", roles=roles)

    @property
    def data_degree(self) -> int:
        """The number of devices that the batch is divided among."""
        return prod(
            size for role, size in zip(self.roles, self.mesh.sizes, strict=True) if role in (DATA, ZERO, EXPERT)
        )


def meshes(num_devices: int, max_axes: int = 2) -> Iterator[Mesh]:
    """Yield every mesh of `num_devices` with up to `max_axes` axes of two devices or more (one axis for one device)."""

    def factorizations(n: int, axes: int) -> Iterator[tuple[int, ...]]:
        yield (n,)
        if axes > 1:
            for first in degrees(n)[:-1]:
                yield from ((first, *rest) for rest in factorizations(n // first, axes - 1))

    for sizes in factorizations(num_devices, max_axes):
        yield Mesh(AXES[: len(sizes)], sizes)


def degrees(n: int) -> list[int]:
    """Return the divisors of n but 1, in order; found without trying every number up to its root where that is long."""
    if n > _MOST_TRIED:
        from sympy import divisors  # takes longer to import than this module

        return list(divisors(n))[1:]
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})[1:]


def free_spaces(num_devices: int) -> list[Space]:
    """Return every mesh, with axes that may do anything."""
    return [Space(f"search on {mesh}", mesh, (FREE,) * len(mesh)) for mesh in meshes(num_devices)]


def staged_spaces(num_devices: int, pipeline: Pipeline) -> list[Space]:
    """Return every mesh of a stage, with axes that may do anything; for unlike stages, the mesh of the largest."""
    if pipeline.devices:
        free = [s for s in free_spaces(max(pipeline.devices)) if _serves(s.mesh, pipeline)]
    else:
        free = free_spaces(num_devices // pipeline.stages)
    return [s._replace(name=f"{pipeline} x {s.name}", pipeline=pipeline) for s in free]


def staged_by_hand(cluster: Cluster, pipeline: Pipeline) -> list[Space]:
    """Return plans as Megatron-LM is run: in every stage, ZeRO-1 among groups of tensor parallelism in one machine."""
    devices, machine = cluster.num_devices // pipeline.stages, machine_size(cluster)
    spaces = list[Space]()
    for tensor in [1, *degrees(devices)] if devices > 1 else [1]:
        if tensor > machine:
            break
        ways = [("dp", "data", ZERO, devices // tensor), ("tp", "tensor", TENSOR, tensor)]
        axes = [way for way in ways if way[-1] > 1] or ways[:1]
        names, words, roles, sizes = zip(*axes, strict=True)
        split = [f"{word} {size}" for word, size in zip(words, sizes, strict=True) if size > 1]
        name = " x ".join([*split, str(pipeline)])
        spaces.append(Space(name, Mesh(names, sizes), roles, ("zero-1",), pipeline=pipeline))
    return spaces


def _serves(mesh: Mesh, pipeline: Pipeline) -> bool:
    try:
        return bool(pipeline.sizes_on(mesh))
    except PlanError:
        return False


def nested(space: Space, cluster: Cluster) -> Space | None:
    """Return a mesh of two free axes cut at the boundary of machines into three axes; None where it cannot be.

    An inner axis that crosses the boundary becomes an axis of machines and one of the devices inside. Otherwise, the
    part of the outer axis that joins the devices of a machine becomes an axis of its own. The axis in the middle splits
    the batch and shards parameters: as its choices are few, three axes take about as long as two.
    """
    if space.roles != (FREE, FREE):
        return None
    (outer, inner), machine = space.mesh.sizes, machine_size(cluster)
    if inner > machine:
        sizes = (outer, inner // machine, machine)
    else:
        sizes = (outer * inner // machine, machine // inner, inner)
    if min(sizes) < 2 or prod(sizes) != outer * inner:
        return None
    mesh = Mesh(AXES[:3], sizes)
    return Space(f"search on {mesh}", mesh, (FREE, ZERO, FREE), space.zeros, space.limits)


class Strategy(NamedTuple):
    """A way to train that people name: its names, and the spaces of its degrees on a cluster.

    needs   what a cluster has to have for there to be such spaces
    """

    names: tuple[str, ...]
    title: str
    spaces: Callable[[Cluster], list[Space]]
    needs: str


def _flat(name: str, role: str, zeros: tuple[Zero, ...] = LONGEST_FIRST) -> Callable[[Cluster], list[Space]]:
    """Return a function that gives the space of a cluster with all devices on one axis."""
    return lambda cluster: [Space(name, Mesh(("dp",), (cluster.num_devices,)), (role,), zeros)]


def _hybrid(cluster: Cluster) -> list[Space]:
    n, inner = cluster.num_devices, machine_size(cluster)
    if not 1 < inner < n:
        return []
    return [Space("hybrid sharding", Mesh(("dp", "zero"), (n // inner, inner)), (DATA, ZERO), ("zero-3",))]


def _alone(cluster: Cluster) -> list[Space]:
    """Return tensor parallelism of all devices, where one machine has them."""
    n = cluster.num_devices
    return [Space(f"tensor parallel {n}", Mesh(("tp",), (n,)), (TENSOR,))] if 1 < n <= machine_size(cluster) else []


def _beside_data(cluster: Cluster, axis: str, role: str) -> list[Space]:
    """Return spaces of groups in one machine, of each degree, with ZeRO-1 data parallelism among them."""
    n = cluster.num_devices
    fitting = [degree for degree in degrees(n)[:-1] if degree <= machine_size(cluster)]
    return [
        Space(f"data {n // k} x {role} {k}", Mesh(("dp", axis), (n // k, k)), (ZERO, role), ("zero-1",))
        for k in fitting
    ]


def machine_size(cluster: Cluster) -> int:
    """Return the number of devices of a machine."""
    return cluster.levels[0].size if cluster.levels else 1


def _tensor(cluster: Cluster) -> list[Space]:
    return [*_alone(cluster), *_beside_data(cluster, "tp", TENSOR)]


def _sequence(axis: str, role: str) -> Callable[[Cluster], list[Space]]:
    """Return a function that gives spaces of a cluster: the sequence among all devices, or in groups."""
    return lambda cluster: [*_shared(cluster.num_devices, 1, axis, role), *_beside_data(cluster, axis, role)]


def _shared(num_devices: int, data: int, axis: str, role: str) -> list[Space]:
    """Return the batch among `data` groups of all devices, and the sequence among the devices of each group."""
    degree = num_devices // data
    if degree == 1:
        return []
    if data == 1:
        return [Space(f"{role} parallel {degree}", Mesh((axis,), (degree,)), (role,))]
    return [Space(f"data {data} x {role} {degree}", Mesh(("dp", axis), (data, degree)), (ZERO, role))]


_SEVERAL, _MACHINES = "several devices", "several machines of several devices each"
STRATEGIES = (
    Strategy(("ddp", "data"), "data parallel", _flat("data parallel", DATA), _SEVERAL),
    Strategy(("zero-1",), "ZeRO-1", _flat("ZeRO-1", ZERO, ("zero-1",)), _SEVERAL),
    Strategy(("zero-2",), "ZeRO-2", _flat("ZeRO-2", ZERO, ("zero-2",)), _SEVERAL),
    Strategy(("fsdp", "zero-3", "zero"), "ZeRO-3", _flat("ZeRO-3", ZERO, ("zero-3",)), _SEVERAL),
    Strategy(("hsdp", "hybrid"), "hybrid sharding", _hybrid, _MACHINES),
    Strategy(("tp", "tensor"), "tensor parallel", _tensor, _SEVERAL),
    Strategy(("cp", "sp", "context"), "context parallel", _sequence("cp", CONTEXT), _SEVERAL),
    Strategy(("ulysses",), "Ulysses", _sequence("sp", ULYSSES), _SEVERAL),
    Strategy(("ring",), "ring attention", _sequence("cp", RING), _SEVERAL),
)
"""The strategies that may be asked for by name."""


def strategy(name: str) -> Strategy:
    """Return the strategy of this name. Raises a `PlanError` that lists the names."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    for each in STRATEGIES:
        if plain in each.names or plain == each.title.lower().replace(" ", "-"):
            return each
    listed = ", ".join("/".join(each.names) for each in STRATEGIES)
    raise PlanError(f"unknown strategy {name!r}; choose one of {listed}")


def baselines(cluster: Cluster) -> Iterator[list[Space]]:
    """Yield the plans that people choose by hand, each with the degrees that it is tried with."""
    ways = [*(strategy(name).spaces for name in ("ddp", "zero-3", "zero-2", "hybrid")), _alone]
    lists = [*(spaces(cluster) for spaces in ways), _beside_data(cluster, "tp", TENSOR)]
    yield from filter(None, lists)


def sequence_baselines(cluster: Cluster, graph: Graph) -> Iterator[list[Space]]:
    """Yield plans that split the sequence too, where there are too few examples for all devices."""
    n, size = cluster.num_devices, batch_size(graph)
    if size % n and sequence_length(graph) is not None:
        groups = [1, *(degrees(gcd(n, size)) if gcd(n, size) > 1 else ())]
        yield from ([s for data in groups for s in _shared(n, data, "sp", role)] for role in SEQUENCE)


def batch_size(graph: Graph) -> int:
    """Return the size that microbatches divide: the greatest common divisor of dimension 0 of the inputs."""
    shapes = [graph.types[leaf.name].shape for leaf in graph.leaves("input")]
    return gcd(*(shape[0] for shape in shapes if shape))


def sequence_length(graph: Graph) -> int | None:
    """Return dimension 1 of the token ids, or None where there are none."""
    return max((shape[1] for shape in token_shapes(graph)), default=None)


def token_shapes(graph: Graph) -> list[tuple[int, ...]]:
    """Return the shapes of the inputs that are token ids: integers with a sequence that are looked up in a table.

    So classes of pixels are no tokens.
    """
    shapes = ((leaf.name, graph.types[leaf.name].shape) for leaf in graph.leaves("input"))
    return [shape for name, shape in shapes if len(shape) > 1 and _is_looked_up(graph, name)]


def _is_looked_up(graph: Graph, name: str) -> bool:
    """Return whether a value is of integers and it, or what follows from it, indexes an embedding."""
    pending, seen = [name], set[str]()
    while pending:
        one = pending.pop()
        if one in seen or not graph.types[one].dtype.startswith("int"):
            continue
        seen.add(one)
        readers = [graph.by_name[user] for user in graph.users[one]]
        if any(user.op == "embedding" and graph.types[user.inputs[0]].shape[-1] > 1 for user in readers):
            return True  # an embedding of width 1 has the weights of classes
        pending += graph.users[one]
    return False


def microbatch_counts(size: int) -> list[int]:
    """Return the numbers of microbatches that a batch may be cut into: divisors, each a third more than the last.

    So a batch of 3 · 2ⁿ is cut into 3 · 2ᵏ too, which leaves 2ⁿ⁻ᵏ for the devices.
    """
    counts = [1]
    for divisor in degrees(size) if size > 1 else []:
        if 4 * counts[-1] <= 3 * divisor and divisor <= MOST_MICROBATCHES:
            counts.append(divisor)
    return counts


def divided(space: Space, counts: Sequence[int], size: int) -> list[int]:
    """Return the counts that leave every device of the space examples in each microbatch, or else the first count."""
    good = [count for count in counts if (size // count) % space.data_degree == 0]
    return good or list(counts[:1])
