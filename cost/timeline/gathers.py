"""Gathered blocks, whose memory is pooled and always there."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.cost.timeline.codes import Codes, gathered
from shardwright.cost.timeline.passes import Pass
from shardwright.cost.timeline.pool import is_direct
from shardwright.pcg.step.chunk import Block
from shardwright.pcg.step.messages import Message
from shardwright.pcg.step.parameters import Parameter
from shardwright.pcg.step.verbs import VERBS, Action, Microbatch


class Gathering(Pass):
    """A pass with the gathers of its blocks."""

    def await_gather(self, action: Action) -> None:
        if action.number not in self.gathers:
            return
        self.recorder.await_([self.gathers[action.number]])
        block = self.chunk.blocks[action.number]
        if (codes := self._codes(block)) is not None:
            microbatch = self._gathered_in(block)
            self.recorder.compute(f"decode {block.parameters[0].home}", codes.decode_s, microbatch=microbatch)

    def _codes(self, block: Block) -> Codes | None:
        size = self.steps.size_of((block.slices.axis,))
        return gathered(self.steps, block.parameters, block.used_bytes, size)

    def _gathered_in(self, block: Block) -> Microbatch:
        """Return the microbatches in which a block's values arrive; it may be there in others."""
        return "first" if block.slices.lifetime == "step" else "every"

    def launch_gather(self, action: Action) -> None:
        number, microbatch = action.number, action.microbatch
        block = self.chunk.blocks[number]
        axis, num_bytes, encoding = block.slices.axis, block.used_bytes, block.parameters[0].gathered_as
        collective, name, codes = VERBS["gather"].collective, f"gather {block.parameters[0].home}", self._codes(block)
        if codes is not None:
            num_bytes, home = codes.num_bytes, block.parameters[0].home
            encoded = self.recorder.compute(f"encode {home}", codes.encode_s, microbatch=microbatch)
            self.recorder.take("temporary", codes.encode_bytes, encoded, (encoded,), microbatch, name=name)
        seconds = self.steps.sent_s(collective, axis, num_bytes, encoding)
        sent = self._messages(collective, block.parameters)
        task = self.recorder.launch(name, axis, seconds, blocks=False, messages=sent, microbatch=microbatch)
        if codes is not None:
            self.recorder.take("temporary", codes.held_bytes, task, (task,), microbatch, name=f"codes of {name}")
        if self.steps.cluster.backend == "gloo":  # torch's all-gather writes to separate memory first
            self.recorder.take("communication", num_bytes, task, (task,), microbatch, name=name)
        self.gathers[number] = task

    def _messages(self, collective: str, parameters: Sequence[Parameter]) -> tuple[Message, ...]:
        """Return the messages of a block: one per parameter that goes straight to its place, one for all others."""
        gathers = collective == VERBS["gather"].collective
        direct, packed, is_sent = list[float](), 0.0, False
        axes = {p.slices.axis for p in parameters if p.slices is not None}
        size, encoding = self.steps.size_of(axes), None
        for p in parameters:
            num_bytes = p.used_bytes if gathers else p.summed_bytes
            sent_bytes = p.gathered_sent(size) if gathers else p.scattered_sent(size)
            encoding = p.gathered_as if gathers else p.summed_as
            sent = gathers or (p.grad and p.slices is not None and p.slices.copied)
            if not is_direct(self.steps, p, num_bytes):
                packed, is_sent = packed + sent_bytes, is_sent or sent
            elif sent:
                direct.append(sent_bytes)
        return self.steps.sent_messages(collective, axes, [*direct, packed if is_sent else 0.0], encoding)
