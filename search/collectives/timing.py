"""Steps of transfers: by the moments at which they start, and without those that nobody needs; ways over relays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shardwright.cost.collectives.simulation import simulate
from shardwright.pcg.collectives.collective import Collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Edge, Topology


def in_steps(
    name: str, collective: Collective, started: Iterable[tuple[float, Transfer]], shortest_s: float
) -> Schedule:
    """Return the schedule of transfers that start at these moments, in seconds.

    A step begins where a transfer reads or replaces what the present one brings, where its connection has sent in the
    present one, as no order is kept within a step, or `shortest_s` after it began.
    """
    transfers, step, began = list[Transfer](), -1, -math.inf
    brought, sent = set[tuple[int, int]](), set[Edge]()
    for start, transfer in sorted(started):
        target, connection = (transfer.dst, transfer.chunk), (transfer.src, transfer.dst)
        waits = (transfer.src, transfer.chunk) in brought or (transfer.op == "copy" and target in brought)
        if waits or connection in sent or start >= began + 0.999 * shortest_s:
            step, began, brought, sent = step + 1, start, set(), set()
        brought.add(target)
        sent.add(connection)
        transfers.append(Transfer(step, *transfer[1:]))
    return steps_of(name, collective, transfers)


def retimed(schedule: Schedule, topology: Topology, num_bytes: float) -> Schedule:
    """Return a schedule with its steps in the order in which links get to its transfers, whoever comes first."""
    run = simulate(schedule, topology, num_bytes, in_order=False)
    last = min((end - start for start, end in zip(run.starts_s, run.arrivals_s, strict=True)), default=0.0)
    started = zip(run.starts_s, schedule.transfers, strict=True)
    return in_steps(schedule.name, schedule.collective, started, last)


def backwards(schedule: Schedule, back: Topology, topology: Topology) -> Schedule:
    """Return the dual, on a topology, of a schedule for `back`, the topology with its links turned around."""
    return on(topology, schedule.reversed(), lambda src, dst: [(b, a) for a, b in reversed(back.path(dst, src))])


def on(topology: Topology, schedule: Schedule, way: Callable[[int, int], Sequence[Edge]]) -> Schedule:
    """Name the relays of transfers that would take another way on a topology than the one that they were made for."""
    moves = list[Transfer]()
    for move in schedule.transfers:
        edges = tuple(way(move.src, move.dst))
        is_usual = move.via or edges == topology.path(move.src, move.dst)
        moves.append(move if is_usual else move._replace(via=tuple(dst for _, dst in edges[:-1])))
    return replace(schedule, transfers=tuple(moves))


def steps_of(
    name: str, collective: Collective, transfers: Sequence[Transfer], lasting: Sequence[int] | None = None
) -> Schedule:
    """Return a schedule of transfers without those that reach no target, and without the steps that become empty."""
    needed, wanted = list[Transfer](), set[tuple[int, int]]()
    targets = [set(chunk.targets) for chunk in collective.chunks]
    for transfer in sorted(transfers, reverse=True):
        cell = (transfer.dst, transfer.chunk)
        if transfer.dst in targets[transfer.chunk] or cell in wanted:
            wanted.add((transfer.src, transfer.chunk))
            needed.append(transfer)
    used = sorted({transfer.step for transfer in needed})
    numbers = {step: number for number, step in enumerate(used)}
    rounds = tuple(lasting[step] for step in used) if lasting is not None else ()
    return Schedule(name, collective, tuple(Transfer(numbers[t.step], *t[1:]) for t in needed), rounds)
