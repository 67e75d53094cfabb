"""Messages around the ring of an axis: a rank sends to the next one, or back to where something came from."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.movement import Axis

Message = tuple[Tensor, int]
"""A contiguous tensor, and the rank of the axis that it is sent to or received from."""


def start_shift(axis: Axis, send: Message | None, *receive: Message | None) -> Callable[[], None] | None:
    """Start to send a message, and to receive others into their tensors, where there are any.

    What is returned waits for all of them; None: there are none. Messages that are started together may meet.
    """
    given = ((dist.isend, send), *((dist.irecv, message) for message in receive))
    messages = [(way, message) for way, message in given if message is not None]
    if not messages:
        return None
    group = axis.group
    assert group is not None, f"{axis.name}: nothing is sent along an axis without a group"
    works = dist.batch_isend_irecv([dist.P2POp(way, x, group=group, group_peer=rank) for way, (x, rank) in messages])

    def wait() -> None:
        while works:
            works.pop().wait()

    return wait
