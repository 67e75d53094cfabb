"""Messages around the ring of an axis: every rank sends to the next one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.movement import Axis, Started


def start_shift(x: Tensor, axis: Axis) -> Started:
    """Start to send a contiguous `x` to the next rank of the axis, and to receive that of the rank before."""
    received, group = torch.empty_like(x), axis.group
    assert group is not None, f"{axis.name}: nothing is sent along an axis without a group"
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    sent = dist.P2POp(dist.isend, x, group=group, group_peer=after)
    works = dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, group=group, group_peer=before)])

    def finish() -> Tensor:
        for work in works:
            work.wait()
        return received

    return finish
