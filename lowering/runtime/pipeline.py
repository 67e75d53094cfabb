"""A step of a rank in a pipeline stage: it executes the actions of its schedule, and exchanges tensors with neighbours.

What arrives before an item, what is sent after it and what ends the step are actions of the list too (`Stages.listed`,
`Stages.end`); `VERBS` names the methods here that do them. If a stage has several chunks, each has its own runner.
Gradients of a chunk are summed over devices in the backward of its last microbatch, as without stages. Gradients of
parameters that several stages have are summed over these stages at the end of the step.

In its first step a GPU loads kernels, which may wait for running kernels, and NCCL connects ranks, which wait for each
other. So the first step takes one microbatch after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright.lowering.random.exact import Draw
from shardwright.lowering.ranks.channels import Incoming, Kind, Message, Outgoing, channels, waits_in_kernels
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.ranks.picked import Work
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.ranks.telling import Telling, Told
from shardwright.lowering.runtime.apart import Apart, give_to_weights
from shardwright.lowering.runtime.collectives import start_total
from shardwright.lowering.runtime.runner import Runner
from shardwright.lowering.runtime.shared import Shared
from shardwright.pcg.errors import DistributedError
from shardwright.pcg.node import is_result
from shardwright.pcg.stages import BACKWARD, FORWARD, Stages, given
from shardwright.pcg.step.late import LOSS
from shardwright.pcg.step.schedules import Item, Transfer, one_by_one
from shardwright.pcg.step.verbs import VERBS

Scale = Callable[[Tensor], Tensor]
Alike = Callable[[], AbstractContextManager[None]]
Outcome = Mapping[str, Tensor]
"""What every rank knows after a step, by key: the loss, or its parts of the model's results."""
_List = tuple[list[tuple[Incoming, list[Message]]], list[tuple[str, str, Item | Transfer]]]
"""What every receiving end expects in a step, and the actions: in words, with the method that does a transfer."""


class Pipeline:
    """The pipeline as one rank sees it: its actions and its channels."""

    def __init__(
        self,
        stages: Stages,
        runners: Sequence[Runner],
        ranks: Ranks,
        loss_axis: Axis | None,
        by_microbatch: Collection[str],
        shared: Shared,
    ) -> None:
        """Open the channels. `runners`: one for each chunk of this stage, in order.

        `loss_axis`: the axis over which the last stage sums the loss. `by_microbatch`: buffers that every microbatch
        updates. `shared`: the parameters that several stages train.
        """
        self.shared = shared
        self.stages, self.runners, self.ranks, self.loss_axis = stages, list(runners), ranks, loss_axis
        self.stage = stage = ranks.stages.rank
        self.items, self.by_microbatch = stages.items[stage], by_microbatch
        self.num_microbatches = 1 if ranks.time is None else ranks.time.size
        types = stages.graph.types
        self.trained = {name for names in stages.sent for name in names if types[name].grad}
        crossed = [
            each
            for number, items in enumerate(stages.items)
            for each in stages.listed(number, [item for item in items if not item.microbatch])
            if isinstance(each, Transfer)
        ]
        self.channels = channels(ranks, (each.channel for each in crossed))
        own = [each for each in crossed if stage == (each.source if each.verb == "send" else each.target)]
        self.kinds = {(each.verb, each.item.direction, each.boundary): self._kinds(each) for each in own}
        self.lists: dict[tuple[bool, bool], _List] = {}
        self.stepped = set[bool]()  # whether there was a step without backward, and one with
        self.shared_results = {key: Told(types[name], stage) for key, name, stage in stages.shared_results}
        self.telling = Telling(ranks, self.shared_results.values())
        self.mail: dict[tuple[str, int, int], list[Tensor]] = {}  # what a virtual stage needs in a microbatch, or sends
        self.alive: dict[tuple[int, int], tuple[dict[str, Tensor], list[GradientEdge | None]]] = {}
        self.put_off: dict[tuple[int, int], list[Apart]] = {}
        self.outcome = dict[str, Tensor]()  # the loss, or the model's results
        self.work: Work | None = None
        self.now, self.failed = "", ""

    def step(self, local: Sequence[Mapping[str, Tensor]], draw: Draw, scale: Scale | None, alike: Alike) -> Outcome:
        """Run a step and return its outcome.

        `scale` scales the loss for backward; None: no backward. `alike` surrounds each forward, which draws.
        """
        trains = scale is not None
        in_turn = waits_in_kernels(self.ranks.device) and trains not in self.stepped
        if (in_turn, trains) not in self.lists:
            self.lists[in_turn, trains] = self._list(in_turn=in_turn, trains=trains)
        coming, todo = self.lists[in_turn, trains]
        self.alive.clear()
        self.put_off.clear()
        self.mail.clear()
        self.outcome, self.work, self.now = dict(self._rooms()), None, "the beginning of the step"
        try:
            for channel, messages in coming:
                channel.begin(messages)
            for self.now, executor, each in todo:
                if isinstance(each, Transfer):
                    getattr(self, executor)(each)
                elif each.direction == FORWARD:
                    self.forward(each, local[each.microbatch], draw, alike, keep=trains)
                elif each.direction == BACKWARD and scale is not None:
                    self.backward(each, scale)
                else:
                    self.weights(each)
            self._end(trains=trains)
            self.stepped.add(trains)
        except BaseException as error:
            self.failed = f"{self.now}: {error}"
            raise
        return self.outcome

    def _rooms(self) -> Iterator[tuple[str, Tensor]]:
        """Yield memory for what a step gives. The loss is a sum over microbatches, and each result is of the only one.

        A stage that gives a result has it in memory of its own.
        """
        for key, (kind, stage) in self.shared_results.items():
            shape, dtype = kind.local_shape(self.ranks.mesh), getattr(torch, kind.dtype)
            if key == LOSS or stage != self.stage:
                yield key, torch.zeros(shape, dtype=dtype, device=self.ranks.device)

    def check_alive(self) -> None:
        """Raise if an earlier step has failed, whose messages may still be on their way between stages."""
        if self.failed:
            raise DistributedError(f"a step before failed ({self.failed}), and stages no longer agree; start all anew")

    def _list(self, *, in_turn: bool, trains: bool) -> _List:
        """Return the list of a step. `in_turn`: one microbatch after the other; `trains`: with backward."""
        order = one_by_one(self.items) if in_turn else self.items
        items = [item for item in order if trains or item.direction == FORWARD]
        coming = {own: list[Message]() for own in self.channels.values() if isinstance(own, Incoming)}
        todo = list[tuple[str, str, Item | Transfer]]()
        for each in self.stages.listed(self.stage, items):
            if isinstance(each, Item):
                todo.append((self._named(each), "", each))
                continue
            todo.append((self._named(each.item), VERBS[each.verb].executor or "", each))
            if isinstance(channel := self.channels[each.channel], Incoming):
                kinds = self.kinds[each.verb, each.item.direction, each.boundary]
                coming[channel].append(Message(f"what {self._named(each.item)} needs", kinds))
        return list(coming.items()), todo

    def _end(self, *, trains: bool) -> None:
        """Wait for all that is sent, and do what ends the step."""
        self.now = "the end of the step"
        for channel in self.channels.values():
            if isinstance(channel, Outgoing):
                channel.finish()
        if self.work is not None:
            self.work.wait()
        for action in self.stages.end(self.stage, trains=trains):
            if executor := VERBS[action.verb].executor:
                getattr(self, executor)()

    # ---- actions ----

    def forward(self, item: Item, batch: Mapping[str, Tensor], draw: Draw, alike: Alike, *, keep: bool) -> None:
        """Run a forward, and add the microbatch's summand of the loss if this stage computes it."""
        runner, stage = self.runners[item.chunk], self._virtual(item)
        arrived = self.mail.pop((FORWARD, stage, item.microbatch), [])
        got = dict(zip(self.stages.received(stage), arrived, strict=True))
        for name in self.trained.intersection(got):
            got[name].requires_grad_(keep)
        self._begin(runner, item, frees=not keep)
        with torch.set_grad_enabled(keep), alike():
            outputs = runner.run({**batch, **got}, draw)
        sent = [outputs.pop(given(name)) for name in self.stages.given(stage)]
        loss = outputs.pop(LOSS, None)
        self.outcome |= {key: outputs.pop(key).contiguous() for key in [*outputs] if is_result(key)}
        self.mail[FORWARD, stage + 1, item.microbatch] = [value.detach() for value in sent]
        if keep:
            self.alive[item.chunk, item.microbatch] = got, self._roots(stage, sent, loss)
        written = {k: v for k, v in outputs.items() if self._is_last(item) or k in self.by_microbatch}
        runner.write_back(written)
        if loss is not None:
            self.outcome[LOSS] += loss.detach()
        if runner.sums_loss(first=not item.microbatch, last=self._is_last(item)):
            self.work = start_total(self.outcome[LOSS], self.loss_axis)

    def backward(self, item: Item, scale: Scale) -> None:
        runner, stage = self.runners[item.chunk], self._virtual(item)
        got, roots = self.alive.pop((item.chunk, item.microbatch))
        gradients = self.mail.pop((BACKWARD, stage, item.microbatch), [])
        if stage + 1 == len(self.stages):
            gradients = [scale(torch.ones_like(self.outcome[LOSS]))]
        self._begin(runner, item, frees=self._is_last(item))
        pairs = [(root, g) for root, g in zip(roots, gradients, strict=True) if root is not None]
        ends = self._is_last(item) and not runner.in_two
        runner.reducer.watch(*(root for root, _ in pairs), first=item.microbatch == 0, last=ends)
        torch.autograd.backward([root for root, _ in pairs], [g for _, g in pairs])
        if runner.in_two:
            self.put_off[item.chunk, item.microbatch] = runner.saved.put_off.copy()
            runner.saved.put_off.clear()
        back = [got[name] for name in self.stages.received(stage) if name in self.trained]
        given_back = [torch.zeros_like(x) if x.grad is None else x.grad for x in back]
        self.mail[BACKWARD, stage - 1, item.microbatch] = given_back

    def _roots(self, stage: int, sent: Sequence[Tensor], loss: Tensor | None) -> list[GradientEdge | None]:
        """Return the starts of a stage's backward: autograd's nodes of its results, so that the values can be freed."""
        results = [y for name, y in zip(self.stages.given(stage), sent, strict=True) if name in self.trained]
        results = results if loss is None else [loss]
        return [get_gradient_edge(y) if y.requires_grad else None for y in results]

    def weights(self, item: Item) -> None:
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

    def receive(self, transfer: Transfer) -> None:
        """Wait for what the next item reads."""
        channel = self.channels[transfer.channel]
        assert isinstance(channel, Incoming)
        self.mail[self._letter(transfer)] = channel.take()

    def send(self, transfer: Transfer) -> None:
        """Send what the last item has given."""
        channel = self.channels[transfer.channel]
        assert isinstance(channel, Outgoing)
        values = self.mail.pop(self._letter(transfer))
        kinds = self.kinds["send", transfer.item.direction, transfer.boundary]
        channel.send(f"what {self.now} gives", values, [kind.pieces for kind in kinds])

    def tell(self) -> None:
        """Send the loss, or each of the model's results, from its stage to all others."""
        for key, told in self.shared_results.items():
            self.now = f"{key.lstrip('.')}, which comes from stage {told.stage}"
            self.outcome[key] = self.telling.tell(told, self.outcome[key], self.now)

    def share(self) -> None:
        """Sum the gradients that several stages have, and hand them over."""
        self.now = "the sum of gradients that several stages have"
        first = self.runners[0]
        first.reducer.hand_over(self.shared.summed(first.held))

    def _kinds(self, transfer: Transfer) -> tuple[Kind, ...]:
        """Return the kind and this rank's pieces of each tensor that is sent or received."""
        types, place = self.stages.graph.types, self.ranks.place
        return tuple(
            Kind(
                types[name].local_shape(self.ranks.mesh),
                getattr(torch, types[name].dtype),
                self.stages.pieces(transfer, name, place),
            )
            for name in self.stages.crossing(transfer)
        )

    def _letter(self, transfer: Transfer) -> tuple[str, int, int]:
        """Return the direction, the virtual stage that reads, and the microbatch."""
        chunk, microbatch, direction = transfer.reader
        return direction, chunk * self.ranks.stages.size + transfer.target, microbatch

    # ---- words and numbers ----

    def _virtual(self, item: Item) -> int:
        return item.chunk * self.ranks.stages.size + self.stage

    def _is_last(self, item: Item) -> bool:
        return item.microbatch == self.num_microbatches - 1

    def _named(self, item: Item) -> str:
        chunk = f", chunk {item.chunk}" if len(self.runners) > 1 else ""
        return f"{item.direction} of microbatch {item.microbatch + 1} of {self.num_microbatches}{chunk}"
