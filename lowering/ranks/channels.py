"""Messages between the ranks of two pipeline stages: first in, first out.

A *channel* goes one way, from one stage to another, for either forward or backward. It has a process group of its own:
NCCL runs the messages of a group one after the other, so two ranks that send to each other in one group would wait for
ever. The receiver posts the next receive as soon as it has taken the message before. If a receive is a kernel that
waits, it posts the receive only when it needs the message. The sender goes on while a message is sent; before it sends
the next one, it waits for the last and frees its memory.

Stages with equal meshes have a channel at each place, and a rank sends everything to one other rank. Between stages
with unlike meshes, a channel has all ranks of both, and messages go by *pieces* (`pcg.pieces`): tensor after tensor,
with the receivers in order on one side and the senders in order on the other. So, until all are sent, there is always a
piece that both its ends have reached.
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
from shardwright.lowering.ranks.rollcall import culprits
from shardwright.pcg.errors import DistributedError
from shardwright.pcg.pieces import Piece, Where
from shardwright.pcg.step.meshes import first_ranks


class Kind(NamedTuple):
    """The shape and dtype of a tensor of a message, and the pieces in which it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]


class Message(NamedTuple):
    """A message: its description in words, for errors, and the kinds of its tensors."""

    what: str
    kinds: tuple[Kind, ...]


Works = list[tuple[dist.Work, int]]
"""Running transfers, each with the rank that it waits for."""


def waits_in_kernels(device: torch.device) -> bool:
    """Return whether a receive is a kernel, which runs until the message has arrived.

    A GPU does not begin some work beside a running kernel, such as freeing memory or loading some kernels for the first
    time. Such work then waits for the sender, which therefore must not wait for this rank's next action.
    """
    return device.type == "cuda"


class Channel:
    """The end of a channel between two stages that lies in this stage."""

    way: str  # in words
    exchange: Callable[[Tensor, int, dist.ProcessGroup], dist.Work | None]

    def __init__(self, ranks: Ranks, stage: int, group: dist.ProcessGroup) -> None:
        self.ranks, self.peer, self.group = ranks, stage, group
        self.first = first_ranks(ranks.meshes)[stage]
        self.timeout = timedelta(seconds=ranks.timeout_s)

    def wait(self, works: Works, what: str) -> None:
        rank = self.first
        try:
            for work, rank in works:  # noqa: B007 - the rank of the transfer that failed
                work.wait(self.timeout)
        except RuntimeError as error:
            who = culprits() or "that rank has probably failed or is stuck, see its output"
            raise DistributedError(
                f"rank {dist.get_rank()}, pipeline stage {self.ranks.stages.rank}: waited for {what}, "
                f"{self.way} stage {self.peer} (rank {rank}): {str(error).strip()}; {who}; start all ranks anew"
            ) from error


class Outgoing(Channel):
    """The sending end of a channel."""

    way = "which goes to"
    exchange = staticmethod(dist.isend)

    def __init__(self, ranks: Ranks, stage: int, group: dist.ProcessGroup) -> None:
        super().__init__(ranks, stage, group)
        self.running: tuple[str, list[Tensor], Works] | None = None

    def send(self, what: str, values: Sequence[Tensor], pieces: Sequence[Sequence[Piece]]) -> None:
        """Send detached values, once the last message is sent. `pieces`: of each value, the pieces of this rank."""
        self.finish()
        sent, works = list[Tensor](), Works()
        for value, parts in zip(values, pieces, strict=True):
            for piece in parts:
                sent.append(_plain(part_of(value, piece)))
                work = self.exchange(sent[-1], self.first + piece.place, self.group)
                works += [] if work is None else [(work, self.first + piece.place)]
        self.running = what, sent, works

    def finish(self) -> None:
        """Wait until the last message is sent."""
        if self.running is not None:
            what, _, works = self.running
            self.wait(works, what)
            self.running = None


class Incoming(Channel):
    """The receiving end of a channel."""

    way = "which comes from"
    exchange = staticmethod(dist.irecv)

    def __init__(self, ranks: Ranks, stage: int, group: dist.ProcessGroup) -> None:
        super().__init__(ranks, stage, group)
        self.todo = deque[Message]()
        self.posted: tuple[Message, list[list[Tensor]], Works] | None = None

    def begin(self, messages: Iterable[Message]) -> None:
        """Expect these messages, in order, and post the first receive unless it would be a kernel that waits."""
        self.todo, self.posted = deque(messages), None
        if not waits_in_kernels(self.ranks.device):
            self._post()

    def take(self) -> list[Tensor]:
        """Wait for the next message and return its tensors."""
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
        """Post the receive of a piece and return the memory that it arrives in."""
        room = _plain(torch.empty(piece.shape, dtype=dtype, device=self.ranks.device))
        work = self.exchange(room, self.first + piece.place, self.group)
        works += [] if work is None else [(work, self.first + piece.place)]
        return room


def part_of(value: Tensor, piece: Piece) -> Tensor:
    """Return the part of a value that a piece sends, contiguous."""
    return (value if piece.is_whole else value[_at(piece.where, value.shape)]).contiguous()


def joined(kind: Kind, parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a value from its pieces; where several ranks sent the same place, their pieces are added up."""
    if len(parts) == 1 and kind.pieces[0].is_whole:
        return parts[0].view(kind.dtype)
    whole = torch.zeros(kind.shape, dtype=kind.dtype, device=device)
    for piece, part in zip(kind.pieces, parts, strict=True):
        whole[_at(piece.where, kind.shape)] += part.view(kind.dtype)
    return whole


def _at(where: Where, shape: Sequence[int]) -> tuple[slice | Tensor, ...]:
    """Return the place of a piece as an index of torch's tensors."""
    if all(indices is None or isinstance(indices, range) for indices in where):
        return tuple(slice(None) if indices is None else slice(indices[0], indices[-1] + 1) for indices in where)
    dims = [
        torch.tensor(list(range(size) if indices is None else indices))
        for indices, size in zip(where, shape, strict=True)
    ]
    return tuple(torch.meshgrid(*dims, indexing="ij"))


def _plain(value: Tensor) -> Tensor:
    """Return a value in a dtype that every library sends: bool as uint8."""
    return value.view(torch.uint8) if value.dtype == torch.bool else value


def channels(ranks: Ranks, ways: Iterable[tuple[str, int, int]]) -> dict[tuple[str, int, int], Outgoing | Incoming]:
    """Make this rank's channels, in order: by pass, from stage, to stage. Every rank must pass the same `ways`."""
    stage, by_way = ranks.stages.rank, dict[tuple[str, int, int], Outgoing | Incoming]()
    for way in sorted(set(ways)):
        name, source, target = way
        if source == target:
            continue
        if (group := ranks.group(across(ranks.meshes, (source, target)), name)) is not None:
            kind, peer = (Outgoing, target) if stage == source else (Incoming, source)
            by_way[way] = kind(ranks, peer, group)
    return by_way
