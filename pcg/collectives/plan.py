"""A plan of one-sided operations: what MSCCL++'s executor runs on each rank.

Blocks put data into the memory of others, signal over channels, and wait for signals; nothing is received. The words
are those of microsoft/mscclpp 1f5f065d (src/core/executor/execution_plan.cc). `verifier.collectives` says whether a
plan is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.pcg.collectives.collective import Collective, collective
from shardwright.pcg.collectives.program import Buffer
from shardwright.pcg.errors import ScheduleError

Reach = Literal["local", "remote", "switch"]


_Reaches = tuple[Reach, Reach]


class Span(NamedTuple):
    """Chunks of a buffer: of the rank's own, of a peer's, or of all ranks behind a switch.

    `place`: the buffer's name; or the position in the block's list of remote buffers, or of switch channels.
    """

    reach: Reach
    place: Buffer | int
    first: int
    size: int


class Data(NamedTuple):
    """An operation's effect on data: each target gets the source of its own, or the sum of all sources.

    `sources`, `targets`: the reach of the first and of the others. `packets_in`, `packets_out`: from which source and
    target on they are packets, which carry flags, so that reading one waits until it was written.
    """

    sources: _Reaches
    targets: _Reaches
    sums: bool = False
    packets_in: int = 1 << 30
    packets_out: int = 1 << 30


_L: _Reaches = ("local", "local")
_R: _Reaches = ("remote", "remote")
_S: _Reaches = ("switch", "switch")
_LR: _Reaches = ("local", "remote")
DATA: Mapping[str, Data] = {
    "copy": Data(_L, _L), "put": Data(_L, _R), "pws": Data(_L, _R), "pwsf": Data(_L, _R), "get": Data(_R, _L),
    "re": Data(_L, _L, True), "res": Data(_L, _LR, True), "rre": Data(_LR, _L, True), "rres": Data(_LR, _LR, True),
    "ppkt": Data(_L, _R, packets_out=0), "rppkt": Data(_L, _R, packets_in=0, packets_out=0),
    "cpkt": Data(_L, _L, packets_out=0), "upkt": Data(_L, _L, packets_in=0),
    "repkt": Data(_L, _L, True, 1), "respkt": Data(_L, _LR, True, 1, 1), "recpkt": Data(_L, _L, True, 1, 1),
    "recspkt": Data(_L, _LR, True, 1, 1), "glres": Data(_S, _S), "gstore": Data(_L, _S),
    "gstorepkt": Data(_L, _S, packets_out=0),
}  # fmt: skip
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""The collectives that a plan can name, and whose chunks its ranks have alike."""
SYNCHRONISATION = ("nop", "barrier", "signal", "wait", "rlxsignal", "rlxwait", "flush", "sem_acquire", "sem_release")
OPERATIONS = (*DATA, *SYNCHRONISATION, "pipeline")
MOST_SOURCES = MOST_TARGETS = 10


class Action(NamedTuple):
    """An operation of a block.

    channels     positions in the block's list of channels of `channel_type`
    part         which part of how many of each range this block handles; None for all of it
    barrier      the barrier's number, and the blocks that meet there
    body         of a pipeline: the operations that are repeated, over `num_chunks` chunks, `unit_bytes` at a time
    """

    name: str
    sources: tuple[Span, ...] = ()
    targets: tuple[Span, ...] = ()
    channel_type: str = ""
    channels: tuple[int, ...] = ()
    part: tuple[int, int] | None = None
    barrier: tuple[int, int] | None = None
    semaphores: tuple[int, ...] = ()
    reduce_op: str = ""
    body: tuple[Action, ...] = ()
    unit_bytes: int = 0
    num_chunks: int = 0


class PlanBlock(NamedTuple):
    """A block: its operations, and by channel type the rank's channels and remote buffers that it uses."""

    actions: tuple[Action, ...]
    channels: Mapping[str, tuple[int, ...]]
    remote_buffers: Mapping[str, tuple[int, ...]]


class RemoteBuffer(NamedTuple):
    """A peer's buffer, and the types of channels that reach it."""

    rank: int
    buffer: Buffer
    channel_types: tuple[str, ...]


class SwitchGroup(NamedTuple):
    """Ranks behind a switch, which adds and spreads `size` chunks of their buffer."""

    buffer: Buffer
    size: int
    ranks: tuple[int, ...]


class PlanRank(NamedTuple):
    """A rank: its buffers, blocks, and channels. `peers`: by channel type the rank at the other end of each channel."""

    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    blocks: tuple[PlanBlock, ...]
    peers: Mapping[str, tuple[int, ...]]
    groups: tuple[SwitchGroup, ...] = ()
    remote_buffers: tuple[RemoteBuffer, ...] = ()
    semaphores: tuple[int, ...] = ()

    def chunks(self, buffer: Buffer) -> int:
        return {"input": self.input_chunks, "output": self.output_chunks, "scratch": self.scratch_chunks}[buffer]


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks of all ranks for one collective; the other fields are the executor's settings."""

    name: str
    kind: str
    ranks: tuple[PlanRank, ...]
    in_place: bool
    protocol: str = "Simple"
    reuse_resources: bool = False
    num_threads: int = 1024
    double_scratch: bool = False
    alignment: int = 16
    min_bytes: int = 0
    max_bytes: int = (1 << 64) - 1

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def pieces(self) -> int:
        """The chunks of one rank's part, or of the whole buffer where a rank has no part of its own."""
        first = self.ranks[0]
        if self.kind == "all_gather":
            return first.input_chunks or first.output_chunks // self.num_ranks
        if self.kind == "reduce_scatter":
            return first.output_chunks or first.input_chunks // self.num_ranks
        most = max(first.input_chunks, first.output_chunks)
        return most // self.num_ranks if self.kind == "all_to_all" else most

    def collective(self) -> Collective:
        """Return what the plan claims to carry out.

        Raises:
            ScheduleError: a name of which nothing is known.
        """
        if self.kind not in KINDS:
            raise ScheduleError(
                f"{self.name}: expected one of {', '.join(KINDS)}, got {self.kind!r}; name a collective"
            )
        if not self.pieces:
            raise ScheduleError(
                f"{self.name}: {self.kind}: expected chunks of input and output, got none; add their numbers"
            )
        return collective(self.kind, self.num_ranks, self.pieces)
