"""A bound for schedules of a number of steps, whatever their chunks: least seconds per byte, from flows over time.

In a network over time a rank stands once for every moment between steps, and the links of a step lead from one moment
to the next. What a rank needs has to flow to it through links that carry their rate times the step's length. The
least sum of lengths for which it does is a linear program; its rows are cuts, which maximum flows find as they are
violated (Benders 1962).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from time import monotonic
from typing import TYPE_CHECKING, cast

from shardwright.pcg.collectives.bounds import Bound, FlowGraph, supplies, whole
from shardwright.pcg.collectives.collective import Collective
from shardwright.pcg.collectives.flows import Network
from shardwright.pcg.collectives.topology import Topology

if TYPE_CHECKING:
    import z3


def paced_bound(topology: Topology, collective: Collective, steps: int, end: float = math.inf) -> Bound | None:
    """Return the bound of schedules of `steps` steps, for a collective that copies; None if it takes more steps.

    `end`: the moment, by `time.monotonic`, after which no more cuts are looked for, which leaves it a bound.
    """
    import z3

    lengths = [z3.Real(f"step {step}") for step in range(steps)]
    program = z3.Optimize()
    program.add([length >= 0 for length in lengths])
    program.minimize(z3.Sum(lengths))
    graph = OverTime(topology, steps)
    needed = sorted(supplies(collective.chunks).items())
    times = [Fraction(0)] * steps
    while monotonic() <= end:
        cuts = [cut for target, supply in needed if (cut := graph.cut(target, supply, times)) is not None]
        if not cuts:
            break
        if not all(any(rates) for rates, _ in cuts):
            return None
        for rates, share in cuts:
            crossing = [length * z3.Q(*rate.as_integer_ratio()) for length, rate in zip(lengths, rates, strict=True)]
            program.add(cast("z3.ArithRef", z3.Sum(crossing)) >= z3.Q(*share.as_integer_ratio()))
        assert program.check() == z3.sat
        model = program.model()
        times = [_fraction(model.eval(length, model_completion=True)) for length in lengths]
    return Bound(sum(times, Fraction(0)), f"flows over {steps} steps")


class OverTime:
    """The network over time of a topology."""

    def __init__(self, topology: Topology, steps: int) -> None:
        graph = FlowGraph(topology)
        self.ranks, self.steps, self.unit_rate = topology.num_ranks, steps, topology.unit_rate
        self.edges = list[tuple[int, int]]()
        self.rooms = list[tuple[int, int]]()  # the step, multiples of the unit
        between = graph.num_nodes - self.ranks
        self.source = self.ranks * (steps + 1) + between * steps
        for step in range(steps):
            inner = self.ranks * (steps + 1) + between * step - self.ranks

            def node(number: int, moment: int, inner: int = inner) -> int:
                return self.ranks * moment + number if number < self.ranks else inner + number

            for (src, dst), room in zip(graph.edges, graph.rooms, strict=True):
                self.edges.append((node(src, step), node(dst, step + 1)))
                self.rooms.append((step, room))
        self.kept = [(moment * self.ranks + rank, (moment + 1) * self.ranks + rank)
                     for moment in range(steps) for rank in range(self.ranks)]  # fmt: skip

    def cut(
        self, target: int, supply: Mapping[tuple[int, ...], Fraction], times: Sequence[Fraction]
    ) -> tuple[list[Fraction], Fraction] | None:
        """Return a violated cut, if any: the rate across it in each step, and the share that has to cross."""
        units, needs = whole(list(supply.values()))
        scale, lengths = whole([time * units * self.unit_rate for time in times])
        entries = [(self.source, self.source + 1 + number) for number in range(len(needs))]
        free = [(entry, rank) for (_, entry), ranks in zip(entries, supply, strict=True) for rank in ranks]
        network = Network(self.source + 1 + len(needs), [*self.edges, *entries, *self.kept, *free])
        enough = sum(needs) * scale
        rooms = [room * lengths[step] for step, room in self.rooms] + [need * scale for need in needs]
        rooms += [enough] * (len(self.kept) + len(free))
        if network.max_flow(self.source, self.ranks * self.steps + target, rooms, enough) == enough:
            return None
        side = network.source_side(self.source)
        rates = [Fraction(0)] * self.steps
        for (src, dst), (step, room) in zip(self.edges, self.rooms, strict=True):
            if src in side and dst not in side:
                rates[step] += room * self.unit_rate
        inside = sum(need for need, (_, entry) in zip(needs, entries, strict=True) if entry in side)
        return rates, Fraction(inside, units)


def _fraction(value: object) -> Fraction:
    return Fraction(str(value).replace("?", ""))
