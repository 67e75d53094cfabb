"""Values that wait for backward on the host: when they leave, and when they are fetched.

A value leaves right after the first operation that touches it. In backward, the values that a block of the model is the
first to need are fetched while the preceding block runs; they are waited for where the block begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby

from shardwright.pcg.step.chunk import Allocation, Chunk, Occurrence
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.verbs import Action


def leaving(chunk: Chunk) -> Mapping[int, list[int]]:
    """Return the allocations that leave for the host, by the operation that touches them first."""
    away, found = _on_the_host(chunk), defaultdict[int, list[int]](list)
    for o in chunk.occurrences if away else ():
        for memory in (*o.reads, o.result, *o.keeps):
            if memory in away:
                away.remove(memory)
                found[o.number].append(memory.number)
    return found


class Fetches:
    """The copies back from the host, block by block of the model, in the order of backward."""

    def __init__(self, chunk: Chunk) -> None:
        self._needs = list[list[int]]()  # the allocations that each block is the first to need
        self.begins = dict[int, int]()  # the number of a block, by the operation with which backward enters it
        if not (away := _on_the_host(chunk)):
            return
        span_of = [number for number, span in enumerate(chunk.spans) for _ in range(span.start, span.end)]
        for _, run in groupby(reversed(chunk.occurrences), key=lambda o: (span_of[o.number], o.operation.block)):
            block, needs = list(run), list[int]()
            self.begins[block[0].number] = len(self._needs)
            for o in block:
                for memory in _reads_in_backward(o):
                    if memory in away:
                        away.remove(memory)
                        needs.append(memory.number)
            self._needs.append(needs)

    def before(self, number: int) -> Iterator[Action]:
        """Yield the actions where a block begins: wait for the values that it needs, launch those of the next block."""
        block = self.begins[number]
        if block == 0:
            yield from self._fetch(0)
        yield from (Action("arrive", memory) for memory in self._needs[block])
        if block + 1 < len(self._needs):
            yield from self._fetch(block + 1)

    def _fetch(self, block: int) -> Iterator[Action]:
        return (Action("fetch", memory) for memory in self._needs[block])


def _on_the_host(chunk: Chunk) -> set[Allocation]:
    return {memory for memory in chunk.allocations if memory.fate is Fate.HOST}


def _reads_in_backward(o: Occurrence) -> Iterator[Allocation]:
    """Yield the memory that an operation's backward reads, and that its recomputation reads."""
    yield from o.keeps
    for inside in o.rerun.occurrences if o.rerun is not None else ():
        yield from inside.reads
