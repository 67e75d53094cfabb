"""A schedule of a collective: which chunk goes from which rank to which, in which step, to be copied or added.

Steps happen one after the other. Within a step all transfers read what was there before it, and write afterwards, so
two ranks can exchange a cell. A runtime need not run steps in lock-step; it must keep what they order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple

from shardwright.pcg.collectives.collective import Collective, collective, require_at_most
from shardwright.pcg.collectives.topology import Edge, Topology
from shardwright.pcg.errors import ScheduleError

Op = Literal["copy", "reduce"]
MOST_TRANSFERS = 1 << 22


class Transfer(NamedTuple):
    """A transfer: in `step`, `chunk` goes from rank `src` to rank `dst`, where it replaces the cell or is added to it.

    `via`: the relays that it passes, where the topology's own choice (`Topology.path`) is not meant.
    """

    step: int
    src: int
    dst: int
    chunk: int
    op: Op = "copy"
    via: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"chunk {self.chunk}, rank {self.src} to rank {self.dst}, step {self.step}"


@dataclass(frozen=True)
class Schedule:
    """Transfers that carry out a collective, sorted by step; each step has at least one.

    `rounds`: how long each step claims to last, in rounds; () claims nothing. In a round, a link of the topology's unit
    rate carries one chunk of the largest size.

    Raises:
        ScheduleError: a rank, chunk or step that does not exist, an empty step, or rounds that are not one per step.
    """

    name: str
    collective: Collective
    transfers: tuple[Transfer, ...]
    rounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "transfers", tuple(sorted(self.transfers)))
        object.__setattr__(self, "rounds", tuple(self.rounds))
        require_at_most(self.name, len(self.transfers), MOST_TRANSFERS, "transfers")
        self._check_transfers()
        if self.rounds and (len(self.rounds) != self.num_steps or min(self.rounds) < 1):
            problem = f"expected {self.num_steps} numbers of at least 1, got {list(self.rounds)}"
            raise ScheduleError(f"{self.name}: rounds: {problem}; give one for each step, or none")

    @property
    def num_ranks(self) -> int:
        return self.collective.num_ranks

    @property
    def num_steps(self) -> int:
        return self.transfers[-1].step + 1 if self.transfers else 0

    @cached_property
    def steps(self) -> tuple[tuple[Transfer, ...], ...]:
        """The transfers of each step."""
        lists: list[list[Transfer]] = [[] for _ in range(self.num_steps)]
        for transfer in self.transfers:
            lists[transfer.step].append(transfer)
        return tuple(map(tuple, lists))

    def shares(self, topology: Topology, step: int) -> Mapping[Edge, Fraction]:
        """Return the share of all bytes that each link carries in a step."""
        kinds, kind_of = self.collective.sizes
        sent = Counter((t.src, t.dst, t.via, kind_of[t.chunk]) for t in self.steps[step])
        carried: dict[Edge, Fraction] = defaultdict(Fraction)
        for (src, dst, via, kind), many in sent.items():
            for edge in topology.path(src, dst, via):
                carried[edge] += many * kinds[kind]
        return carried

    def seconds_per_byte(self, topology: Topology) -> tuple[Fraction, ...]:
        """Return how long each step keeps its busiest link busy, per byte of the whole, latencies left out."""
        return tuple(topology.busy_s_per_byte(self.shares(topology, step)) for step in range(self.num_steps))

    def time_s(self, topology: Topology, num_bytes: float) -> float:
        """Return the seconds in lock-step: in each step the longest latency, and then its busiest link."""
        paths = ([topology.path(t.src, t.dst, t.via) for t in step] for step in self.steps)
        latency_s = sum(max(map(topology.latency_s, set(step))) for step in paths)
        return latency_s + float(sum(self.seconds_per_byte(topology))) * num_bytes

    def reversed(self) -> Schedule:
        """Return the schedule run backwards, which carries out the dual collective, as reduce-scatter for all-gather.

        It is right if this one is, and each cell is received once.
        """
        dual, last = self.collective.dual(), self.num_steps - 1
        op: Op = "reduce" if dual.reduces else "copy"
        back = (Transfer(last - t.step, t.dst, t.src, t.chunk, op, t.via[::-1]) for t in self.transfers)
        return Schedule(f"{self.name} reversed", dual, tuple(back), self.rounds[::-1])

    def mapped(self, rank: Callable[[int], int], chunk: Callable[[int], int], whole: Collective) -> list[Transfer]:
        """Return the transfers among other ranks, with other chunks, of a collective that this one is a part of."""
        size = len(whole.chunks)
        moved = [t._replace(src=rank(t.src), dst=rank(t.dst), chunk=chunk(t.chunk)) for t in self.transfers]
        assert all(0 <= t.chunk < size for t in moved), f"{self.name} is no part of {whole.kind}"
        return moved

    def _check_transfers(self) -> None:
        ranks, chunks, last = self.num_ranks, len(self.collective.chunks), -1
        for transfer in self.transfers:
            step, src, dst, chunk = transfer[:4]
            if not (0 <= src < ranks and 0 <= dst < ranks and src != dst):
                problem = f"expected two ranks from 0 to {ranks - 1}, got {src} and {dst}; correct the transfer"
            elif not 0 <= chunk < chunks:
                problem = f"expected a chunk from 0 to {chunks - 1}, got {chunk}; correct the transfer"
            elif step < 0 or step not in (last, last + 1):
                problem = f"expected steps from 0 without gaps, got none in step {last + 1}; renumber them"
            elif transfer.op == "reduce" and not self.collective.reduces:
                problem = f"expected copies alone in a {self.collective.kind}, got a reduce; copy it"
            else:
                last = step
                continue
            raise ScheduleError(f"{self.name}: {transfer}: {problem}")


BySize = Sequence[tuple[float, Schedule | None]]
"""What carries out a collective from each number of bytes on; None: the library."""


def in_sequence(*parts: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Return the transfers of parts one after the other: the steps of each begin where those before it ended."""
    moved, start = list[Transfer](), 0
    for part in parts:
        moved += (later := [t._replace(step=t.step + start) for t in part])
        start = max((t.step + 1 for t in later), default=start)
    return tuple(moved)


def together(*parts: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Return the transfers of parts that begin in the same step."""
    return tuple(transfer for part in parts for transfer in part)


def all_reduce_of(scatter: Schedule, gather: Schedule | None = None) -> Schedule:
    """Return the all-reduce that a reduce-scatter and an all-gather of the same chunks make; by default its reverse.

    Raises:
        ScheduleError: they are no reduce-scatter and all-gather of the same chunks.
    """
    gather = gather or scatter.reversed()
    kinds = (scatter.collective.kind, gather.collective.kind)
    if kinds != ("reduce_scatter", "all_gather") or scatter.collective.dual() != gather.collective:
        problem = f"expected a reduce_scatter and an all_gather of the same chunks, got {kinds[0]} and {kinds[1]}"
        raise ScheduleError(f"{scatter.name}, {gather.name}: {problem}; compose those")
    whole = collective("all_reduce", scatter.num_ranks, len(scatter.collective.chunks))
    sizes: Sequence[Fraction] = [chunk.size for chunk in scatter.collective.chunks]
    chunks = tuple(chunk._replace(size=size) for chunk, size in zip(whole.chunks, sizes, strict=True))
    transfers = in_sequence(scatter.transfers, gather.transfers)
    rounds = scatter.rounds + gather.rounds if scatter.rounds and gather.rounds else ()
    return Schedule(f"{scatter.name} + {gather.name}", replace(whole, chunks=chunks), transfers, rounds)
