"""The values that a rank keeps where layouts are known: by elimination, at one price of a byte.

A value that an operation makes has one of four fates (`pcg.step.fates`):

    kept         its bytes, until backward
    again        the seconds of what makes it, once more in each microbatch
    host         the seconds of its copies to the host and back, as far as compute does not hide them; and its bytes as
                 far as it is on its way, as those of two blocks are
    not needed   nothing; excluded where an operation's backward reads it, or its reader is made again

Each condition is about one value, or about one value and one reader of it, so a pairwise model states them all. A value
that one block of the model gives to another is not made again. A gathered weight has one of the lifetimes, and
weights that are gathered together have the same: their collectives count by the share of communication that nothing
hides. The sums are a guide: the timeline judges every solution on the way, as only it shows which values are there at
the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

import numpy as np

from shardwright.cost.timeline.passes import copy_s
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.analysis import read_again
from shardwright.pcg.step.chunk import Allocation, Chunk, whole_chunk
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.parameters import Parameter
from shardwright.pcg.step.places import places
from shardwright.pcg.step.recompute import (
    BlockKind,
    BlockOffload,
    BlockRecompute,
    OffloadByBlock,
    RecomputeByBlock,
    exactly,
)
from shardwright.search.choices.interning import Interned, Interner
from shardwright.search.choices.problem import Prices, Problem
from shardwright.search.exact.building import shares
from shardwright.search.exact.eliminate import Eliminator, Solution

FATES = (Fate.NOT_NEEDED, Fate.KEPT, Fate.AGAIN, Fate.HOST)
"""The choices of a value, in order."""
_SAID = (Fate.AGAIN, Fate.HOST)
"""The fates that an execution says by place."""
_UNAVAILABLE = np.array(
    [[inf if (value, reader) == (Fate.NOT_NEEDED, Fate.AGAIN) else 0.0 for reader in FATES] for value in FATES]
)
"""Costs of a value (rows) and its reader (columns): an operation that is made again reads what is there."""


@dataclass(frozen=True)
class Keeping:
    """The recomputation and the offload of each block of a model, and the lifetime of each gathered weight, by leaf."""

    again: Mapping[str, BlockRecompute] = field(default_factory=dict)
    lifetimes: Mapping[str, Zero] = field(default_factory=dict)
    away: Mapping[str, BlockOffload] = field(default_factory=dict)

    @property
    def recompute(self) -> RecomputeByBlock | str:
        """The recomputation for an `Execution`: neighbouring blocks that recompute the same are one pattern."""
        return _by_pattern(self.again)

    @property
    def offload(self) -> OffloadByBlock | str:
        """The offload for an `Execution`, in the same form."""
        return _by_pattern(self.away)

    def mixed(self, other: Keeping, blocks: frozenset[str], block_of: Mapping[str, str]) -> Keeping:
        """Return the other's choices for these blocks, and this one's for the rest; `block_of`: each leaf's block."""
        recompute, away = _mixed(self.again, other.again, blocks), _mixed(self.away, other.away, blocks)
        lifetimes: dict[str, Zero] = {
            leaf: (other if block_of.get(leaf, "") in blocks else self).lifetimes[leaf] for leaf in self.lifetimes
        }
        return Keeping(recompute, lifetimes, away)


def _mixed(ours: Mapping[str, Any], theirs: Mapping[str, Any], blocks: frozenset[str]) -> dict[str, Any]:
    return {name: (theirs if name in blocks else ours).get(name, ()) for name in (*ours, *theirs)}


def _by_pattern(kinds: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return what is said of each block as pairs of a pattern and a kind or list; "none" if nothing is said."""
    chosen = [item for item in kinds.items() if item[1]]
    runs = groupby(enumerate(chosen), key=lambda item: _run(item[0], *item[1]))
    patterns = tuple(_pattern([block for _, (block, _) in run], kind) for (*_, kind), run in runs)
    return patterns or "none"


def _run(place: int, block: str, kind: BlockKind) -> tuple[str, int, BlockKind]:
    """Return a key that is the same for blocks with consecutive numbers of which the same is said."""
    stem, _, number = block.rpartition(".")
    return (stem, int(number) - place, kind) if number.isdecimal() else (block, -1, kind)


def _pattern(blocks: Sequence[str], kind: BlockKind) -> tuple[str, BlockKind]:
    first, last = exactly(blocks[0]), blocks[-1].rpartition(".")[2]
    places = kind if isinstance(kind, str) else tuple(map(exactly, kind))
    return (first if len(blocks) == 1 else f"{first}-{last}"), places


class Solved(NamedTuple):
    """A solution and its sums."""

    keeping: Keeping
    seconds: float
    num_bytes: float


class KeepingProblem:
    """The pairwise model of a parallel graph whose layouts are known.

    Args:
        steps: the graph's operations with their costs, without recomputation.
        times: how often each block of the model occurs.
        exposed: the share of communication that nothing hides.
        values: whether values may be made again.
        zeros: the lifetimes that gathered weights may have.
        host: the share of copies to the host and back that nothing hides; None: no value may wait there.
    """

    def __init__(
        self, steps: Steps, times: Mapping[str, int], exposed: float, zeros: Sequence[Zero], *, values: bool,
        host: float | None = None,
    ) -> None:  # fmt: skip
        self.steps, self.times, self.exposed, self.zeros, self.host = steps, times, exposed, zeros, host
        self.graph, self.mesh = steps.graph, steps.graph.mesh
        self.state_share, self.value_share = shares(steps.execution, self.mesh)
        self.interner = Interner()
        self.eliminator = Eliminator(self.interner)
        self.problem = Problem(self.graph, self.mesh)
        self.chunk = whole_chunk(steps)
        blocks = {o.operation.block for o in self.chunk.occurrences if o.operation.block}
        self.on_their_way = min(1.0, 2 / max(1, sum(times.get(block, 1) for block in blocks)))
        self.values = _Values(self) if values else None
        self.groups = dict[int, list[str]]()  # parameters that are gathered together, by their variable
        self._add_weights()

    def solve(self, price: float) -> Solved:
        """Return the solution of the least seconds + price · bytes."""
        solution = self.eliminator.solve(self.problem, Prices(price))
        recompute, away = (self.values.places(solution, f) if self.values is not None else {} for f in _SAID)
        lifetimes = dict[str, Zero]()
        for v, leaves in self.groups.items():
            lifetimes |= dict.fromkeys(leaves, self.zeros[solution.choices[v]])
        return Solved(Keeping(recompute, lifetimes, away), *self._sums(solution))

    def _sums(self, solution: Solution) -> tuple[float, float]:
        seconds, num_bytes = (
            sum(float(table.value[c]) for table, c in zip(costs, solution.choices, strict=True))
            for costs in (self.problem.time_s, self.problem.kept_bytes)
        )
        return seconds, num_bytes

    def add(self, time_s: Sequence[float], num_bytes: Sequence[float]) -> int:
        """Add a variable with these costs of its choices, and return its number."""
        for costs, values in ((self.problem.time_s, time_s), (self.problem.kept_bytes, num_bytes)):
            costs.append(self.interner.call(np.array, tuple(values)))
        return len(self.problem.time_s) - 1

    def away_s(self, memory: Allocation) -> float:
        """Seconds of a microbatch in which compute waits for the copies of a value; inf where it cannot leave."""
        if self.host is None or not memory.num_bytes or not self.chunk.may_leave(memory):
            return inf
        return self.host * 2 * copy_s(self.steps, memory.num_bytes)

    def again_s(self, number: int) -> float:
        """Seconds of an occurrence where it runs again."""
        return self.steps.costs[self.chunk.occurrences[number].operation.name].again_s

    # ---- gathered weights ----

    def _add_weights(self) -> None:
        together = defaultdict[Hashable, list[Parameter]](list)
        for p in self.steps.parameters.values():
            if p.slices is not None:
                together[p.home, p.slices.axis, p.slices.copied, p.dtype, p.used_dtype].append(p)
        read = read_again(self.graph)
        for members in together.values():
            many = self.times.get(members[0].module, 1)
            costs = [self._lifetime(members, zero, reread=any(p.leaf in read for p in members)) for zero in self.zeros]
            variable = self.add([many * s for s, _ in costs], [many * b for _, b in costs])
            self.groups[variable] = [p.leaf for p in members]

    def _lifetime(self, members: Sequence[Parameter], zero: Zero, *, reread: bool) -> tuple[float, float]:
        """Return the seconds of a step's collectives and the bytes that stay, of parameters gathered together."""
        slices, many = members[0].slices, self.mesh.num_microbatches
        assert slices is not None
        size, first = self.steps.size_of((slices.axis,)), members[0]
        used, summed = sum(p.used_bytes for p in members), sum(p.scattered_sent(size) for p in members if p.grad)
        gathered = sum(p.gathered_sent(size) for p in members)
        gather_s = self.steps.sent_s("all_gather", slices.axis, gathered, first.gathered_as)
        scatter_s = self.steps.sent_s("reduce_scatter", slices.axis, summed, first.summed_as) if slices.copied else 0.0
        gathers = {"zero-1": 1, "zero-2": 1, "kept": many}.get(zero, many * (1 + reread))
        scatters = 1 if zero == "zero-1" else many
        gradients = sum(p.whole_bytes for p in members if p.grad) if many > 1 else 0.0  # accumulated whole
        whole = {"zero-1": used + gradients, "zero-2": used, "kept": used}
        return self.exposed * (gathers * gather_s + scatters * scatter_s), self.state_share * whole.get(zero, 0.0)


class _Values:
    """The variables of values that operations make; a view has its operand's variable."""

    def __init__(self, parent: KeepingProblem) -> None:
        self.chunk = parent.chunk
        self.variables = dict[Allocation, int]()
        self.where = places(parent.graph, {o.operation.name: o.operation.block for o in self.chunk.occurrences})
        self._add_values(parent)
        self._add_readers(parent.problem)

    def _add_values(self, parent: KeepingProblem) -> None:
        makers, masks = defaultdict[Allocation, list[int]](list), dict[Allocation, float]()
        for o in self.chunk.occurrences:
            makers[o.result].append(o.number)
            masks[o.result] = masks.get(o.result, 0.0) + o.operation.mask_bytes
        fixed, needed = set(_staying(self.chunk, parent.steps.early)), _needed(self.chunk)
        for memory, numbers in makers.items():
            block = self.chunk.occurrences[numbers[0]].operation.block
            many = parent.times.get(block, 1)
            stays = block in parent.times and memory in fixed
            again_s = sum(parent.again_s(number) for number in numbers) * parent.mesh.num_microbatches
            share = many * parent.value_share
            mask = share * masks[memory]
            is_away = self.chunk.occurrences[numbers[0]].operation.stored is Fate.HOST  # as people ask for it
            seconds = {
                Fate.NOT_NEEDED: inf if memory in needed or stays else 0.0,
                Fate.KEPT: 0.0,
                Fate.AGAIN: inf if memory in fixed else many * again_s,
                Fate.HOST: many * parent.mesh.num_microbatches * parent.away_s(memory),
            }
            kept_bytes = mask if is_away else share * memory.num_bytes + mask
            num_bytes = {Fate.NOT_NEEDED: mask, Fate.KEPT: kept_bytes, Fate.AGAIN: 0.0}
            num_bytes[Fate.HOST] = mask + share * memory.num_bytes * parent.on_their_way
            self.variables[memory] = parent.add([seconds[f] for f in FATES], [num_bytes[f] for f in FATES])

    def _add_readers(self, problem: Problem) -> None:
        edges = problem.edges
        below, above = Interned(_UNAVAILABLE), Interned(np.ascontiguousarray(_UNAVAILABLE.T))
        for o in self.chunk.occurrences:
            reader = self.variables[o.result]
            for memory in o.reads:
                value = self.variables.get(memory)
                if value is not None and value != reader:
                    edges[min(value, reader), max(value, reader)] = below if value < reader else above

    def places(self, solution: Solution, fate: Fate) -> dict[str, tuple[str, ...]]:
        """Return the places of the operations whose results have this fate, by block."""
        places = defaultdict[str, list[str]](list)
        for o in self.chunk.occurrences:
            if FATES[solution.choices[self.variables[o.result]]] is fate:
                places[o.operation.block].append(self.where[o.operation.name])
        return {block: tuple(names) for block, names in places.items()}


def _staying(chunk: Chunk, early: frozenset[str]) -> Iterator[Allocation]:
    """Yield the values that are never made again: those that another block reads, or nobody, and the earliest ones."""
    blocks = defaultdict[Allocation, set[str]](set)
    for o in chunk.occurrences:
        for memory in o.reads:
            blocks[memory].add(o.operation.block)
    for o in chunk.occurrences:
        if blocks[o.result] != {o.operation.block} or o.operation.name in early:
            yield o.result


def _needed(chunk: Chunk) -> set[Allocation]:
    """Return the values that the backward of some operation reads."""
    return {memory for o in chunk.occurrences if o.operation.is_differentiated for memory in o.keeps}


def expanded(keeping: Keeping, blocks: Mapping[str, Sequence[str]], leaves: Mapping[str, str]) -> Keeping:
    """Return the choices for a whole model, from those for its folded one.

    `blocks`: all blocks that a folded block stands for; `leaves`: by parameter left out, the one that stands for it.
    """
    known = dict(keeping.lifetimes)
    known |= {leaf: known[first] for leaf, first in leaves.items() if first in known}
    return Keeping(_unfolded(keeping.again, blocks), known, _unfolded(keeping.away, blocks))


def _unfolded(kinds: Mapping[str, Any], blocks: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return {name: kind for block, kind in kinds.items() for name in blocks.get(block, (block,))}
