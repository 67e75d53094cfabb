"""What is sent between the ranks of two pipeline stages: first in, first out.

A *channel* goes one way, from a stage to another one, for one of forward and backward. It has a process group of its
own: under NCCL what is sent in one group comes one after the other, so that two ranks which send to each other in one
would wait for ever. The receiver posts the next receive as soon as it has taken the one before; where a receive is a
kernel that waits, when it needs the message. The sender goes on while a message is sent; before the next one it waits
for that, and lets go of its memory.

Stages of equal sizes have a channel at each place, and all that a rank has goes to one other. Of unlike ones a channel
has all ranks of both, and goes by *pieces* (`pcg.pieces`): tensor after tensor, of each the receivers in order on
the one side, the senders on the other. So there is a piece that both its ends have come to, until there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.groups import across
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.pcg.errors import DistributedError
from shardwright.pcg.pieces import Piece, Where
from shardwright.pcg.step.meshes import first_ranks


class Kind(NamedTuple):
    """What a tensor of a message is like, and the pieces in which it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]


class Message(NamedTuple):
    """What is sent at once, in words, and its tensors."""

    what: str
    kinds: tuple[Kind, ...]


Works = list[tuple[dist.Work, int]]
"""With the rank that each waits for."""


def waits_in_kernels(device: torch.device) -> bool:
    """Whether a receive is a kernel, which runs until the message has come.

    What a GPU does not begin beside a running kernel (some of the first loading of other kernels, to free memory) then
    waits for the sender, who must not wait for what this rank does next.
    """
    return device.type == "cuda"


class Channel:
    """Of one way between two stages, on one side of it."""

    way: str  # in words
    exchange: Callable[[Tensor, int, dist.ProcessGroup], dist.Work | None]

    def __init__(self, ranks: Ranks, stage: int, group: dist.ProcessGroup) -> None:
        self.ranks, self.peer, self.group = ranks, stage, group
        self.first = first_ranks(ranks.meshes)[stage]
        self.timeout = timedelta(seconds=ranks.timeout_s)

    def connect(self, places: Iterable[int]) -> None:
        """Exchange a byte with these ranks of the other stage, one after the other."""
        for place in sorted(set(places)):
            byte = torch.zeros(1, dtype=torch.uint8, device=self.ranks.device)
            work = self.exchange(byte, self.first + place, self.group)
            self.wait([] if work is None else [(work, self.first + place)], "the first byte")

    def wait(self, works: Works, what: str) -> None:
        rank = self.first
        try:
            for work, rank in works:  # noqa: B007 - that of the one that failed
                work.wait(self.timeout)
        except RuntimeError as error:
            raise DistributedError(
                f"rank {dist.get_rank()}, pipeline stage {self.ranks.stages.rank}: waited for {what}, "
                f"{self.way} stage {self.peer} (rank {rank}): {str(error).strip()}; that rank has "
                "probably failed or is stuck, see its output; start all ranks anew"
            ) from error


class Outgoing(Channel):
    """Sends to another stage."""

    way = "which goes to"
    exchange = staticmethod(dist.isend)

    def __init__(self, ranks: Ranks, stage: int, group: dist.ProcessGroup) -> None:
        super().__init__(ranks, stage, group)
        self.running: tuple[str, list[Tensor], Works] | None = None

    def send(self, what: str, values: Sequence[Tensor], pieces: Sequence[Sequence[Piece]]) -> None:
        """`pieces`: of each value, those that this rank sends."""
        self.finish()
        sent, works = list[Tensor](), Works()
        for value, own in zip(values, pieces, strict=True):
            for piece in own:
                sent.append(_plain(part_of(value.detach(), piece)))
                work = self.exchange(sent[-1], self.first + piece.place, self.group)
                works += [] if work is None else [(work, self.first + piece.place)]
        self.running = what, sent, works

    def finish(self) -> None:
        """Wait for what was sent last."""
        if self.running is not None:
            what, _, works = self.running
            self.wait(works, what)
            self.running = None


class Incoming(Channel):
    """Receives from another stage."""

    way = "which comes from"
    exchange = staticmethod(dist.irecv)

    def __init__(self, ranks: Ranks, stage: int, group: dist.ProcessGroup) -> None:
        super().__init__(ranks, stage, group)
        self.todo = deque[Message]()
        self.posted: tuple[Message, list[list[Tensor]], Works] | None = None

    def begin(self, messages: Iterable[Message]) -> None:
        """All that will come in a step, in order."""
        self.todo, self.posted = deque(messages), None
        if not waits_in_kernels(self.ranks.device):
            self._post()

    def take(self) -> list[Tensor]:
        """The next message."""
        if self.posted is None:
            self._post()
        assert self.posted is not None, "nothing more is to come"
        message, values, works = self.posted
        self.wait(works, message.what)
        self.begin(self.todo)
        return [joined(kind, parts, self.ranks.device) for kind, parts in zip(message.kinds, values, strict=True)]

    def _post(self) -> None:
        self.posted = None
        if self.todo:
            message, works = self.todo.popleft(), Works()
            values = [[self._received(piece, kind.dtype, works) for piece in kind.pieces] for kind in message.kinds]
            self.posted = message, values, works

    def _received(self, piece: Piece, dtype: torch.dtype, works: Works) -> Tensor:
        """Room for a piece, which is posted."""
        room = _plain(torch.empty(piece.shape, dtype=dtype, device=self.ranks.device))
        work = self.exchange(room, self.first + piece.place, self.group)
        works += [] if work is None else [(work, self.first + piece.place)]
        return room


def part_of(value: Tensor, piece: Piece) -> Tensor:
    """What is sent of it."""
    return (value if piece.is_whole else value[_at(piece.where, value.shape)]).contiguous()


def joined(kind: Kind, parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """What has come of a value, piece by piece. Where several ranks send the same place, they are summands."""
    if len(parts) == 1 and kind.pieces[0].is_whole:
        return parts[0].view(kind.dtype)
    whole = torch.zeros(kind.shape, dtype=kind.dtype, device=device)
    for piece, part in zip(kind.pieces, parts, strict=True):
        whole[_at(piece.where, kind.shape)] += part.view(kind.dtype)
    return whole


def _at(where: Where, shape: Sequence[int]) -> tuple[slice | Tensor, ...]:
    """As torch indexes a tensor."""
    if all(own is None or isinstance(own, range) for own in where):
        return tuple(slice(None) if own is None else slice(own[0], own[-1] + 1) for own in where)
    dims = [torch.tensor(list(range(size) if own is None else own)) for own, size in zip(where, shape, strict=True)]
    return tuple(torch.meshgrid(*dims, indexing="ij"))


def _plain(value: Tensor) -> Tensor:
    """In a dtype that every library sends."""
    return value.view(torch.uint8) if value.dtype == torch.bool else value


def channels(ranks: Ranks, ways: Iterable[tuple[str, int, int]]) -> dict[tuple[str, int, int], Outgoing | Incoming]:
    """Those of this rank, in order: by pass, from stage, to stage. Every rank of every stage names the same ones."""
    own, found = ranks.stages.rank, dict[tuple[str, int, int], Outgoing | Incoming]()
    for way in sorted(set(ways)):
        name, source, target = way
        if source == target:
            continue
        if (group := ranks.group(across(ranks.meshes, (source, target)), name)) is not None:
            kind, peer = (Outgoing, target) if own == source else (Incoming, source)
            found[way] = kind(ranks, peer, group)
    return found
