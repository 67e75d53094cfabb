"""The cost for a stage of sharing out Muon's update, beyond reading and writing weights and states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from shardwright.cost.compute.work import Work
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.step.muon import NUM_ITERATIONS, Exchanged, hidden_matrices, owners_of, products
from shardwright.pcg.types import ITEM_BYTES

DTYPE = "bfloat16"
_ITEM_BYTES = ITEM_BYTES[DTYPE]


class Orthogonalized(NamedTuple):
    """The seconds of a stage's busiest rank: of iterations, and, by axis, of both exchanges.

    `exchanged`: the bytes that it sends or receives on the way to owners, and on the way back.
    """

    compute_s: float = 0.0
    gather_s: Mapping[str, float] = {}
    return_s: Mapping[str, float] = {}
    exchanged: tuple[float, float] = (0.0, 0.0)

    @property
    def exchange_s(self) -> float:
        return sum(self.gather_s.values()) + sum(self.return_s.values())


NOTHING = Orthogonalized()


def orthogonalized(steps: Steps, leaves: Mapping[str, int]) -> Orthogonalized:
    """Return what the iterations on a stage's matrices take; `leaves` says how many of each parameter."""
    if steps.execution.assumed.optimizer != "muon":
        return NOTHING
    hidden, mesh = hidden_matrices(steps.graph), steps.graph.mesh
    listed = [leaf for leaf, times in leaves.items() if leaf in hidden for _ in range(times)]
    if not listed:
        return NOTHING
    shapes, num_ranks = [steps.graph.types[leaf].shape for leaf in listed], prod(mesh.device_sizes)
    owners = owners_of(shapes, num_ranks)
    matrices = [
        (prod(shape), steps.parameters[leaf].num_elements, owner)
        for leaf, shape, owner in zip(listed, shapes, owners, strict=True)
    ]
    there, back = Exchanged.among(matrices, num_ranks)
    load_s = defaultdict[int, float](float)
    for shape, owner in zip(shapes, owners, strict=True):
        load_s[owner] += _iterations_s(steps, shape)
    return Orthogonalized(
        max(load_s.values()), _exchange_s(steps, there), _exchange_s(steps, back),
        (there * _ITEM_BYTES, back * _ITEM_BYTES),
    )  # fmt: skip


def _iterations_s(steps: Steps, shape: tuple[int, ...]) -> float:
    device = steps.cluster.device
    seconds = 0.0
    for m, n, k in products(shape):
        num_bytes = _ITEM_BYTES * (m * k + k * n + m * n)
        work_s = steps.compute.work_s(Work("matmul", (1, m, n, k), 2.0 * m * n * k, num_bytes, DTYPE))
        dispatch_s = device.op_overhead_s
        seconds += max(work_s, dispatch_s) if device.kind == "cuda" else work_s + dispatch_s
    return NUM_ITERATIONS * seconds


def _exchange_s(steps: Steps, num_elements: int) -> dict[str, float]:
    """Return the seconds of an exchange along each axis, one after the other, whose busiest rank moves so much."""
    mesh = steps.graph.mesh
    num_ranks = prod(mesh.device_sizes)
    if not num_elements:
        return {}
    each = num_elements * _ITEM_BYTES * num_ranks / (num_ranks - 1)  # with what a rank keeps
    sizes = zip(mesh.names, mesh.device_sizes, strict=True)
    return {axis: steps.collective_s("all_to_all", axis, each * size, merged=True) for axis, size in sizes if size > 1}
