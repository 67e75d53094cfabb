"""Find the number of messages that each queue must hold so that nothing blocks.

With room for c messages, the k-th send of a queue begins after the (k - c)-th receive has ended. With none, a send and
its receive are one event, a rendezvous. More room never blocks anything, so the least that works is found by halving.
"""

from __future__ import annotations

from shardwright.verifier.collectives.events import Execution, topological


def least_capacity(execution: Execution) -> int:
    """Return the least room of all queues with which the execution ends; it does with enough of it."""
    low, high = 0, max((len(sends) for sends, _ in execution.queues), default=0)
    while low < high:
        middle = (low + high) // 2
        if ends_with(execution, middle):
            high = middle
        else:
            low = middle + 1
    return low


def ends_with(execution: Execution, capacity: int) -> bool:
    """Return whether the execution ends with room for `capacity` messages in each queue."""
    after = [list(event.after) for event in execution.events]
    if capacity:
        for sends, receives in execution.queues:
            for send, receive in zip(sends[capacity:], receives, strict=False):
                after[send].append(receive)
        return len(topological(after)) == len(after)
    meetings, messages = _meetings(execution), {pair for queue in execution.queues for pair in zip(*queue, strict=True)}
    merged: list[list[int]] = [[] for _ in after]
    for number, earlier in enumerate(after):
        merged[meetings[number]] += [meetings[one] for one in earlier if (one, number) not in messages]
    return len(topological(merged)) == len(merged)


def _meetings(execution: Execution) -> list[int]:
    """Return for each event the first of those that happen together with it."""
    parent = list(range(len(execution.events)))

    def first(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    for sends, receives in execution.queues:
        for send, receive in zip(sends, receives, strict=True):
            parent[first(receive)] = first(send)
    return [first(number) for number in range(len(parent))]
