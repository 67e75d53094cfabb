"""Turn a schedule into a plan of one-sided operations: puts, signals, waits and sums, step by step.

A rank runs the same operations in several blocks, each on its part of every chunk and over its own channels. What is
put goes to where it belongs if nobody has touched that place, and else to scratch of its own: so no rank has to wait
until another has read something, and no place is ever written twice by a peer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.pcg.collectives.places import MOST_COUNT, Move, Places, moves, require_buffers
from shardwright.pcg.collectives.plan import KINDS, MOST_SOURCES, Action, Plan, PlanBlock, PlanRank, RemoteBuffer, Span
from shardwright.pcg.collectives.program import Buffer, Place
from shardwright.pcg.collectives.schedule import Schedule
from shardwright.pcg.errors import ScheduleError

MOST_CHANNELS = 8
"""Channels that one operation signals or waits on."""
_NOP = Action("nop")


def plan_of(schedule: Schedule, *, in_place: bool = False, blocks: int = 1) -> Plan:
    """Return the plan of a schedule for ranks that reach each other's memory, in so many blocks.

    Raises:
        ScheduleError: the collective is none of a library's, has unequal chunks, or is an all-to-all in place.
    """
    require_buffers(schedule, in_place)
    if schedule.collective.kind not in KINDS:
        problem = f"expected one of {', '.join(KINDS)}, got {schedule.collective.kind!r}"
        raise ScheduleError(f"{schedule.name}: {problem}; plans have no others")
    if blocks < 1:
        raise ScheduleError(f"{schedule.name}: expected at least one block, got {blocks}; say more")
    places = [Places(schedule, rank, in_place) for rank in range(schedule.num_ranks)]
    ranks = [_Rank(place) for place in places]
    for rank in ranks:
        rank.begin()
    for step in schedule.steps:
        longest = 1 if blocks > 1 else MOST_COUNT
        together = [(move, *_target(places[move.dst], move)) for move in moves(places, step, longest=longest)]
        for rank in ranks:
            rank.step(together)
    kind = schedule.collective.kind
    return Plan(schedule.name, kind, tuple(rank.plan(blocks) for rank in ranks), in_place)


def _target(places: Places, move: Move) -> tuple[Place, bool]:
    """Return where a move is put, and whether it stays there."""
    untouched = not any(
        chunk in places.written or (places.in_place and chunk in places.inputs) for chunk in move.chunks
    )
    if untouched and not move.reduces:
        return places.home(move.chunks[0]), True
    return Place("scratch", places.slot(len(move.chunks))), False


_Put = tuple[Move, Place, bool]


@dataclass(slots=True)
class _Rank:
    """The operations of a rank while they are made, its peers, and the buffers of theirs that it puts into."""

    places: Places
    actions: list[Action] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    remote: list[tuple[int, Buffer]] = field(default_factory=list)

    def begin(self) -> None:
        """Wait until all peers have begun, whose memory may be in use before; copy what is there already."""
        me = self.places.rank
        ends = {(t.src, t.dst) for t in self.places.schedule.transfers}
        self.peers = sorted({dst for src, dst in ends if src == me} | {src for src, dst in ends if dst == me})
        self._each_channel("rlxsignal", self.peers)
        self._each_channel("rlxwait", self.peers)
        self.actions.append(_NOP)
        outputs = [] if self.places.in_place else self.places.own_output()
        pairs = [(_span(self.places.place(chunk), 1), _span(self.places.home(chunk), 1)) for chunk in outputs]
        self._paired("copy", pairs)

    def step(self, together: Sequence[_Put]) -> None:
        """Put what this rank sends, wait for what it receives, and add or copy that."""
        me = self.places.rank
        sent = [put for put in together if put[0].src == me]
        pairs = [(_span(self.places.place(m.chunks[0]), len(m.chunks)), self._remote(m.dst, to, len(m.chunks)))
                 for m, to, _ in sent]  # fmt: skip
        self._paired("put", pairs, "memory")
        self._each_channel("signal", sorted({move.dst for move, _, _ in sent}))
        received = [put for put in together if put[0].dst == me]
        self._each_channel("wait", sorted({move.src for move, _, _ in received}))
        if received:
            self.actions.append(_NOP)
        self._store(received)
        self.places.written.update(chunk for move, _, _ in received for chunk in move.chunks)

    def plan(self, blocks: int) -> PlanRank:
        """Return the rank's plan: block b uses the b-th channel to each peer."""
        count = len(self.peers)
        made = tuple(
            PlanBlock(
                tuple(self._part(action, block, blocks) for action in self.actions),
                {"memory": tuple(range(block * count, (block + 1) * count))},
                {"memory": tuple(range(len(self.remote)))},
            )
            for block in range(blocks)
        )
        remote = tuple(RemoteBuffer(rank, buffer, ("memory",)) for rank, buffer in self.remote)
        inputs, outputs = len(self.places.inputs), len(self.places.outputs)
        return PlanRank(
            inputs, outputs, self.places.scratch_chunks, made, {"memory": tuple(self.peers) * blocks}, (), remote
        )

    def _store(self, received: Sequence[_Put]) -> None:
        sums, copies = defaultdict[range, list[Place]](list), list[tuple[Span, Span]]()
        for move, slot, stays in received:
            if move.reduces:
                sums[move.chunks].append(slot)
            elif not stays:
                copies.append(
                    (_span(slot, len(move.chunks)), _span(self.places.home(move.chunks[0]), len(move.chunks)))
                )
        self._paired("copy", copies)
        for chunks, slots in sums.items():
            base = self.places.place(chunks[0])
            for start in range(0, len(slots), MOST_SOURCES - 1):
                terms = (base, *slots[start : start + MOST_SOURCES - 1])
                base = self.places.home(chunks[0])
                spans = tuple(_span(place, len(chunks)) for place in terms)
                self.actions += [Action("re", spans, (_span(base, len(chunks)),), reduce_op="sum"), _NOP]

    def _paired(self, name: str, pairs: Sequence[tuple[Span, Span]], channel_type: str = "") -> None:
        """Add an operation for each ten pairs, and bring the threads together behind them."""
        for start in range(0, len(pairs), MOST_SOURCES):
            sources, targets = zip(*pairs[start : start + MOST_SOURCES], strict=True)
            self.actions += _of_one_size(name, sources, targets, channel_type)
        if pairs:
            self.actions.append(_NOP)

    def _each_channel(self, name: str, peers: Sequence[int]) -> None:
        positions = [self.peers.index(peer) for peer in peers]
        for start in range(0, len(positions), MOST_CHANNELS):
            group = tuple(positions[start : start + MOST_CHANNELS])
            self.actions.append(Action(name, channel_type="memory", channels=group))

    def _remote(self, rank: int, place: Place, size: int) -> Span:
        key = (rank, place.buffer)
        if key not in self.remote:
            self.remote.append(key)
        return Span("remote", self.remote.index(key), place.offset, size)

    def _part(self, action: Action, block: int, blocks: int) -> Action:
        return action._replace(part=(block, blocks)) if blocks > 1 and action.targets else action


def _of_one_size(name: str, sources: Sequence[Span], targets: Sequence[Span], channel_type: str) -> Iterator[Action]:
    """Yield an operation for all pairs of each size."""
    by_size = defaultdict[int, list[tuple[Span, Span]]](list)
    for source, target in zip(sources, targets, strict=True):
        by_size[source.size].append((source, target))
    for pairs in by_size.values():
        one, other = zip(*pairs, strict=True)
        yield Action(name, one, other, channel_type)


def _span(place: Place, size: int) -> Span:
    return Span("local", place.buffer, place.offset, size)
