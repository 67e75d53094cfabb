"""Exact synthesis: is there a schedule of these chunks that takes so many steps and rounds? Asked of Z3.

The question is SCCL's (Cai et al., "Synthesizing optimal collective algorithms", PPoPP 2021): a step lasts one round or
more, and in a round a link of the unit rate carries one chunk. Here all is boolean: `sends[chunk, channel, step]`, and
bits that spread the rounds over the steps, with pseudo-boolean sums for the links. Where the network has a group of
symmetries, a schedule with the same symmetries is looked for first: the chunks of an orbit share their variables.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from shardwright.pcg.collectives.bounds import Hops, whole
from shardwright.pcg.collectives.collective import Collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.topology import Edge, Topology
from shardwright.search.collectives.channels import limits
from shardwright.search.collectives.symmetry import Permutation, chunk_images, fitting, symmetries
from shardwright.search.collectives.timing import steps_of

if TYPE_CHECKING:
    import z3


class Answer(NamedTuple):
    """A schedule; or none, and whether that there is none is proven."""

    schedule: Schedule | None
    is_proven: bool


class _LateError(Exception):
    """The time for a question was over before it could be asked."""


class Variable(NamedTuple):
    """A chunk that stands for its orbit is sent over a channel in a step."""

    chunk: int
    channel: Edge
    step: int


def solve(
    topology: Topology,
    collective: Collective,
    steps: int,
    rounds: int,
    *,
    timeout_s: float = 60.0,
    group: Sequence[Permutation] | None = None,
    end: float = math.inf,
) -> Answer:
    """Return a schedule of a collective that copies, of exactly `steps` steps and `rounds` rounds in all.

    `timeout_s`: seconds for each of the two questions, with symmetries and without; building them counts.
    `group`: symmetries to use; by default those that are found. If no schedule has them, all are looked at.
    `end`: the moment, by `time.monotonic`, at which the question is left open.
    """
    group = symmetries(topology) if group is None else group
    if len(fitting(collective, group)) > 1:
        answer = Question(topology, collective, steps, rounds, group).answer(min(timeout_s, end - monotonic()))
        if answer.schedule:
            return answer
    return Question(topology, collective, steps, rounds, group[:1]).answer(min(timeout_s, end - monotonic()))


class Question:
    """The constraints of one question, and their solution."""

    def __init__(
        self, topology: Topology, collective: Collective, steps: int, rounds: int, group: Sequence[Permutation]
    ) -> None:
        import z3

        self.topology, self.collective, self.steps, self.rounds, self.group = topology, collective, steps, rounds, group
        images = chunk_images(collective, group)
        assert images is not None, "a group that the collective does not have"
        self.images = images
        _, self.sizes = whole([chunk.size for chunk in collective.chunks])
        self.context = z3.Context()
        self.end = math.inf
        self.hops = Hops(topology)

    @cached_property
    def orbit(self) -> list[tuple[int, int]]:
        """For each chunk the one that stands for its orbit, and the number of the symmetry that leads to it."""
        representatives: list[tuple[int, int] | None] = [None] * len(self.images[0])
        for chunk in range(len(representatives)):
            if representatives[chunk] is None:
                for number, image in enumerate(self.images):
                    representatives[image[chunk]] = (chunk, number)
        return [one for one in representatives if one is not None]

    @cached_property
    def sends(self) -> Mapping[Variable, z3.BoolRef]:
        """A variable for each send that can come in time, and from which the chunk still reaches a target in time."""
        import z3

        variables = dict[Variable, z3.BoolRef]()
        for chunk in sorted({one for one, _ in self.orbit}):
            self._check_time()
            for channel, step in self._useful(chunk):
                variables[Variable(chunk, channel, step)] = z3.Bool(f"{chunk} {channel} {step}", self.context)
        return variables

    def answer(self, timeout_s: float) -> Answer:
        """Build the question within `timeout_s` and ask Z3; a question that takes longer is left open."""
        self.end = monotonic() + timeout_s
        try:
            return self._answer()
        except _LateError:
            return Answer(None, is_proven=False)

    def _check_time(self) -> None:
        if monotonic() > self.end:
            raise _LateError

    def _answer(self) -> Answer:
        """Ask Z3, whose solver of clauses and pseudo-boolean sums is faster here than the one of general formulas."""
        import z3

        solver = z3.Tactic("sat", ctx=self.context).solver()
        if self.steps > self.rounds or not all(self._add_arrivals(solver)):
            return Answer(None, is_proven=True)
        self._add_order(solver)
        spread = self._add_rounds(solver)
        self._add_rates(solver, spread)
        self._check_time()
        solver.set(timeout=max(1, math.ceil((self.end - monotonic()) * 1000)))
        result = solver.check()
        if result != z3.sat:
            return Answer(None, is_proven=result == z3.unsat)
        model = solver.model()
        lasting = [1 + sum(z3.is_true(model[bit]) for bit in bits) for bits in spread]
        return Answer(self._schedule([v for v, send in self.sends.items() if z3.is_true(model[send])], lasting), True)

    def _useful(self, chunk: int) -> Iterator[tuple[Edge, int]]:
        _, sources, targets = self.collective.chunks[chunk]
        needing = [rank for rank in targets if rank not in sources]
        if not needing:
            return
        for src, dst in self.topology.channels:
            if dst not in sources:
                first = min(self.hops[source][src] for source in sources)
                last = self.steps - min(self.hops[dst][rank] for rank in needing)
                yield from (((src, dst), step) for step in range(first, last))

    @cached_property
    def _arriving(self) -> Mapping[tuple[int, int], list[tuple[int, z3.BoolRef]]]:
        """The sends of a chunk to a rank, with their steps."""
        arriving: dict[tuple[int, int], list[tuple[int, z3.BoolRef]]] = defaultdict(list)
        for (chunk, (_, dst), step), send in self.sends.items():
            arriving[chunk, dst].append((step, send))
        return arriving

    def _add_arrivals(self, solver: z3.Solver) -> Iterator[bool]:
        """A target receives a chunk once, another rank at most once; yield False where no send comes in time."""
        import z3

        for (chunk, rank), arriving in self._arriving.items():
            self._check_time()
            once = [(send, 1) for _, send in arriving]
            needs = rank in self.collective.chunks[chunk].targets
            solver.add(z3.PbEq(once, 1) if needs else z3.PbLe(once, 1))
        for chunk in {one for one, _ in self.orbit}:
            _, sources, targets = self.collective.chunks[chunk]
            yield all(rank in sources or (chunk, rank) in self._arriving for rank in targets)

    def _add_order(self, solver: z3.Solver) -> None:
        """A rank sends on what it received in a step before."""
        import z3

        for (chunk, (src, _), step), send in self.sends.items():
            self._check_time()
            if src not in self.collective.chunks[chunk].sources:
                earlier = [one for before, one in self._arriving.get((chunk, src), ()) if before < step]
                solver.add(z3.Or(z3.Not(send), *earlier))

    def _add_rounds(self, solver: z3.Solver) -> list[list[z3.BoolRef]]:
        """Return a bit for each further round of a step, in order; as many are true as it lasts longer than one."""
        import z3

        num_more = self.rounds - self.steps
        spread = [
            [z3.Bool(f"round {more}, {step}", self.context) for more in range(num_more)] for step in range(self.steps)
        ]
        if num_more:
            solver.add(z3.PbEq([(bit, 1) for bits in spread for bit in bits], num_more))
        for bits in spread:
            solver.add([z3.Or(before, z3.Not(after)) for before, after in pairwise(bits)])
        return spread

    def _add_rates(self, solver: z3.Solver, spread: list[list[z3.BoolRef]]) -> None:
        """Demand that the load of each link and resource in a step fits into the rounds of the step."""
        import z3

        most = max(self.sizes)
        for rate, channels in limits(self.topology, self.group):
            room = int(rate / self.topology.unit_rate) * most
            for step, bits in enumerate(spread):
                self._check_time()
                load = list(self._loads(channels, step))
                if sum(size for _, size in load) > room:
                    unused = [(z3.Not(bit), room) for bit in bits]
                    solver.add(z3.PbLe(load + unused, room * (1 + len(bits))))

    def _loads(self, channels: Sequence[Edge], step: int) -> Iterator[tuple[z3.BoolRef, int]]:
        for chunk, (stands, number) in enumerate(self.orbit):
            back = self._inverses[number]
            for src, dst in channels:
                send = self.sends.get(Variable(stands, (back[src], back[dst]), step))
                if send is not None and self.sizes[chunk]:
                    yield send, self.sizes[chunk]

    @cached_property
    def _inverses(self) -> list[list[int]]:
        return [sorted(range(len(image)), key=image.__getitem__) for image in self.group]

    def _schedule(self, sent: Sequence[Variable], lasting: Sequence[int]) -> Schedule:
        """Return the schedule of all orbits, without sends that reach no target."""
        transfers = [
            Transfer(step, image[src], image[dst], chunks[chunk])
            for chunk, (src, dst), step in sent
            for image, chunks in zip(self.group, self.images, strict=True)
        ]
        return steps_of(f"{self.topology.name} {self.steps}/{self.rounds}", self.collective, transfers, lasting)
