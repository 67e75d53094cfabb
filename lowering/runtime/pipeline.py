"""A step of a rank in a pipeline stage: it executes the actions of its schedule, and exchanges tensors with neighbours.

The list of actions determines the messages before and after each action. If a stage has several chunks, each has its
own runner. Gradients of a chunk are summed over devices in the backward of its last microbatch, as without stages.
Gradients of parameters that several stages have are summed over these stages at the end of the step.

In its first step a GPU loads kernels, which may wait for running kernels, and NCCL connects ranks, which wait for each
other. So the first step takes one microbatch after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright.lowering.random.exact import Draw
from shardwright.lowering.ranks.channels import Incoming, Kind, Message, Outgoing, channels, waits_in_kernels
from shardwright.lowering.ranks.groups import first_in
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.runtime.apart import Apart, give_to_weights
from shardwright.lowering.runtime.runner import Runner
from shardwright.lowering.runtime.shared import Shared
from shardwright.pcg.errors import DistributedError
from shardwright.pcg.pieces import Piece
from shardwright.pcg.stages import BACKWARD, FORWARD, Stages, given
from shardwright.pcg.step.late import LOSS
from shardwright.pcg.step.schedules import Item, one_by_one

Scale = Callable[[Tensor], Tensor]


class Pipeline:
    """The pipeline as one rank sees it: its actions and its channels."""

    def __init__(
        self,
        stages: Stages,
        runners: Sequence[Runner],
        items: Sequence[Item],
        ranks: Ranks,
        loss_axis: Axis | None,
        by_microbatch: Collection[str],
        shared: Shared,
    ) -> None:
        """Open the channels. `runners`: one for each chunk of this stage, in order. `items`: their actions.

        `loss_axis`: the axis over which the last stage sums the loss. `by_microbatch`: buffers that every microbatch
        updates. `shared`: the parameters that several stages train.
        """
        self.shared = shared
        self.stages, self.runners, self.ranks, self.loss_axis = stages, list(runners), ranks, loss_axis
        self.items, self.by_microbatch = list(items), by_microbatch
        self.num_microbatches = 1 if ranks.time is None else ranks.time.size
        types = stages.graph.types
        self.trained = {name for names in stages.sent for name in names if types[name].grad}
        hops = [(own, own + 1, own - 1) for own in range(ranks.stages.rank, len(stages), ranks.stages.size)]
        out = [hop for own, after, before in hops for hop in ((FORWARD, own, after), (BACKWARD, own, before))]
        into = [hop for own, after, before in hops for hop in ((FORWARD, before, own), (BACKWARD, after, own))]
        self.pieces = {hop: self._sent(*hop) for hop in out}
        self.kinds = {hop: self._received(*hop) for hop in into}
        size = ranks.stages.size
        ways = list[tuple[str, int, int]]()
        for stage in range(len(stages) - 1):
            here, there = stage % size, (stage + 1) % size
            ways += [(FORWARD, here, there), (BACKWARD, there, here)]
        self.channels = channels(ranks, ways)
        self.stepped = set[bool]()  # whether there was a step without backward, and one with
        self.last = (len(stages) - 1) % size
        self.teller = first_in(ranks.meshes, range(size), dist.get_rank(), self.last)
        self.mail: dict[tuple[str, int, int], list[Tensor]] = {}  # between chunks of one stage
        self.alive: dict[tuple[int, int], tuple[dict[str, Tensor], list[GradientEdge | None]]] = {}
        self.put_off: dict[tuple[int, int], list[Apart]] = {}
        self.loss = torch.zeros((), dtype=getattr(torch, types[stages.graph.loss].dtype), device=ranks.device)
        self.now, self.failed = "", ""

    def step(self, local: Sequence[Mapping[str, Tensor]], draw: Draw, scale: Scale | None) -> Tensor:
        """Run a step and return the loss, on every rank. `scale` scales the loss for backward; None: no backward."""
        is_first = waits_in_kernels(self.ranks.device) and (scale is not None) not in self.stepped
        order = one_by_one(self.items) if is_first else self.items
        items = [item for item in order if scale is not None or item.direction == FORWARD]
        self.alive.clear()
        self.put_off.clear()
        self.mail.clear()
        work: dist.Work | None = None
        loss, self.now = torch.zeros_like(self.loss), "the beginning of the step"
        try:
            for channel in self.channels.values():
                if isinstance(channel, Incoming):
                    channel.begin(self._to_come(items, channel))
            for item in items:
                self.now = self._named(item)
                if item.direction == FORWARD:
                    summand = self._forward(item, local[item.microbatch], draw, keep=scale is not None)
                    if summand is not None:
                        loss += summand
                        work = self._start_sum(loss) if self._is_last(item) else work
                elif item.direction == BACKWARD and scale is not None:
                    self._backward(item, scale)
                else:
                    self._weights(item)
            self.now = "the end of the step"
            for channel in self.channels.values():
                if isinstance(channel, Outgoing):
                    channel.finish()
            if work is not None:
                work.wait()
            self._share(loss)
            if scale is not None:
                self.now = "the sum of gradients that several stages have"
                first = self.runners[0]
                first.reducer.hand_over(self.shared.summed(first.held))
            self.stepped.add(scale is not None)
        except BaseException as error:
            self.failed = f"{self.now}: {error}"
            raise
        return loss

    def check_alive(self) -> None:
        """Raise if an earlier step has failed, whose messages may still be on their way between stages."""
        if self.failed:
            raise DistributedError(f"a step before failed ({self.failed}), and stages no longer agree; start all anew")

    # ---- actions ----

    def _forward(self, item: Item, batch: Mapping[str, Tensor], draw: Draw, *, keep: bool) -> Tensor | None:
        """Run a forward; return the microbatch's summand of the loss, or None if this stage does not compute it."""
        runner, stage = self.runners[item.chunk], self._virtual(item)
        names = self.stages.received(stage)
        got = dict(zip(names, self._take(FORWARD, stage - 1, stage, item), strict=True)) if names else {}
        for name in self.trained.intersection(got):
            got[name].requires_grad_(keep)
        self._begin(runner, item, frees=not keep)
        with torch.set_grad_enabled(keep):
            outputs = runner.run({**batch, **got}, draw)
        sent = [outputs.pop(given(name)) for name in self.stages.given(stage)]
        loss = outputs.pop(LOSS, None)
        self._send(FORWARD, stage, stage + 1, item, sent)
        if keep:
            self.alive[item.chunk, item.microbatch] = got, self._roots(stage, sent, loss)
        written = {k: v for k, v in outputs.items() if self._is_last(item) or k in self.by_microbatch}
        runner.write_back(written)
        return None if loss is None else loss.detach()

    def _backward(self, item: Item, scale: Scale) -> None:
        runner, stage = self.runners[item.chunk], self._virtual(item)
        got, roots = self.alive.pop((item.chunk, item.microbatch))
        gradients: list[Tensor] = []
        if stage + 1 == len(self.stages):
            gradients = [scale(torch.ones_like(self.loss))]
        elif self.trained.intersection(self.stages.given(stage)):
            gradients = self._take(BACKWARD, stage + 1, stage, item)
        self._begin(runner, item, frees=self._is_last(item))
        pairs = [(root, g) for root, g in zip(roots, gradients, strict=True) if root is not None]
        ends = self._is_last(item) and not runner.in_two
        runner.reducer.watch(*(root for root, _ in pairs), first=item.microbatch == 0, last=ends)
        torch.autograd.backward([root for root, _ in pairs], [g for _, g in pairs])
        if runner.in_two:
            self.put_off[item.chunk, item.microbatch] = runner.saved.put_off.copy()
            runner.saved.put_off.clear()
        back = [got[name] for name in self.stages.received(stage) if name in self.trained]
        self._send(BACKWARD, stage, stage - 1, item, [torch.zeros_like(x) if x.grad is None else x.grad for x in back])

    def _roots(self, stage: int, sent: Sequence[Tensor], loss: Tensor | None) -> list[GradientEdge | None]:
        """Return the starts of a stage's backward: autograd's nodes of its results, so that the values can be freed."""
        results = [y for name, y in zip(self.stages.given(stage), sent, strict=True) if name in self.trained]
        results = results if loss is None else [loss]
        return [get_gradient_edge(y) if y.requires_grad else None for y in results]

    def _weights(self, item: Item) -> None:
        """Run the second part of a backward and, for the last microbatch, the sums over devices."""
        runner, last = self.runners[item.chunk], self._is_last(item)
        if not runner.in_two:
            return
        runner.reducer.watch(first=False, last=last)
        give_to_weights(self.put_off.pop((item.chunk, item.microbatch)))
        if last:
            runner.reducer.finish()

    def _begin(self, runner: Runner, item: Item, *, frees: bool) -> None:
        if self.ranks.time is not None:
            self.ranks.time.rank = item.microbatch
        first = item.microbatch == 0 and item.direction == FORWARD
        runner.blocks.begin(first=first, last=self._is_last(item), frees=frees and self._is_last(item))

    # ---- between stages ----

    def _take(self, way: str, source: int, target: int, item: Item) -> list[Tensor]:
        channel = self._channel(way, source, target)
        if isinstance(channel, Incoming):
            return channel.take()
        return [value.detach() for value in self.mail.pop((way, target, item.microbatch))]

    def _send(self, way: str, source: int, target: int, item: Item, values: Sequence[Tensor]) -> None:
        if not values:
            return
        channel = self._channel(way, source, target)
        if isinstance(channel, Outgoing):
            channel.send(f"what {self._named(item)} gives", values, self.pieces[way, source, target])
        else:
            self.mail[way, target, item.microbatch] = list(values)

    def _channel(self, way: str, source: int, target: int) -> Outgoing | Incoming | None:
        size = self.ranks.stages.size
        return self.channels.get((way, source % size, target % size))

    def _to_come(self, items: Sequence[Item], channel: Incoming) -> Iterator[Message]:
        """Yield the messages of a channel in a step."""
        for item in items:
            stage = self._virtual(item)
            source = stage - 1 if item.direction == FORWARD else stage + 1
            kinds = self.kinds.get((item.direction, source, stage))
            if kinds and self._channel(item.direction, source, stage) is channel:
                yield Message(f"what {self._named(item)} needs", kinds)

    def _crossing(self, way: str, source: int, target: int) -> list[str]:
        """Return the names that a virtual stage sends to its neighbour, in order: values, or those with gradients."""
        names = self.stages.given(min(source, target))
        return [name for name in names if way == FORWARD or name in self.trained]

    def _sent(self, way: str, source: int, target: int) -> list[tuple[Piece, ...]]:
        """Return the pieces that this rank sends of each tensor."""
        number, place = min(source, target), self.ranks.place
        return [
            self.stages.pieces(way, number, name, place, sends=True) for name in self._crossing(way, source, target)
        ]

    def _received(self, way: str, source: int, target: int) -> tuple[Kind, ...]:
        """Return the kind and the pieces of each tensor that this rank receives."""
        types, number, place = self.stages.graph.types, min(source, target), self.ranks.place
        return tuple(
            Kind(
                types[name].local_shape(self.ranks.mesh),
                getattr(torch, types[name].dtype),
                self.stages.pieces(way, number, name, place, sends=False),
            )
            for name in self._crossing(way, source, target)
        )

    def _start_sum(self, loss: Tensor) -> dist.Work | None:
        """Sum the loss over the ranks of the last stage, in place."""
        if self.loss_axis is None or self.loss_axis.group is None:
            return None
        return dist.all_reduce(loss, group=self.loss_axis.group, async_op=True)

    def _share(self, loss: Tensor) -> None:
        """Send the loss from the last stage to all others."""
        column = self.ranks.stages
        self.now = f"the loss, which comes from stage {self.last}"
        if column.group is not None:
            dist.broadcast(loss, self.teller, column.group)

    # ---- words and numbers ----

    def _virtual(self, item: Item) -> int:
        return item.chunk * self.ranks.stages.size + self.ranks.stages.rank

    def _is_last(self, item: Item) -> bool:
        return item.microbatch == self.num_microbatches - 1

    def _named(self, item: Item) -> str:
        chunk = f", chunk {item.chunk}" if len(self.runners) > 1 else ""
        return f"{item.direction} of microbatch {item.microbatch + 1} of {self.num_microbatches}{chunk}"
