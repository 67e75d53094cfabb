"""An unrolled chunk of a step: its operations in the order of forward, every value's memory, parameters, blocks.

A stretch that occurs more than three times in a chunk is unrolled three times; the second then stands for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from shardwright.pcg.step.buckets import blocks
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.operation import Operation, Region
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.parameters import Parameter, Slices

MOST_COPIES = 3


class Stretch(NamedTuple):
    """Consecutive operations of a model.

    leaves    the parameters that it reads first: every occurrence has its own
    carried   (value read from before, value that the previous occurrence gives instead)
    """

    operations: tuple[Operation, ...]
    leaves: frozenset[str] = frozenset()
    carried: tuple[tuple[str, str], ...] = ()


@dataclass(eq=False, slots=True)
class Rerun:
    """A region that backward runs again, at its place in the chunk.

    results   the fate of values that leave it
    wanted    the values it makes that backward needs
    """

    results: Fate
    occurrences: list[Occurrence] = field(default_factory=list)
    wanted: set[Allocation] = field(default_factory=set)

    def needed(self) -> list[Occurrence]:
        """Return the operations up to the last whose value backward needs; torch.utils.checkpoint stops there too."""
        for number, o in reversed(list(enumerate(self.occurrences, 1))):
            if any(made in self.wanted and made not in o.reads for made in (o.result, *o.keeps)):
                return self.occurrences[:number]
        return []


@dataclass(eq=False, slots=True)
class Allocation:
    """The memory of one value and its views; `number` is its place among the chunk's allocations.

    fate     the fate of the value, for readers outside of the rerun that makes it
    rerun    the rerun that makes it again, if any
    writers  the operations that make it or overwrite it, by number; none if it comes from another chunk
    """

    number: int
    name: str
    num_bytes: float
    rerun: Rerun | None = None
    fate: Fate = Fate.NOT_NEEDED
    writers: list[int] = field(default_factory=list)


class Occurrence(NamedTuple):
    """An operation at its place in the chunk, with the values that it reads, makes and keeps, and the weights it reads.

    gradients    the values among `reads` that get one
    weights      uses of parameters, by number; `blocks`: gathered blocks that it reads, by number, also through views
    """

    number: int
    operation: Operation
    reads: tuple[Allocation, ...]
    result: Allocation
    keeps: tuple[Allocation, ...]
    gradients: tuple[Allocation, ...]
    weights: tuple[int, ...]
    views: tuple[int, ...]
    rerun: Rerun | None


@dataclass(eq=False, slots=True)
class Use:
    """A parameter of one occurrence of its stretch. A fold makes `more` of them; `readers` are operations in order."""

    number: int
    parameter: Parameter
    home: int | None
    more: int
    readers: list[int] = field(default_factory=list)
    block: int | None = None


class Block(NamedTuple):
    """Parameters that are gathered and freed together, and whose gradients are reduce-scattered together.

    slices   how its parameters are gathered; they differ only in how each is sliced
    first    the operation that reads it first in forward, and `last`
    """

    uses: tuple[Use, ...]
    parameters: tuple[Parameter, ...]
    slices: Slices
    first: int
    last: int

    @classmethod
    def of(cls, uses: Sequence[Use]) -> Block:
        slices = uses[0].parameter.slices
        assert slices is not None
        first, last = min([use.readers[0] for use in uses]), max([use.readers[-1] for use in uses])
        return cls(tuple(uses), tuple([use.parameter for use in uses]), slices, first, last)

    @property
    def used_bytes(self) -> float:
        return sum([p.used_bytes for p in self.parameters])


class Span(NamedTuple):
    """The operations of one occurrence of a stretch, which stands for `more` further ones."""

    start: int
    end: int
    more: int


class Chunk:
    """Consecutive stretches of a model, each with its number of occurrences, one occurrence after the other."""

    def __init__(
        self,
        stretches: Sequence[tuple[Stretch, int]],
        parameters: Mapping[str, Parameter],
        execution: Execution = DEFAULT,
        value_bytes: Mapping[str, float] | None = None,
    ) -> None:
        """Unroll the stretches. `value_bytes`: the sizes of values that come from another chunk."""
        self.stretches, self.parameters, self.execution = tuple(stretches), parameters, execution
        self._value_bytes = value_bytes or {}
        self.occurrences: list[Occurrence] = []
        self.allocations: list[Allocation] = []
        self.uses: list[Use] = []
        self.spans: list[Span] = []
        self._env: dict[str, Allocation] = {}
        self._away: set[Allocation] = set()  # waits on the host if it waits at all
        self._numbers: dict[tuple[int | None, str], int] = {}
        self._reruns: dict[tuple[int, Region], Rerun] = {}
        for stretch, times in stretches:
            for copy in range(min(times, MOST_COPIES)):
                if copy:
                    self._env.update((new, self._env[old]) for new, old in stretch.carried)
                more = times - MOST_COPIES if copy == 1 and times > MOST_COPIES else 0
                start = len(self.occurrences)
                self.spans.append(Span(start, start + len(stretch.operations), more))
                for operation in stretch.operations:
                    self._add(operation, stretch)
        for memory in self._away:
            if memory.fate is Fate.KEPT and self.may_leave(memory):
                memory.fate = Fate.HOST
        self.blocks = self._blocks()
        self._blocks_read: dict[tuple[int, bool], list[int]] = {}

    def _add(self, operation: Operation, stretch: Stretch) -> None:
        env, name = self._env, operation.name
        rerun = self._rerun(operation.region) if operation.region is not None else None
        reads = tuple([env.get(name) or self._read(name) for name in operation.reads])
        env[name] = result = env.get(operation.alias) or self._new(name, operation.num_bytes, rerun)
        if not operation.alias or operation.sums_in_place:
            result.writers.append(len(self.occurrences))
        if operation.stored is Fate.HOST:
            self._away.add(result)
        keeps = [env[name] for name in operation.keeps if name in env]
        if operation.mask_bytes:
            keeps.append(self._new(f"mask of {name}", operation.mask_bytes, rerun))
        for memory in keeps:
            self._keep(memory, rerun)
        if rerun is not None:
            for memory in reads:
                if memory.rerun is not rerun:
                    self._keep(memory, rerun)
        weights = tuple([self._use(leaf, stretch) for leaf in operation.weights]) if operation.weights else ()
        views = tuple([self._use(leaf, stretch) for leaf in operation.views]) if operation.views else ()
        gradients = tuple([env[name] for name in operation.gradients]) if operation.grad else ()
        saved = tuple(dict.fromkeys(keeps)) if len(keeps) > 1 else tuple(keeps)
        occurrence = Occurrence(
            len(self.occurrences), operation, reads, result, saved, gradients, weights, views, rerun
        )
        if rerun is not None:
            rerun.occurrences.append(occurrence)
        self.occurrences.append(occurrence)

    def _new(self, name: str, num_bytes: float, rerun: Rerun | None) -> Allocation:
        self.allocations.append(Allocation(len(self.allocations), name, num_bytes, rerun))
        return self.allocations[-1]

    def _read(self, name: str) -> Allocation:
        """Return new memory for a value from another chunk; it takes memory, unlike leaves, which are always there."""
        allocation = self._env[name] = self._new(name, self._value_bytes.get(name, 0.0), None)
        return allocation

    def _keep(self, memory: Allocation, reader: Rerun | None) -> None:
        """Keep memory for the backward of an operation, which may be recomputed itself."""
        rerun = memory.rerun
        if rerun is None or (rerun is not reader and rerun.results is Fate.KEPT):
            memory.fate = Fate.KEPT
            return
        rerun.wanted.add(memory)
        if not memory.fate.is_stored:
            memory.fate = Fate.AGAIN

    def _rerun(self, region: Region) -> Rerun:
        key = len(self.spans), region
        if key not in self._reruns:
            self._reruns[key] = Rerun(region.results)
        return self._reruns[key]

    def _use(self, leaf: str, stretch: Stretch) -> int:
        occurrence = len(self.spans) - 1
        home = occurrence if leaf in stretch.leaves else None
        number = self._numbers.setdefault((home, leaf), len(self.uses))
        if number == len(self.uses):
            more = self.spans[occurrence].more if home is not None else 0
            self.uses.append(Use(number, self.parameters[leaf], home, more))
        self.uses[number].readers.append(len(self.occurrences))
        return number

    def _blocks(self) -> list[Block]:
        """Return the blocks, in order of use.

        A block has parameters of one occurrence, module, axis and lifetime, stored in one dtype and gathered in one
        dtype. So they have one encoding, too.
        """
        sliced = sorted((u for u in self.uses if u.parameter.slices is not None), key=lambda u: u.readers[0])
        modules = groupby(sliced, key=lambda u: (u.home, u.parameter.module))
        keyed = (
            (use, (use.home, p.module, s.axis, s.lifetime, s.summed, p.dtype, p.used_dtype), p.used_bytes)
            for _, uses in modules
            for use in sorted(uses, key=lambda u: u.parameter.used_dtype)
            for p, s in ((use.parameter, use.parameter.slices),)
            if s is not None
        )
        blocks_in_order = sorted(map(Block.of, blocks(keyed)), key=lambda block: block.first)
        for number, block in enumerate(blocks_in_order):
            for use in block.uses:
                use.block = number
        return blocks_in_order

    # ---- what is asked of it ----

    def may_leave(self, memory: Allocation) -> bool:
        """Return whether a value may wait on the host: one that an ordinary operation of the chunk makes."""
        return bool(memory.writers and memory.num_bytes) and all(
            self.occurrences[writer].operation.verb == "run" for writer in memory.writers
        )

    def blocks_of(self, occurrence: Occurrence, *, backward: bool = False) -> list[int]:
        """Return the gathered blocks whose memory an operation reads: in forward, or, the last first, in backward."""
        if not self.blocks or not (occurrence.weights or occurrence.views):
            return []
        if (numbers := self._blocks_read.get(key := (occurrence.number, backward))) is None:
            read = [self.uses[number] for number in (*occurrence.weights, *occurrence.views)]
            if backward:
                read = [use for use in reversed(read) if use.parameter.leaf in occurrence.operation.saved]
            numbers = self._blocks_read[key] = list(dict.fromkeys([use.block for use in read if use.block is not None]))
        return numbers

    def trained(self, occurrence: Occurrence) -> list[int]:
        """Return the uses of parameters that get gradients from an operation."""
        uses = self.uses
        return [n for n in occurrence.weights if uses[n].parameter.grad] if occurrence.weights else []

    def leaves(self) -> Iterator[tuple[str, int]]:
        """Yield the parameters that the chunk reads, with the number of each."""
        reads: dict[str, int] = {}
        for stretch, times in self.stretches:
            for operation in stretch.operations:
                for leaf in operation.weights:
                    reads[leaf] = times if leaf in stretch.leaves else 1
        yield from reads.items()


def whole_chunk(operations: Operations) -> Chunk:
    """Return the chunk of all operations of a graph, each once."""
    stretch = Stretch(tuple(operations.listed), frozenset(operations.parameters))
    return Chunk([(stretch, 1)], operations.parameters, operations.execution, operations.num_bytes)
