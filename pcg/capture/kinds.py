"""The choice of the layers that stand for all others when a model is exported: one of each kind."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from itertools import pairwise

from shardwright.pcg.capture.depth import Layers


def chosen(
    path: str, calls: Mapping[int, int], kinds: Mapping[int, int], apart: Collection[int], several: Collection[int]
) -> Layers | None:
    """Return the layers of a list with one that stands for each; None if most of them would be exported.

    `calls` and `kinds` are as in `Layers`. The first layer, and those of `apart`, stand for themselves; so does the
    last, unless it is of the kind of the one that is exported last, which then is read in its place. `several`: the
    layers that read more than one value of the one before; they are exported behind each kind that they follow.
    """
    numbers = [*kinds]
    kept = sorted({numbers[0], *apart, *_firsts(kinds, several)})
    last = numbers[-1]
    if kinds[kept[-1]] != kinds[last] or kept[-1] in {numbers[0], *apart}:
        kept = sorted({*kept, last})
    if 3 * len(kept) > 2 * len(numbers):
        return None
    before, kept_before = dict(_before(numbers)), dict(_before(kept))

    def stand_in(number: int) -> int:
        """Return the exported layer of the kind, if possible one behind a layer of the same kind as here."""
        alike = [k for k in kept[1:] if kinds[k] == kinds[number]]
        return next((k for k in alike if kinds[kept_before[k]] == kinds[before[number]]), alike[0])

    return Layers(path, {n: n if n in kept else stand_in(n) for n in numbers}, calls, kinds)


def _before(numbers: list[int]) -> Iterator[tuple[int, int]]:
    yield from ((after, number) for number, after in pairwise(numbers))


def _firsts(kinds: Mapping[int, int], several: Collection[int]) -> Iterator[int]:
    """Yield the first layer of each kind; where it reads several values, and behind each kind, with the one before."""
    seen = set[Hashable]()
    for before, number in pairwise(kinds):
        key = (kinds[before], kinds[number]) if number in several else kinds[number]
        if key not in seen:
            seen.add(key)
            yield from (before, number) if number in several else (number,)
