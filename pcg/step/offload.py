"""Values that wait for backward on the host: when they leave, when their memory is given back, when they are fetched.

Copies are made group by group: a group is a block of the model or, outside of blocks, a module. What a group makes
leaves at once, and is given back when the next group has run. In backward, what a group is the first to need is fetched
while the group before it runs, and waited for where the group begins. So at most two groups' values are on their way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby

from shardwright.pcg.step.chunk import Chunk, Occurrence
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.verbs import Action, Verb

Group = Sequence[Occurrence]
ActionsByOperation = Mapping[int, Sequence[Action]]


def leaving(chunk: Chunk) -> ActionsByOperation:
    """Return the actions after each operation of forward: values leave, and those of the group before are released.

    A value leaves after the last operation that writes it or, if that is made again, after the last one of its region.
    """
    actions = defaultdict[int, list[Action]](list)
    if not (away := _waiting(chunk)):
        return actions
    ends = list[int]()
    group_of = dict[int, int]()
    for number, group in enumerate(_groups(chunk)):
        ends.append(group[-1].number)
        group_of.update((o.number, number) for o in group)
    left = defaultdict[int, list[int]](list)
    for memory in away:
        writer = chunk.occurrences[chunk.allocations[memory].writers[-1]]
        last = writer if writer.rerun is None else writer.rerun.occurrences[-1]
        actions[last.number].append(Action("offload", memory))
        left[group_of[last.number]].append(memory)
    for number, values in left.items():
        actions[ends[min(number + 1, len(ends) - 1)]] += _all("release", values)
    return actions


def returning(chunk: Chunk, recomputed: Mapping[int, Sequence[Occurrence]]) -> ActionsByOperation:
    """Return the actions before operations of backward: a group's values arrive, and the next group's are launched.

    `recomputed`: the differentiated operations, in the order of backward, with what is made again before each.
    """
    if not (away := set(_waiting(chunk))):
        return {}
    begins, needs = list[int](), list[list[int]]()
    for group in reversed(_groups(chunk)):
        reruns = [o for o in reversed(group) if o.number in recomputed and o.operation.verb == "run"]
        if reruns:
            read = chain.from_iterable(
                (*chain(*(made.reads for made in recomputed[o.number])), *o.keeps) for o in reruns
            )
            needs.append(list(dict.fromkeys(memory.number for memory in read if memory.number in away)))
            away.difference_update(needs[-1])
            begins.append(reruns[0].number)
    fetches = {
        number: [*_all("arrive", values), *_all("fetch", following)]
        for number, values, following in zip(begins, needs, [*needs[1:], []], strict=True)
    }
    fetches[begins[0]] = [*_all("fetch", needs[0]), *fetches[begins[0]]]
    return {number: actions for number, actions in fetches.items() if actions}


def _all(verb: Verb, memories: Sequence[int]) -> Iterator[Action]:
    return (Action(verb, memory) for memory in memories)


def _waiting(chunk: Chunk) -> list[int]:
    return [memory.number for memory in chunk.allocations if memory.fate is Fate.HOST]


def _groups(chunk: Chunk) -> list[Group]:
    span_of = [number for number, span in enumerate(chunk.spans) for _ in range(span.start, span.end)]

    def group(o: Occurrence) -> tuple[int, str, str]:
        operation = o.operation
        return span_of[o.number], operation.block, "" if operation.block else operation.module

    return [list(members) for _, members in groupby(chunk.occurrences, key=group)]
