"""Prices of moves: changes of a tensor's layout along one mesh axis, as in `pcg.moves`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import inf, prod
from typing import NamedTuple, cast

from shardwright.cost.clusters.cluster import Cluster, Collective
from shardwright.cost.collectives.communication import Communication
from shardwright.pcg.choice import Exchange, Transfers
from shardwright.pcg.encodings import Encoding, legs
from shardwright.pcg.layout import C, Layouts, R
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.moves import SLICE, Move
from shardwright.pcg.step.buckets import BUCKET_BYTES, LARGE_BYTES
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.types import ITEM_BYTES

AFTER_THE_LOOP_S = 1e6
"""The price of a move along time that needs all microbatches before one is done. A plan has such a move only where no
other is possible, and `check_time` then names the operator that needs it."""


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors that move alike: shape, dtype, whether a gradient flows, and their relation to a parameter.

    Attributes:
        stored: a parameter, which is gathered for each use.
        view: a view of a parameter. It is not gathered itself: the parameter is, before the view is taken. Its gradient
            is summed there too, with others and beside backward, unless readers of one view need it both ways.
        recomputed: backward reads the parameter, which is gathered again for it: the gathered weight is not kept.
        summed: the dtype of the gradient if it differs, as for a parameter that was cast.
        gathered_as: the encoding in which a parameter is gathered; `summed_as`: in which its gradient is summed.
        zero: how long a gathered, trained parameter stays.
        twice: an activation that moves again in backward.
        late: a value that is summed over the microbatches first, and so moves once.
        together: the most bytes of a message in which it is sent with others, once a step. Its price is then the least
            that it can add to such a message.
    """

    shape: tuple[int, ...]
    dtype: str
    grad: bool
    stored: bool = False
    view: bool = False
    recomputed: bool = False
    summed: str = ""
    zero: Zero = "zero-3"
    twice: bool = False
    late: bool = False
    together: float = 0.0
    gathered_as: Encoding | None = None
    summed_as: Encoding | None = None


class MovePart(NamedTuple):
    """A collective that a move runs, of `item_bytes` for each element of a tensor, as they are sent.

    `others`: the other axes that divide the tensor. `together`: as in `TensorClass`. `encoding`: in which it is sent.
    """

    collective: str
    axis: int
    others: tuple[int, ...]
    item_bytes: float
    together: float = 0.0
    encoding: Encoding | None = None


class Sent(NamedTuple):
    """A collective of a move: the bytes as they are sent, how often in a step, and the encoding in which they are."""

    collective: str
    num_bytes: float
    times: int
    encoding: Encoding | None = None


@dataclass(frozen=True, slots=True)
class Loop:
    """The loop over microbatches in a step: it decides which moves run and how often, on meshes of all sizes.

    `time`: the mesh axis of the microbatches, or None. `by_microbatch`: each microbatch may have its own statistics, so
    that none waits for the others' sums.
    """

    time: int | None = None
    num_microbatches: int = 1
    by_microbatch: bool = False

    def parts(self, tensor: TensorClass, state: Layouts, move: Move) -> tuple[float, list[tuple[MovePart, int]]]:
        """Return the terms of `MoveCosts.move_s`: fixed seconds, and collectives with the number of times they run."""
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
        behind = 2 if avoided else 1  # costs more than the move could save
        sent = self.sent(tensor, state, move, 1)
        return 0.0, [
            (MovePart(name, move.axis, others, each, tensor.together, encoding), behind * times)
            for name, each, times, encoding in sent
        ]

    def sent(self, tensor: TensorClass, state: Layouts, move: Move, num_elements: float) -> Iterator[Sent]:
        """Yield each collective of a move of `num_elements`: the value's first, then its gradient's."""
        dtypes = tensor.dtype, tensor.summed or tensor.dtype
        encodings = (
            tensor.gathered_as if move.kind.forward == "all_gather" else None,
            tensor.summed_as if move.kind.backward in ("all_reduce", "reduce_scatter") else None,
        )
        every = zip(move.collectives(), dtypes, self.counts(tensor, state, move), encodings, strict=True)
        for name, dtype, times, encoding in every:
            if times:
                item_bytes = ITEM_BYTES[dtype] if encoding is None else encoding.item_bytes(dtype)
                yield Sent(name, num_elements * item_bytes, times, encoding)

    def counts(self, tensor: TensorClass, state: Layouts, move: Move) -> tuple[int, int]:
        """Return how often the value and its gradient move in a step.

        A parameter that backward reads is gathered again for it, unless it is kept, or gathered once for all
        microbatches.
        """
        times = self.times(tensor, state)
        num_forward = num_backward = times
        if _is_gather(tensor, move):
            if tensor.zero == "zero-2":
                num_forward = 1
            elif tensor.zero == "zero-3" and tensor.recomputed and (self.num_microbatches == 1 or times > 1):
                num_forward = 2 * times
        elif tensor.twice:
            num_forward = 2 * times
        return num_forward, num_backward * tensor.grad

    def times(self, tensor: TensorClass, state: Layouts) -> int:
        """Return how often a tensor in this state moves in a step: once, or in each microbatch."""
        once = self.time is None or (state[self.time] == R and (tensor.stored or tensor.late))
        return 1 if once or tensor.together else self.num_microbatches


class MoveCosts:
    """Prices of single-axis moves on one mesh of one cluster. A move in each microbatch is paid for as often.

    `by_microbatch`: as in `Loop`.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh, *, by_microbatch: bool = False) -> None:
        time = mesh.index(TIME) if TIME in mesh.names else None
        self.sizes, self.loop = mesh.sizes, Loop(time, mesh.num_microbatches, by_microbatch)
        self.communication = Communication(cluster, mesh.device_sizes)
        self.device = cluster.device
        self._times: dict[tuple[str, int, float], float] = {}

    def collective_s(self, name: str, axis: int, num_bytes: float) -> float:
        """Return the seconds of a collective over `num_bytes` per group, or of slicing them locally."""
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

    def library_s(self, name: str, axis: int, num_bytes: float) -> float:
        """Return the seconds where no schedule runs: of counts, or of a part of a sum along several axes."""
        if name == SLICE or not name or self.communication.cluster.schedules is None:
            return self.collective_s(name, axis, num_bytes)
        curve = self.communication.library(cast("Collective", name), axis)
        return curve.time_s(num_bytes) + self.device.op_overhead_s

    def exchange_s(self, exchange: Exchange, *, backward: bool = False) -> Transfers[float]:
        """Return the seconds of each transfer, on the device that sends most."""
        return exchange.sent(backward=backward).each(partial(self.transfer_s, exchange))

    def transfer_s(self, exchange: Exchange, num_bytes: int) -> float:
        """Return the seconds of one transfer of so many bytes of the axis's devices together."""
        if exchange.collective == "permute":
            sent = exchange.imbalance * num_bytes / exchange.size
            seconds = self.communication.permute_s(exchange.axis, sent, straight=exchange.is_straight)
            return seconds + self.device.op_overhead_s
        seconds = self.library_s if num_bytes == exchange.counts_bytes else self.collective_s
        return seconds(exchange.collective, exchange.axis, exchange.imbalance * num_bytes)

    def move_s(self, tensor: TensorClass, state: Layouts, move: Move) -> float:
        """Return the seconds of one move of a tensor in `state`, both ways; infinite if the lowering has no such move.

        A parameter that is to be gathered in each microbatch is gathered once a step only where a reader needs the same
        value in all of them; the price of that exceeds all that it could save.
        """
        fixed_s, parts = self.loop.parts(tensor, state, move)
        num_elements = prod(tensor.shape)
        return fixed_s + sum(times * self.part_s(part, num_elements) for part, times in parts)

    def part_s(self, part: MovePart, num_elements: int) -> float:
        """Return the seconds of a part of a move of a tensor of `num_elements`, once."""
        num_bytes = num_elements / prod(self.sizes[a] for a in part.others) * part.item_bytes
        together = part.together
        if together and part.collective == "all_reduce":
            together = num_bytes if num_bytes >= 2 * LARGE_BYTES else 2 * (BUCKET_BYTES + LARGE_BYTES)
        seconds = 0.0
        for leg, leg_bytes in legs(part.collective, num_bytes, self.sizes[part.axis], part.encoding):
            most = together * leg_bytes / num_bytes if num_bytes else together
            least = self._least_s(leg, part.axis, leg_bytes, most) if together else None
            seconds += self.collective_s(leg, part.axis, leg_bytes) if least is None else least
        return seconds

    def _least_s(self, name: str, axis: int, num_bytes: float, together: float) -> float:
        """Return the least seconds that `num_bytes` add to a collective of these and other tensors' bytes."""
        if not name:
            return 0.0
        if name == SLICE:
            return 2 * num_bytes / self.sizes[axis] / self.device.memory_bytes_per_s
        curve = self.communication.curve(cast("Collective", name), axis)
        return num_bytes * curve.least_s_per_byte(num_bytes, max(num_bytes, together))


def _is_gather(tensor: TensorClass, move: Move) -> bool:
    """Return whether the move gathers a parameter."""
    return (tensor.stored or tensor.recomputed) and move.kind.forward == "all_gather"
