"""Prices of moves: changes of a tensor's layout along one mesh axis, as `pcg.moves` has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, prod
from typing import cast

from shardwright.cost.clusters.cluster import Cluster, Collective
from shardwright.cost.collectives.communication import Communication
from shardwright.pcg.layout import Layouts
from shardwright.pcg.moves import SLICE, Move
from shardwright.pcg.types import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors that move alike: shape, dtype, whether a gradient flows, what it has to do with a parameter.

    A `stored` parameter is gathered for each use and again in backward; the gathered weight is not kept. A `view` of
    one is not gathered itself: the parameter is, before the view is taken. `summed`: the dtype of the gradient where it
    is another, as of a parameter that was cast.
    """

    shape: tuple[int, ...]
    dtype: str
    grad: bool
    stored: bool = False
    view: bool = False
    summed: str = ""


class MoveCosts:
    """Prices single-axis moves on one mesh of one cluster."""

    def __init__(self, cluster: Cluster, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.communication = Communication(cluster, sizes)
        self.device = cluster.device
        self._times: dict[tuple[str, int, float], float] = {}

    def collective_s(self, name: str, axis: int, num_bytes: float) -> float:
        """Seconds of one collective over tensors of `num_bytes` per group, or of a local slice of them."""
        if not name:
            return 0.0
        key = (name, axis, num_bytes)
        if key not in self._times:
            if name == SLICE:
                moved_s = 2 * num_bytes / self.sizes[axis] / self.device.memory_bytes_per_s
            else:
                moved_s = self.communication.time_s(cast("Collective", name), axis, num_bytes)
            self._times[key] = moved_s + self.device.op_overhead_s
        return self._times[key]

    def move_s(self, tensor: TensorClass, state: Layouts, move: Move) -> float:
        """Seconds of one move of a tensor in `state`, both ways; infinite for one that the lowering does not run."""
        others = prod(self.sizes[a] for a, x in enumerate(state) if x.is_shard and a != move.axis)
        if (tensor.view and move.before.is_shard) or (tensor.stored and move.kind.forward == "all_to_all"):
            return inf
        sent = sent_bytes(tensor, move, prod(tensor.shape) / others)
        return sum(self.collective_s(name, move.axis, num_bytes) for name, num_bytes in sent)


def sent_bytes(tensor: TensorClass, move: Move, num_elements: float) -> Iterator[tuple[str, float]]:
    """Every collective of a move of so many elements, with the bytes that they take."""
    for number, name in enumerate(collectives_of(tensor, move)):
        dtype = tensor.summed or tensor.dtype if number == 1 else tensor.dtype
        yield name, num_elements * ITEM_BYTES[dtype]


def collectives_of(tensor: TensorClass, move: Move) -> tuple[str, ...]:
    """What a move of a tensor runs in a step: of the value, of the gradient; a stored parameter is gathered again."""
    forward, backward = move.collectives()
    if not tensor.grad:
        return (forward,)
    return (forward, backward, forward) if tensor.stored and forward == "all_gather" else (forward, backward)
