"""Dropout masks that are drawn ahead, each once, in the order in which a single process draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardwright.pcg.step.chunk import Chunk


def drawn_ahead(chunk: Chunk) -> Mapping[int, list[int]]:
    """Return the dropouts whose masks are drawn right before an operation, by the numbers of both.

    These are the masks that one process has drawn by then, and the operation's own if several operations share it.
    Other dropouts draw theirs as they run.
    """
    if all(o.operation.seed is None for o in chunk.occurrences):
        return {}
    spans = [number for number, span in enumerate(chunk.spans) for _ in range(span.start, span.end)]
    seeds = {
        o.number: (spans[o.number], o.operation.seed) for o in chunk.occurrences if o.operation.seed is not None
    }  # fmt: skip
    in_order = sorted(seeds.items(), key=lambda item: item[1])
    times, drawn, ahead = Counter(seeds.values()), set[tuple[int, int]](), dict[int, list[int]]()
    if in_order == list(seeds.items()) and len(times) == len(seeds):
        return {}
    for number, number_of_seed in seeds.items():
        for other, its in in_order:
            if its not in drawn and (its < number_of_seed or (its == number_of_seed and times[number_of_seed] > 1)):
                drawn.add(its)
                ahead.setdefault(number, []).append(other)
        drawn.add(number_of_seed)
    return ahead
