"""The order in which a schedule adds: whether all ranks get a sum that was added in the same order.

Sums of real numbers depend on their order. Replicas of a parameter stay equal only if every rank has the same sum, bit
for bit: made once and copied, or added alike. Two summands may change places.
"""

from __future__ import annotations

from collections import defaultdict

from shardwright.pcg.collectives.schedule import Schedule

Cell = tuple[int, int]


def adds_alike(schedule: Schedule) -> bool:
    """Return whether every rank that gets a chunk gets the same sum of it, added step by step and by sender."""
    known = dict[object, int]()

    def number(expression: object) -> int:
        return known.setdefault(expression, len(known))

    cells = {cell: number((cell[1], given)) for cell, given in schedule.collective.pre.items()}
    for step in schedule.steps:
        arrived = [(t.dst, t.chunk, t.src, t.op, cells.get((t.src, t.chunk))) for t in step]
        for dst, chunk, _, op, value in sorted(arrived, key=lambda one: one[:3]):
            summand = cells.get((dst, chunk))
            if op == "reduce" and summand is not None:
                cells[dst, chunk] = number(frozenset((summand, value)))
            elif value is not None:
                cells[dst, chunk] = value
    sums_of = defaultdict[int, set[int | None]](set)
    for rank, chunk in schedule.collective.post:
        sums_of[chunk].add(cells.get((rank, chunk)))
    return all(len(sums) == 1 for sums in sums_of.values())
