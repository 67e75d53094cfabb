"""What the runtime does with gathered blocks, compiled once from the list of actions.

A program opens blocks and frees them. Autograd opens them again, lets go of them, and gives their gradients. The list
says what is launched when a block is opened, what is waited for before its gradients are scattered, and in which
microbatches it is freed and scattered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from shardwright.pcg.step.actions import Actions
from shardwright.pcg.step.verbs import Action, Microbatch, Verb


class BlockSchedule(NamedTuple):
    """Of all blocks of a program, by number.

    opened     the blocks that are gathered ahead when this one is opened: in forward (False) or in backward (True)
    scatter    those whose gradients are delivered before its own are scattered
    frees      in which microbatches a block is freed, and `scatters`: its gradients scattered; where the list has none
               of that, in every one
    """

    opened: Mapping[tuple[int, bool], tuple[int, ...]] = {}
    scatter: Mapping[int, tuple[int, ...]] = {}
    frees: Mapping[int, Microbatch] = {}
    scatters: Mapping[int, Microbatch] = {}


def schedule(actions: Actions) -> BlockSchedule:
    """What the list of a chunk's actions says of its blocks."""
    passes = {False: actions.forward, True: actions.backward}
    opened = {
        (block, backward): tuple(ahead)
        for backward, listed in passes.items() for own in listed for block, ahead in _ahead(own)
    }  # fmt: skip
    scatter = {block: tuple(before) for own in actions.backward for block, before in _delivered(own)}
    return BlockSchedule(opened, scatter, _happen(actions, "free"), _happen(actions, "scatter"))


def _happen(actions: Actions, verb: Verb) -> Mapping[int, Microbatch]:
    """In which microbatches actions of a kind happen, by what they are about."""
    return {a.number: a.microbatch for a in chain(*actions.forward, *actions.backward) if a.verb == verb}


def _ahead(own: Sequence[Action]) -> Iterator[tuple[int, list[int]]]:
    """The blocks that an operation awaits, with those that are gathered right after each, and not awaited at once."""
    found, block = dict[int, list[int]](), None
    for action, following in pairwise(chain(own, [None])):
        assert action is not None
        if action.verb == "await":
            block = action.number
            found[block] = []
        elif action.verb != "gather":
            block = None
        elif block is not None and not (following and following[:2] == ("await", action.number)):
            found[block].append(action.number)
    yield from found.items()


def _delivered(own: Sequence[Action]) -> Iterator[tuple[int, list[int]]]:
    """The blocks that are scattered after an operation, with those that are delivered before each."""
    before = list[int]()
    for action in own:
        if action.verb == "deliver":
            before.append(action.number)
        elif action.verb == "scatter":
            yield action.number, before
            before = []
