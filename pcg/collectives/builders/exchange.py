"""Pairs of ranks that exchange all they have: after log₂ n steps with the right partners, everyone has everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer

Partner = Callable[[int, int], int]
"""The partner of a rank in a step; the partner's partner is the rank."""


def exchange_all_gather(
    name: str, num_ranks: int, steps: int, partner: Partner, pieces: Sequence[int], total: int
) -> Schedule:
    """Return an all-gather of these pieces of `total`, in which partners exchange what they have."""
    held, transfers = [[rank] for rank in range(num_ranks)], list[Transfer]()
    for step in range(steps):
        partners = [partner(step, rank) for rank in range(num_ranks)]
        transfers += (
            Transfer(step, rank, other, owner * total + j)
            for rank, other in enumerate(partners)
            for owner in held[rank]
            for j in pieces
        )
        held = [held[rank] + held[other] for rank, other in enumerate(partners)]
    return Schedule(name, collective("all_gather", num_ranks, total), tuple(transfers))


def doubling_all_gather(num_ranks: int, pieces: int = 1) -> Schedule:
    """Return recursive doubling of 2ᵏ ranks: distances 1, 2, 4, … Backwards it is the halving of halving-doubling.

    Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).
    """
    steps = num_ranks.bit_length() - 1
    name = f"doubling all_gather {num_ranks}"
    return exchange_all_gather(name, num_ranks, steps, lambda step, rank: rank ^ (1 << step), range(pieces), pieces)


def doubling_all_reduce(num_ranks: int, pieces: int = 1) -> Schedule:
    """Return recursive doubling of 2ᵏ ranks with sums: the whole buffer in each of log₂ n steps."""
    transfers = tuple(
        Transfer(step, rank, rank ^ (1 << step), chunk, "reduce")
        for step in range(num_ranks.bit_length() - 1)
        for rank in range(num_ranks)
        for chunk in range(pieces)
    )
    return Schedule(f"doubling all_reduce {num_ranks}", collective("all_reduce", num_ranks, pieces), transfers)


def swing_all_gather(dims: Sequence[int], pieces: int = 1) -> Schedule:
    """Return the all-gather half of Swing on a torus whose dimensions are powers of two; 2 · len(dims) pieces, or more.

    Partners are at distance ρ(s) = (1 - (-2)ˢ⁺¹) / 3, even ranks one way and odd ranks the other, dimensions in turn.
    Every piece begins in another dimension, or mirrored, so that all links are used. The reduce-scatter begins with the
    nearest partners, so the all-gather ends with them. De Sensi et al., "Swing: Short-cutting Rings for Higher
    Bandwidth Allreduce" (NSDI 2024), sections 3 and 4.
    """
    ports, num_ranks = 2 * len(dims), prod(dims)
    steps, total = num_ranks.bit_length() - 1, ports * pieces
    transfers = list[Transfer]()
    for port in range(ports):
        turns = _turns(dims, port // 2)[::-1]
        sign = -1 if port % 2 else 1

        def partner(step: int, rank: int, turns: list[tuple[int, int]] = turns, sign: int = sign) -> int:
            return _swung(dims, rank, *turns[step], sign)

        mine = range(port, total, ports)
        transfers += exchange_all_gather("", num_ranks, steps, partner, mine, total).transfers
    name = f"swing all_gather {'x'.join(map(str, dims))}"
    return Schedule(name, collective("all_gather", num_ranks, total), tuple(transfers))


def _turns(dims: Sequence[int], first: int) -> list[tuple[int, int]]:
    """Return each step's dimension, and how often it was used before: in turn from `first` on, while it has steps."""
    left, turns, dim = [size.bit_length() - 1 for size in dims], list[tuple[int, int]](), first
    while any(left):
        if left[dim]:
            turns.append((dim, dims[dim].bit_length() - 1 - left[dim]))
            left[dim] -= 1
        dim = (dim + 1) % len(dims)
    return turns


def _swung(dims: Sequence[int], rank: int, dim: int, turn: int, sign: int) -> int:
    size, stride = dims[dim], prod(dims[dim + 1 :])
    here, distance = rank // stride % size, (1 - (-2) ** (turn + 1)) // 3
    there = (here + (distance if here % 2 == 0 else -distance) * sign) % size
    return rank + (there - here) * stride
