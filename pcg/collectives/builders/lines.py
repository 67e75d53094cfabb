"""Ranks in a row or in a circle, each sending to its neighbours alone."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer


def ring_all_gather(num_ranks: int, pieces: int = 1, order: Sequence[int] | None = None) -> Schedule:
    """Return a ring of any ranks, one way, in n - 1 steps. `order`: the ranks around the ring."""
    around = list(order or range(num_ranks))
    transfers = _around(around, range(pieces), pieces)
    return Schedule(f"ring all_gather {num_ranks}", collective("all_gather", num_ranks, pieces), tuple(transfers))


def two_way_ring_all_gather(num_ranks: int, pieces: int = 1, order: Sequence[int] | None = None) -> Schedule:
    """Return two rings, one each way, for one half of the pieces each: `pieces` in either."""
    around, total = list(order or range(num_ranks)), 2 * pieces
    transfers = _around(around, range(0, total, 2), total) + _around(around[::-1], range(1, total, 2), total)
    return Schedule(
        f"two-way ring all_gather {num_ranks}", collective("all_gather", num_ranks, total), tuple(transfers)
    )


def short_ring_all_gather(num_ranks: int, pieces: int = 1) -> Schedule:
    """Return a ring in which every chunk goes half of the way round in either direction: ⌊n / 2⌋ steps."""
    transfers = [
        Transfer(step, (owner + sign * step) % num_ranks, (owner + sign * (step + 1)) % num_ranks, owner * pieces + j)
        for owner in range(num_ranks)
        for sign, hops in ((1, num_ranks // 2), (-1, (num_ranks - 1) // 2))
        for step in range(hops)
        for j in range(pieces)
    ]
    return Schedule(f"short ring all_gather {num_ranks}", collective("all_gather", num_ranks, pieces), tuple(transfers))


def line_all_gather(num_ranks: int, pieces: int = 1) -> Schedule:
    """Return a line without wraparound, in n - 1 steps: every chunk goes both ways until the ends.

    Backwards it is the reduce-scatter that TidalMesh-like schedules use: its early steps use few links, where the late
    steps of the all-gather use many, so that the two can go side by side (`nested.tidal_all_reduce`).
    """
    transfers = [
        Transfer(step, owner + sign * step, owner + sign * (step + 1), owner * pieces + j)
        for owner in range(num_ranks)
        for sign, hops in ((1, num_ranks - 1 - owner), (-1, owner))
        for step in range(hops)
        for j in range(pieces)
    ]
    return Schedule(f"line all_gather {num_ranks}", collective("all_gather", num_ranks, pieces), tuple(transfers))


def chain_broadcast(num_ranks: int, pieces: int = 1, root: int = 0) -> Schedule:
    """Return a chain from the root on: piece p leaves the i-th rank in step i + p, in n + pieces - 2 steps."""
    chain = [(root + i) % num_ranks for i in range(num_ranks)]
    transfers = [
        Transfer(i + piece, chain[i], chain[i + 1], piece) for i in range(num_ranks - 1) for piece in range(pieces)
    ]
    whole = collective("broadcast", num_ranks, pieces, root=root)
    return Schedule(f"chain broadcast {num_ranks}", whole, tuple(transfers))


def _around(ring: Sequence[int], pieces: range, total: int) -> list[Transfer]:
    n = len(ring)
    return [
        Transfer(step, ring[i], ring[(i + 1) % n], ring[(i - step) % n] * total + j)
        for step in range(n - 1)
        for i in range(n)
        for j in pieces
    ]
