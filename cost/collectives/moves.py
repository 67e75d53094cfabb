"""Prices of moves: changes of a tensor's layout along one mesh axis, as `pcg.moves` has them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod
from typing import cast

from shardwright.cost.clusters.cluster import Cluster, Collective
from shardwright.cost.collectives.communication import Communication
from shardwright.pcg.layout import Layouts, R
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.moves import SLICE, Move
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.types import ITEM_BYTES


AFTER_THE_LOOP_S = 1e6
"""The price of a move along time that needs all microbatches before one is through: a plan has it only where there is
no other, and `check_time` then says which operator wants it."""


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors that move alike: shape, dtype, whether a gradient flows, what it has to do with a parameter.

    A `stored` parameter is gathered for each use, as often as `zero` says. A `view` of one is not gathered itself: the
    parameter is, before the view is taken. An activation that is moved `twice` is so again in backward.
    """

    shape: tuple[int, ...]
    dtype: str
    grad: bool
    stored: bool = False
    view: bool = False
    zero: Zero = "zero-3"
    twice: bool = False


class MoveCosts:
    """Prices single-axis moves on one mesh of one cluster. What moves in each microbatch is paid for as often."""

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.sizes, self.num_microbatches = mesh.sizes, mesh.num_microbatches
        self.time = mesh.index(TIME) if TIME in mesh.names else None
        self.communication = Communication(cluster, mesh.device_sizes)
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
        if move.axis == self.time:
            return AFTER_THE_LOOP_S if move.before.is_shard or len(move.kind.operators) > 1 else 0.0
        others = prod(self.sizes[a] for a, x in enumerate(state) if x.is_shard and a != move.axis)
        num_bytes = prod(tensor.shape) * ITEM_BYTES[tensor.dtype] / others
        if (tensor.view and move.before.is_shard) or (tensor.stored and move.kind.forward == "all_to_all"):
            return inf
        if self._is_gather(tensor, move) and (tensor.zero == "zero-1") != self._is_once(state) and self.time is not None:
            return inf
        return sum(self.collective_s(name, move.axis, num_bytes) for name in self.collectives_of(tensor, state, move))

    def collectives_of(self, tensor: TensorClass, state: Layouts, move: Move) -> tuple[str, ...]:
        """All that a move of a tensor in `state` runs in a step."""
        forward, backward = move.collectives()
        times = self.times(state)
        ways = (forward, backward) if tensor.grad else (forward,)
        if not self._is_gather(tensor, move):
            return (ways + (forward,) * tensor.twice) * times
        if tensor.zero == "zero-2":
            return (forward,) + (backward,) * times
        return (ways + (forward,) * (tensor.zero == "zero-3")) * times

    def _is_gather(self, tensor: TensorClass, move: Move) -> bool:
        """Whether this is how a parameter is gathered that is trained."""
        return tensor.stored and tensor.grad and move.kind.forward == "all_gather"

    def _is_once(self, state: Layouts) -> bool:
        return self.time is not None and state[self.time] == R

    def times(self, state: Layouts) -> int:
        """How often a step has a tensor in this state: once, or in each microbatch."""
        return 1 if self.time is None or self._is_once(state) else self.num_microbatches
