"""What is sent between the ranks at one place of two pipeline stages: first in, first out.

A *channel* goes one way, from a stage to another one, for one of forward and backward. It has a process group of its
own: under NCCL what is sent in one group comes one after the other, so that two ranks which send to each other in one
would wait for ever. The receiver posts the next receive as soon as it has taken the one before. The sender goes on
while a message is sent; before the next one it waits for that, and lets go of its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.launch import Ranks
from shardwright.pcg.errors import DistributedError


class Kind(NamedTuple):
    """What a tensor of a message is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Message(NamedTuple):
    """What is sent at once, in words, and its tensors."""

    what: str
    kinds: tuple[Kind, ...]


class _Channel:
    way: str  # in words

    def __init__(self, ranks: Ranks, stage: int, group: dist.ProcessGroup) -> None:
        self.ranks, self.peer, self.group = ranks, stage, group
        self.timeout = timedelta(seconds=ranks.timeout_s)

    def wait(self, works: Iterable[dist.Work], what: str) -> None:
        try:
            for work in works:
                work.wait(self.timeout)
        except RuntimeError as error:
            raise DistributedError(
                f"rank {dist.get_rank()}, pipeline stage {self.ranks.stages.rank}: waited for {what}, "
                f"{self.way} stage {self.peer} (rank {self.ranks.at(self.peer)}): {str(error).strip()}; that rank has "
                "probably failed or is stuck, see its output; start all ranks anew"
            ) from error


class Outgoing(_Channel):
    """Sends to another stage."""

    way = "which goes to"

    def __init__(self, ranks: Ranks, stage: int, group: dist.ProcessGroup) -> None:
        super().__init__(ranks, stage, group)
        self.running: tuple[str, list[Tensor], list[dist.Work]] | None = None

    def send(self, what: str, values: Sequence[Tensor]) -> None:
        self.finish()
        sent, to = [_plain(value.detach()).contiguous() for value in values], self.ranks.at(self.peer)
        works = [dist.isend(value, to, self.group) for value in sent]
        self.running = what, sent, [work for work in works if work is not None]

    def finish(self) -> None:
        """Wait for what was sent last."""
        if self.running is not None:
            what, _, works = self.running
            self.wait(works, what)
            self.running = None


class Incoming(_Channel):
    """Receives from another stage."""

    way = "which comes from"

    def __init__(self, ranks: Ranks, stage: int, group: dist.ProcessGroup) -> None:
        super().__init__(ranks, stage, group)
        self.todo = deque[Message]()
        self.posted: tuple[Message, list[Tensor], list[dist.Work]] | None = None

    def begin(self, messages: Iterable[Message]) -> None:
        """All that will come in a step, in order."""
        self.todo = deque(messages)
        self._post()

    def take(self) -> list[Tensor]:
        """The next message."""
        assert self.posted is not None, "nothing more is to come"
        message, values, works = self.posted
        self.wait(works, message.what)
        self._post()
        return [value.view(kind.dtype) for value, kind in zip(values, message.kinds, strict=True)]

    def _post(self) -> None:
        self.posted = None
        if self.todo:
            message, source = self.todo.popleft(), self.ranks.at(self.peer)
            values = [_plain(torch.empty(k.shape, dtype=k.dtype, device=self.ranks.device)) for k in message.kinds]
            works = [dist.irecv(value, source, self.group) for value in values]
            self.posted = message, values, [work for work in works if work is not None]


def _plain(value: Tensor) -> Tensor:
    """In a dtype that every library sends."""
    return value.view(torch.uint8) if value.dtype == torch.bool else value


def channels(ranks: Ranks, ways: Iterable[tuple[str, int, int]]) -> dict[tuple[str, int, int], Outgoing | Incoming]:
    """Those of this rank: by pass, from stage, to stage. Every rank of every stage names the same ones."""
    own, found = ranks.stages.rank, dict[tuple[str, int, int], Outgoing | Incoming]()
    for way in sorted(set(ways)):
        name, source, target = way
        if source == target:
            continue
        if (group := ranks.across((source, target), name)) is not None:
            kind, peer = (Outgoing, target) if own == source else (Incoming, source)
            found[way] = kind(ranks, peer, group)
    return found
