"""The schedules of gathered blocks and of values on the host, compiled once from the list of actions.

A program opens blocks and frees them. Autograd opens them again, releases them, and computes their gradients. The list
determines which gathers are launched when a block is opened, which gradients are waited for before its own are
scattered, and in which microbatches it is freed and scattered. It also says when a unit's sum goes on to all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from shardwright.pcg.step.actions import Actions
from shardwright.pcg.step.verbs import Action, Microbatch, Verb


class BlockSchedule(NamedTuple):
    """The schedule of a program's blocks, by the number of a block.

    opened     the blocks that are gathered ahead when it is opened, in forward (False) or in backward (True)
    scatter    the blocks whose gradients are delivered before its own are scattered
    frees      the microbatches in which it is freed
    scatters   the microbatches in which its gradients are scattered

    A block that is missing in `frees` or `scatters` is freed or scattered in every microbatch.
    """

    opened: Mapping[tuple[int, bool], tuple[int, ...]] = {}
    scatter: Mapping[int, tuple[int, ...]] = {}
    frees: Mapping[int, Microbatch] = {}
    scatters: Mapping[int, Microbatch] = {}


class OffloadSchedule(NamedTuple):
    """The copies to and from the host in a run of a program, by allocation.

    leaving    the values, in the order in which forward gives them away
    released   the values that are given back together, in order
    arriving   the actions before operations of backward, those of the first operation in forward first
    """

    leaving: tuple[int, ...] = ()
    released: tuple[tuple[int, ...], ...] = ()
    arriving: tuple[tuple[Action, ...], ...] = ()


def offloads(actions: Actions) -> OffloadSchedule:
    """Return the schedule of copies in a chunk's list of actions."""
    released = (tuple(a.number for a in own if a.verb == "release") for own in actions.forward)
    arriving = (tuple(a for a in own if a.verb in ("fetch", "arrive")) for own in reversed(actions.backward))
    return OffloadSchedule(tuple(actions.of("offload")), tuple(filter(None, released)), tuple(filter(None, arriving)))


def schedule(actions: Actions) -> BlockSchedule:
    """Return the schedule of blocks in a chunk's list of actions."""
    passes = {False: actions.forward, True: actions.backward}
    opened = {
        (block, backward): tuple(ahead)
        for backward, listed in passes.items() for own in listed for block, ahead in _ahead(own)
    }  # fmt: skip
    scatter = {block: tuple(before) for own in actions.backward for block, before in _delivered(own)}
    return BlockSchedule(opened, scatter, _happen(actions, "free"), _happen(actions, "scatter"))


def spread_after(actions: Actions) -> Mapping[int, tuple[int, ...]]:
    """Return the units of gradients whose sums are sent to all ranks right after a unit is launched, by that unit."""
    found, launched = dict[int, tuple[int, ...]](), 0
    for action in chain(*actions.backward):
        if action.verb == "reduce":
            launched = action.number
        elif action.verb == "spread" and action.number != launched:
            found[launched] = (*found.get(launched, ()), action.number)
    return found


def _happen(actions: Actions, verb: Verb) -> Mapping[int, Microbatch]:
    """Return the microbatches of the actions with this verb, by the block's number."""
    return {a.number: a.microbatch for a in chain(*actions.forward, *actions.backward) if a.verb == verb}


def _ahead(own: Sequence[Action]) -> Iterator[tuple[int, list[int]]]:
    """Yield the blocks that an operation awaits, each with those gathered right after it and not awaited at once."""
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
    """Yield the blocks that are scattered after an operation, each with the blocks delivered before it."""
    before = list[int]()
    for action in own:
        if action.verb == "deliver":
            before.append(action.number)
        elif action.verb == "scatter":
            yield action.number, before
            before = []
