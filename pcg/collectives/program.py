"""The program of each rank: blocks of steps that send and receive over channels, and wait for each other's steps.

MSCCL's XML files say this, and a schedule becomes this (`threads`). The blocks of a rank run side by side, the steps of
a block one after the other. A connection is a queue from one rank to another on a channel: its k-th send meets its k-th
receive. `verifier.collectives` says whether a program is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from shardwright.pcg.collectives.collective import Collective, collective
from shardwright.pcg.errors import ScheduleError

Buffer = Literal["input", "output", "scratch"]
BUFFERS: tuple[Buffer, ...] = get_args(Buffer)
NO_PEER = -1


class Op(NamedTuple):
    """An operation of a step. It adds the received data, its source and its destination; it stores or sends the sum."""

    receives: bool = False
    sends: bool = False
    reads_source: bool = False
    reads_destination: bool = False
    stores: bool = False


OPS: Mapping[str, Op] = {
    "s": Op(sends=True, reads_source=True),
    "r": Op(receives=True, stores=True),
    "rcs": Op(receives=True, stores=True, sends=True),
    "rrc": Op(receives=True, reads_source=True, stores=True),
    "rrcs": Op(receives=True, reads_source=True, stores=True, sends=True),
    "rrs": Op(receives=True, reads_source=True, sends=True),
    "cpy": Op(reads_source=True, stores=True),
    "re": Op(reads_source=True, reads_destination=True, stores=True),
    "nop": Op(),
}
"""The operations by MSCCL's names: send, receive, copy, reduce and what they are composed to; `nop` only waits."""


class Place(NamedTuple):
    """Chunks of a buffer, from `offset` on."""

    buffer: Buffer
    offset: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.offset}]"


class Step(NamedTuple):
    """A step on neighbouring chunks. `after`: the block and step of the same rank that it waits for."""

    op: str
    source: Place
    destination: Place
    num_chunks: int = 1
    after: tuple[int, int] | None = None
    awaited: bool = False


class Block(NamedTuple):
    """Steps one after the other; they send to one rank and receive from one, over one channel."""

    send: int
    receive: int
    channel: int
    steps: tuple[Step, ...]


class RankProgram(NamedTuple):
    """The blocks of a rank, and the chunks of its buffers. `copies`: from the input to the output, before anything."""

    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    blocks: tuple[Block, ...]
    copies: tuple[tuple[int, int], ...] = ()

    def chunks(self, buffer: Buffer) -> int:
        return self[BUFFERS.index(buffer)]  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class Program:
    """The programs of all ranks for one collective.

    Attributes:
        kind: the collective, or another name, of which nothing is known.
        num_chunks: pieces of the larger of a rank's input and output.
        in_place, out_of_place: whether it may run where input and output are the same memory; where they are not.
        min_bytes, max_bytes: the sizes it is meant for; 0 as `max_bytes` is no limit.
    """

    name: str
    kind: str
    num_chunks: int
    ranks: tuple[RankProgram, ...]
    in_place: bool
    out_of_place: bool
    protocol: str = "Simple"
    num_channels: int = 1
    min_bytes: int = 0
    max_bytes: int = 0
    root: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def collective(self) -> Collective:
        """Return what the program claims to carry out.

        Raises:
            ScheduleError: a name of which nothing is known, or chunks that do not divide by the ranks.
        """
        if self.kind not in SPLIT:
            raise ScheduleError(
                f"{self.name}: expected one of {', '.join(SPLIT)}, got {self.kind!r}; name a collective"
            )
        pieces, rest = divmod(self.num_chunks, self.num_ranks if SPLIT[self.kind] else 1)
        if rest or not pieces:
            problem = f"expected a multiple of {self.num_ranks} chunks, got {self.num_chunks}"
            raise ScheduleError(
                f"{self.name}: {self.kind}: {problem}; cut the buffer so that each rank has equal parts"
            )
        return collective(self.kind, self.num_ranks, pieces, root=self.root)

    def shared_with_input(self, rank: int, output_offset: int) -> int:
        """Return the offset in the input that is an offset of the output where the program runs in place.

        It may lie outside of what the input has: an all-gather's input is a part of its output.
        """
        return shared_offset(self.kind, self.num_chunks // self.num_ranks, rank, output_offset)


def shared_offset(kind: str, pieces: int, rank: int, output_offset: int) -> int:
    """Return where in the input an offset of the output is, in place; `pieces`: the chunks of one rank's part."""
    if kind in ("all_gather", "gather"):
        return output_offset - rank * pieces
    return output_offset + rank * pieces if kind in ("reduce_scatter", "scatter") else output_offset


SPLIT: Mapping[str, bool] = {
    "all_gather": True, "reduce_scatter": True, "all_reduce": False, "broadcast": False, "reduce": False,
    "gather": True, "scatter": True, "all_to_all": True,
}  # fmt: skip
"""Whether `num_chunks` counts the chunks of all ranks."""
