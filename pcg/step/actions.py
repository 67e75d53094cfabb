"""A rank's step as an ordered list of actions: the one place that decides the order.

The lowering prints forward from the list, its hooks follow the units and the order of blocks, the cost model prices it
all. It follows from a chunk alone:

* A gathered block is there from before its first reader until after its last, and again in a backward that reads it.
  The next one is gathered while this one is used (late gathers: after it). Blocks in use when the last one is gathered
  stay for backward, which begins with them. Blocks with a longer lifetime stay too, for the backward of their
  microbatch or until the last reader of the last microbatch.
* Values that were not kept are recomputed, region by region, right before the first operation that needs them in
  backward.
* A gradient is accumulated until the first reader that gives one is done, and then summed with its unit, in a step's
  last microbatch. The gradients of a gathered block are reduce-scattered together when all its readers are done,
  and are waited for when the next block's are scattered, or backward ends: in every microbatch, or in the last, where
  whole gradients are accumulated.
* Gradients that are sent encoded are summed in two legs: every rank adds up its piece of a unit, and sends the sum to
  all when the next unit has been launched, or backward ends.
* Sums that the batch alone determines are started first; their readers wait for them.
* Masks are drawn in the order in which one process draws them, whatever the order of the dropouts.
* Values that wait on the host leave right after they are made, and come back while the block before runs in backward
  (`pcg.step.offload`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from shardwright.pcg.step.buckets import Buckets
from shardwright.pcg.step.chunk import Allocation, Chunk, Occurrence, Rerun, Use
from shardwright.pcg.step.masks import drawn_ahead
from shardwright.pcg.step.offload import leaving, returning
from shardwright.pcg.step.verbs import Action, Microbatch, Verb


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions of a chunk for one microbatch.

    forward    the actions of every operation, in order
    backward   the same, the last operation first; and, as the last entry, those at the end of backward
    units      the uses of parameters whose gradients are summed by one collective, in the order of launch
    """

    forward: tuple[tuple[Action, ...], ...]
    backward: tuple[tuple[Action, ...], ...]
    units: tuple[tuple[int, ...], ...]

    def of(self, *verbs: Verb, backward: bool | None = None) -> list[int]:
        """Return the numbers of all actions of these kinds, in order. `backward` None: of both passes."""
        passes = (self.forward, self.backward) if backward is None else (self.backward if backward else self.forward,)
        return [action.number for action in chain(*chain(*passes)) if action.verb in verbs]


def actions(chunk: Chunk, *, hold: bool = True, late: bool = False, ahead: bool = True, two: bool = False) -> Actions:
    """Return the actions of a chunk.

    Args:
        chunk: what runs.
        hold: whether backward comes right after forward, and begins with the blocks that are gathered then.
        late: whether backward gathers the next block only when it is done with one.
        ahead: whether blocks are gathered before they are needed at all.
        two: whether backward runs in two parts; an operation that gathers or recomputes would do so twice, so it has
            one.
    """
    recomputed = _made_again(chunk)
    reads = _read_again(chunk, recomputed)
    stay = frozenset(number for number, block in enumerate(chunk.blocks) if block.slices.lifetime != "pass")
    held = (stay | (held_blocks(chunk) if hold else frozenset())) & reads.keys()
    gathers = _Gathers(chunk, range(len(chunk.blocks)), frozenset(), late=False, ahead=ahead)
    forward = tuple(_forward(chunk, gathers, held))
    backward = _Backward(chunk, recomputed, reads, _Gathers(chunk, list(reads), held, late=late, ahead=ahead), two=two)
    return Actions(forward, tuple(backward.run()), tuple(backward.units))


def end_of_step(updated: Sequence[int] = (), *, shared: bool, tell: bool = False) -> tuple[Action, ...]:
    """Return the actions of a stage after its last backward.

    `tell`: whether there are other stages, which all learn the loss; `shared`: whether they have gradients of its
    parameters too; `updated`: the axes over which the optimizer has shards of whole weights (ZeRO-1).
    """
    between = (Action("tell", 0),) * tell + (Action("share", 0),) * shared
    return (*between, Action("update", 0), *(Action("regather", axis) for axis in updated))


def held_blocks(chunk: Chunk) -> frozenset[int]:
    """Return the blocks that are in use when the last one is gathered."""
    last_gather = max([block.first for block in chunk.blocks], default=0)
    return frozenset(number for number, block in enumerate(chunk.blocks) if block.last >= last_gather)


def _made_again(chunk: Chunk) -> dict[int, list[Occurrence]]:
    """Return the operations that run again before each operation's backward, in the order of backward."""
    rebuilt = set[Rerun | None]({None})
    return {
        o.number: [
            made for memory in o.keeps if memory.rerun not in rebuilt for made in _again(memory, o.rerun, rebuilt)
        ]
        for o in reversed(chunk.occurrences) if o.operation.is_differentiated
    }  # fmt: skip


def _again(memory: Allocation, reader: Rerun | None, rebuilt: set[Rerun | None]) -> Iterator[Occurrence]:
    """Yield what recomputes this memory for a reader, recomputing what that reads first; nothing if it is there."""

    def steps(memory: Allocation, reader: Rerun | None) -> Iterator[Occurrence | tuple[Allocation, Rerun]]:
        rerun = memory.rerun
        if rerun in rebuilt or rerun is None or (memory.fate.is_stored and rerun is not reader):
            return
        rebuilt.add(rerun)
        yield from ((read, rerun) for occurrence in rerun.occurrences for read in occurrence.reads)
        yield from rerun.needed()

    stack = [steps(memory, reader)]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
        elif isinstance(step, Occurrence):
            yield step
        else:
            stack.append(steps(*step))


def _read_again(chunk: Chunk, recomputed: Mapping[int, Sequence[Occurrence]]) -> dict[int, int]:
    """Return the blocks that backward reads, in its order, each with the operation whose backward reads it last."""
    first_reads = dict[int, int]()
    for number, made in recomputed.items():
        for occurrence in made:
            for block in chunk.blocks_of(occurrence):
                first_reads[block] = number
        for block in chunk.blocks_of(chunk.occurrences[number], backward=True):
            first_reads[block] = number
    return first_reads


class _Gathers:
    """The gathered blocks of one pass, which needs them in `order`; the blocks of `there` are there when it begins."""

    def __init__(self, chunk: Chunk, order: Sequence[int], there: frozenset[int], *, late: bool, ahead: bool) -> None:
        self.chunk, self.next = chunk, dict(pairwise(order)) if ahead else {}
        self.late, self.there, self.used = late, set(there), set[int]()

    def use(self, block: int) -> Iterable[Action]:
        """Return the actions before an operation that reads the block."""
        if block in self.used:
            return ()
        self.used.add(block)
        further = () if self.late else self._gather_next(block)
        return (*self._gather(block), Action("await", block), *further)

    def free(self, block: int) -> Iterable[Action]:
        """Return the actions after the last operation that reads the block."""
        freed = Action("free", block, "last" if self._stays(block) else "every")
        return (freed, *self._gather_next(block)) if self.late else (freed,)

    def _stays(self, block: int) -> bool:
        """Return whether the block stays for all microbatches."""
        return self.chunk.blocks[block].slices.lifetime == "step"

    def _gather_next(self, block: int) -> Iterable[Action]:
        return self._gather(self.next[block]) if block in self.next else ()

    def _gather(self, block: int) -> Iterable[Action]:
        if block in self.there:
            return ()
        self.there.add(block)
        return (Action("gather", block, "first" if self._stays(block) else "every"),)


def _forward(chunk: Chunk, gathers: _Gathers, held: frozenset[int]) -> Iterator[tuple[Action, ...]]:
    started, away, masks = dict[str, int](), leaving(chunk), drawn_ahead(chunk)
    for occurrence in chunk.occurrences:
        number, operation, actions = occurrence.number, occurrence.operation, list[Action]()
        for name in operation.reads if started else ():
            if name in started:
                actions.append(Action("wait", started.pop(name)))
        blocks = chunk.blocks_of(occurrence)
        for block in blocks:
            actions += gathers.use(block)
        if number in masks:
            actions += [Action("draw", dropout) for dropout in masks[number]]
        actions.append(Action(operation.verb, number, "last" if operation.verb == "total" else "every"))
        if operation.verb == "start":
            started[operation.name] = number
        actions += away.get(number, ())
        for block in blocks:
            if chunk.blocks[block].last == number and block not in held:
                actions += gathers.free(block)
        yield tuple(actions)


class _Backward:
    def __init__(
        self,
        chunk: Chunk,
        recomputed: Mapping[int, Sequence[Occurrence]],
        reads: Mapping[int, int],
        gathers: _Gathers,
        *,
        two: bool,
    ) -> None:
        self.chunk, self.again, self.gathers, self.two = chunk, recomputed, gathers, two
        self.last: dict[int, int] = {}  # for each block, the differentiated operation that reads it first in forward
        self.complete: dict[int, int] = {}  # and for each use of a parameter
        for number in recomputed:
            occurrence = chunk.occurrences[number]
            for block in chunk.blocks_of(occurrence):
                self.last[block] = number
            for use in chunk.trained(occurrence):
                self.complete[use] = number
        self.trained = {chunk.uses[use].block for use in self.complete}
        self.free = defaultdict[int, list[int]](list)
        for block, reader in reads.items():
            self.free[reader].append(block)
        self.buckets, self.units = Buckets[int](), list[tuple[int, ...]]()
        self.returning = returning(chunk, recomputed)
        self.scattered: int | None = None
        self.unspread: int | None = None

    def run(self) -> Iterator[tuple[Action, ...]]:
        for occurrence in reversed(self.chunk.occurrences):
            number = occurrence.number
            backward = self._of(occurrence) if number in self.again else ()
            yield (*self.returning.get(number, ()), *backward)
        yield tuple(self._end())

    def _of(self, occurrence: Occurrence) -> Iterable[Action]:
        number, operation, chunk, actions = occurrence.number, occurrence.operation, self.chunk, list[Action]()
        for made in self.again[number]:
            for block in chunk.blocks_of(made):
                actions += self.gathers.use(block)
            actions.append(Action("again", made.number))
        for block in chunk.blocks_of(occurrence, backward=True):
            actions += self.gathers.use(block)
        trained = chunk.trained(occurrence)
        split = bool(trained) and operation.split_backward and not (self.two and self._is_one(occurrence))
        if operation.gradients or not split:
            actions.append(Action("backward", number))
        if split:
            actions.append(Action("weights", number))
        for use in trained:
            block = chunk.uses[use].block
            if self.complete[use] == number and (block is None or self._is_summed(block)):
                actions.append(Action("accumulate", use))
            if self.complete[use] == number and block is None:
                actions += self._complete(chunk.uses[use])
        for block in self.free.get(number, ()):
            actions += self.gathers.free(block)
        for block in chunk.blocks_of(occurrence):
            if self.last[block] == number and block in self.trained:
                actions += (*self._deliver(), Action("scatter", block, self._when_scattered(block)))
                self.scattered = block
        return actions

    def _is_one(self, occurrence: Occurrence) -> bool:
        """Return whether an operation's backward stays in one part, as it does where only weights get gradients."""
        uses = (self.chunk.uses[use] for use in self.chunk.trained(occurrence))
        is_apart = occurrence.operation.gradients and occurrence.rerun is None
        return not is_apart or any(use.block is not None for use in uses)

    def _is_summed(self, block: int) -> bool:
        """Return whether whole gradients of the block are accumulated."""
        return self.chunk.blocks[block].slices.summed

    def _when_scattered(self, block: int) -> Microbatch:
        return "last" if self._is_summed(block) else "every"

    def _deliver(self) -> Iterator[Action]:
        if self.scattered is None:
            return
        yield Action("deliver", self.scattered, self._when_scattered(self.scattered))
        for use in self.chunk.blocks[self.scattered].uses:
            if use.parameter.grad:
                yield from self._complete(use)
        self.scattered = None

    def _complete(self, use: Use) -> Iterator[Action]:
        """Yield the sum over devices of a complete gradient's unit, if the gradient completes it."""
        p = use.parameter
        if p.sums:
            bucket = self.buckets.add(use.number, (p.sums, p.dtype), p.gradient_bytes, use.more)
            yield from self._reduce([bucket] if bucket else [])

    def _reduce(self, units: Iterable[Sequence[int]]) -> Iterator[Action]:
        for unit in units:
            number = len(self.units)
            yield Action("reduce", number, "last")
            self.units.append(tuple(unit))
            yield from self._spread()
            self.unspread = number if self.chunk.uses[unit[0]].parameter.summed_as else None

    def _spread(self) -> Iterator[Action]:
        """Yield the second leg of the last unit's sum, if it has one."""
        if self.unspread is not None:
            yield Action("spread", self.unspread, "last")
            self.unspread = None

    def _end(self) -> Iterator[Action]:
        yield from self._deliver()
        yield from self._reduce(self.buckets.rest())
        yield from self._spread()
