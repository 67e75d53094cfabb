"""What the search looks through: meshes, numbers of microbatches, and the plans that people choose by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, prod
from typing import NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.lifetimes import Zero
from shardwright.search.restrict import DATA, EXPERT, FREE, TENSOR, ZERO

AXES = ("x", "y", "z", "w")
LONGEST_FIRST: tuple[Zero, ...] = ("zero-1", "zero-2", "zero-3")
"""Lifetimes of gathered parameters: the longer, the less is sent and the more is kept."""
MOST_MICROBATCHES = 256


class Space(NamedTuple):
    """Plans on one mesh of devices whose axes keep to their roles, with these lifetimes of gathered parameters."""

    name: str
    mesh: Mesh
    roles: tuple[str, ...]
    zeros: tuple[Zero, ...] = LONGEST_FIRST

    @property
    def data_degree(self) -> int:
        """Among how many devices the batch has to be divisible."""
        return prod(
            size for role, size in zip(self.roles, self.mesh.sizes, strict=True) if role in (DATA, ZERO, EXPERT)
        )


def meshes(num_devices: int, max_axes: int = 2) -> Iterator[Mesh]:
    """Every mesh of this many devices with up to `max_axes` axes of at least two devices (one axis for one device)."""

    def factorizations(n: int, axes: int) -> Iterator[tuple[int, ...]]:
        yield (n,)
        if axes > 1:
            for first in degrees(n)[:-1]:
                yield from ((first, *rest) for rest in factorizations(n // first, axes - 1))

    for sizes in factorizations(num_devices, max_axes):
        yield Mesh(AXES[: len(sizes)], sizes)


def degrees(n: int) -> list[int]:
    """The divisors of n but 1, in order; found without trying every number up to n."""
    from sympy import divisors  # takes longer to import than this module

    return list(divisors(n))[1:]


def free_spaces(num_devices: int) -> list[Space]:
    """Every mesh, each axis of which may do anything."""
    return [Space(f"search on {mesh}", mesh, (FREE,) * len(mesh)) for mesh in meshes(num_devices)]


def baselines(cluster: Cluster) -> Iterator[list[Space]]:
    """Plans that people choose by hand, each with the degrees that it is tried with."""
    n = cluster.num_devices
    flat, inner = Mesh(("dp",), (n,)), cluster.levels[0].size if cluster.levels else 1
    yield [Space("data parallel", flat, (DATA,))]
    yield [Space("ZeRO-3", flat, (ZERO,), ("zero-3",))]
    yield [Space("ZeRO-2", flat, (ZERO,), ("zero-2",))]
    if 1 < inner < n:
        yield [Space("hybrid sharding", Mesh(("dp", "zero"), (n // inner, inner)), (DATA, ZERO), ("zero-3",))]
    tensor = [degree for degree in degrees(n) if degree <= inner]
    if n in tensor:
        yield [Space(f"tensor parallel {n}", Mesh(("tp",), (n,)), (TENSOR,))]
    pairs = [
        Space(
            f"data {n // degree} x tensor {degree}",
            Mesh(("dp", "tp"), (n // degree, degree)),
            (ZERO, TENSOR),
            ("zero-1",),
        )
        for degree in tensor
        if degree < n
    ]
    if pairs:
        yield pairs


def batch_size(graph: Graph) -> int:
    """The size that microbatches divide: dimension 0 of the inputs, or what divides it in all of them."""
    shapes = [graph.types[leaf.name].shape for leaf in graph.leaves("input")]
    return gcd(*(shape[0] for shape in shapes if shape))


def microbatch_counts(size: int) -> list[int]:
    """Into how many microbatches a batch of this size may be cut: its divisors, each at least twice the one before."""
    found = [1]
    for divisor in degrees(size) if size > 1 else []:
        if 2 * found[-1] <= divisor <= MOST_MICROBATCHES:
            found.append(divisor)
    return found


def divided(space: Space, counts: Sequence[int], size: int) -> list[int]:
    """Those of the counts that leave every device of the space examples in each microbatch, or what comes nearest."""
    good = [count for count in counts if (size // count) % space.data_degree == 0]
    return good or list(counts[:1])
