"""Prices of moves: changes of a tensor's layout along one mesh axis, as `pcg.moves` has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, prod
from typing import NamedTuple, cast

from shardwright.cost.clusters.cluster import Cluster, Collective
from shardwright.cost.collectives.communication import Communication
from shardwright.pcg.choice import Exchange
from shardwright.pcg.layout import C, Layouts, R
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.moves import SLICE, Move
from shardwright.pcg.step.buckets import BUCKET_BYTES, LARGE_BYTES
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.types import ITEM_BYTES

AFTER_THE_LOOP_S = 1e6
"""The price of a move along time that needs all microbatches before one is through: a plan has it only where there is
no other, and `check_time` then says which operator wants it."""


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors that move alike: shape, dtype, whether a gradient flows, what it has to do with a parameter.

    A `stored` parameter is gathered for each use, and `again` where backward reads it: the gathered weight is not kept.
    A `view` of one is not gathered itself: the parameter is, before the view is taken; and its gradient is summed there
    too, with others and beside backward, but where readers of one view want it both ways. `summed`: the dtype of the
    gradient where it is another, as of a parameter that was cast. `zero`: how long a gathered parameter that is trained
    stays. An activation that moves `twice` does so again in backward. What is `late` is summed over the microbatches
    first, and moves once. `together`: it is sent with others, in messages of so many
    bytes at most, and counts what it adds to these at least, once a step.
    """

    shape: tuple[int, ...]
    dtype: str
    grad: bool
    stored: bool = False
    view: bool = False
    again: bool = False
    summed: str = ""
    zero: Zero = "zero-3"
    twice: bool = False
    late: bool = False
    together: float = 0.0


class MovePart(NamedTuple):
    """A collective that a move runs: of `item_bytes` for each element of a tensor.

    `others`: the other axes that divide the tensor. `together`: as `TensorClass` has it.
    """

    collective: str
    axis: int
    others: tuple[int, ...]
    item_bytes: float
    together: float = 0.0


@dataclass(frozen=True, slots=True)
class Loop:
    """In how many microbatches a step is run, and so what moves run and how often, on meshes of all sizes.

    `time`: the axis of a mesh along which they are, or None. `by_microbatch`: each of them may have statistics of its
    own, so that nothing waits for the others' sums.
    """

    time: int | None = None
    num_microbatches: int = 1
    by_microbatch: bool = False

    def parts(self, tensor: TensorClass, state: Layouts, move: Move) -> tuple[float, list[tuple[MovePart, int]]]:
        """Of `MoveCosts.move_s`: what does not depend on the shape of the tensor, and how often what runs that does."""
        if move.axis == self.time:
            waits = len(move.kind.operators) > 1 and not (self.by_microbatch and not move.after.is_shard)
            return (AFTER_THE_LOOP_S if move.before.is_shard or waits else 0.0), []
        if (tensor.view and move.before.is_shard) or (tensor.stored and move.kind.forward == "all_to_all"):
            return inf, []
        if self.time is not None and tensor.grad and not tensor.together and _is_gather(tensor, move):
            once = state[self.time] == R
            if tensor.zero == "zero-1" and not once:
                return inf, []
            if once and tensor.zero != "zero-1":
                often = (*state[: self.time], C, *state[self.time + 1 :])
                more, (fixed_s, parts) = 2 * self.num_microbatches, self.parts(tensor, often, move)
                return more * fixed_s, [(part, more * times) for part, times in parts]
        others = tuple(a for a, x in enumerate(state) if x.is_shard and a != move.axis)
        avoided = tensor.view and not tensor.together and (move.before, move.after) == (R, C)
        behind = 2 if avoided else 1  # more than all that it would spare
        sent = self.sent_bytes(tensor, state, move, 1)
        return 0.0, [
            (MovePart(name, move.axis, others, each, tensor.together), behind * times) for name, each, times in sent
        ]

    def sent_bytes(
        self, tensor: TensorClass, state: Layouts, move: Move, num_elements: float
    ) -> Iterator[tuple[str, float, int]]:
        """What a move of so many elements runs: a collective, the bytes that it takes, how often in a step.

        That of the value comes first, then that of its gradient.
        """
        dtypes = tensor.dtype, tensor.summed or tensor.dtype
        for name, dtype, times in zip(move.collectives(), dtypes, self.counts(tensor, state, move), strict=True):
            if times:
                yield name, num_elements * ITEM_BYTES[dtype], times

    def counts(self, tensor: TensorClass, state: Layouts, move: Move) -> tuple[int, int]:
        """How often the value moves in a step, and its gradient.

        A parameter that backward reads is gathered again for it, unless it is kept or that is done once for all
        microbatches.
        """
        times = self.times(tensor, state)
        num_forward = num_backward = times
        if _is_gather(tensor, move):
            if tensor.zero == "zero-2":
                num_forward = 1
            elif tensor.zero == "zero-3" and tensor.again and (self.num_microbatches == 1 or times > 1):
                num_forward = 2 * times
        elif tensor.twice:
            num_forward = 2 * times
        return num_forward, num_backward * tensor.grad

    def times(self, tensor: TensorClass, state: Layouts) -> int:
        """How often a tensor in this state moves in a step: once, or in each microbatch."""
        once = self.time is None or (state[self.time] == R and (tensor.stored or tensor.late))
        return 1 if once or tensor.together else self.num_microbatches


class MoveCosts:
    """Prices single-axis moves on one mesh of one cluster. What moves in each microbatch is paid for as often.

    `by_microbatch`: as in `Loop`.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh, *, by_microbatch: bool = False) -> None:
        time = mesh.index(TIME) if TIME in mesh.names else None
        self.sizes, self.loop = mesh.sizes, Loop(time, mesh.num_microbatches, by_microbatch)
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

    def exchange_s(self, exchange: Exchange, *, backward: bool = False) -> tuple[float, float]:
        """Seconds before the operator and after it: those of the device that sends most."""
        name, axis, imbalance = exchange.collective, exchange.axis, exchange.imbalance
        there_s, back_s = (
            sum(self.collective_s(name, axis, imbalance * num_bytes) for num_bytes in way)
            for way in exchange.sent(backward=backward)
        )
        return there_s, back_s

    def move_s(self, tensor: TensorClass, state: Layouts, move: Move) -> float:
        """Seconds of one move of a tensor in `state`, both ways; infinite for one that the lowering does not run.

        A parameter that is to be gathered in each microbatch is gathered once a step where a reader needs what is the
        same for all of them, and only there: that costs more than all that it would spare.
        """
        fixed_s, parts = self.loop.parts(tensor, state, move)
        num_elements = prod(tensor.shape)
        return fixed_s + sum(times * self.part_s(part, num_elements) for part, times in parts)

    def part_s(self, part: MovePart, num_elements: int) -> float:
        """Seconds of a part of a move of a tensor of so many elements, once."""
        num_bytes = num_elements / prod(self.sizes[a] for a in part.others) * part.item_bytes
        if part.together:
            return self._least_s(part.collective, part.axis, num_bytes, part.together)
        return self.collective_s(part.collective, part.axis, num_bytes)

    def _least_s(self, name: str, axis: int, num_bytes: float, together: float) -> float:
        """What so many bytes add at least to a collective of these and others.

        Gradients that are summed alone, or in a bucket, may be sent in twice the bytes that decide about it.
        """
        if not name:
            return 0.0
        if name == SLICE:
            return 2 * num_bytes / self.sizes[axis] / self.device.memory_bytes_per_s
        curve = self.communication.curve(cast("Collective", name), axis)
        if name == "all_reduce":
            together = num_bytes if num_bytes >= 2 * LARGE_BYTES else 2 * (BUCKET_BYTES + LARGE_BYTES)
        return num_bytes * curve.least_s_per_byte(num_bytes, max(num_bytes, together))


def _is_gather(tensor: TensorClass, move: Move) -> bool:
    """Whether this is how a parameter is gathered."""
    return (tensor.stored or tensor.again) and move.kind.forward == "all_gather"
