"""Rows along one mesh axis: each rank has others for every rank, and how many is known only when a step runs.

Torch's all-to-all sends each rank its rows. A schedule may send them by other ranks, which then have to know how many
pass, so ranks that have schedules tell all ranks all counts. What carries the rows is picked for the number that the
plan expects, as they are priced.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.movement import Axis
from shardwright.pcg.rows.experts import IMBALANCE


class Counts(NamedTuple):
    """The numbers of rows that this rank sends `there` to each rank, and that each sends `back` here.

    `every`: by sender and receiver, of all ranks; None: nobody needs them.
    """

    there: list[int]
    back: list[int]
    every: list[list[int]] | None = None

    @property
    def reversed(self) -> Counts:
        """The counts of rows that go the other way."""
        return Counts(self.back, self.there, self.every and [list(column) for column in zip(*self.every, strict=True)])


def tell_counts(counts: Tensor, axis: Axis) -> Counts:
    """Tell the other ranks how many rows each will get from this one."""
    if axis.size == 1:
        return Counts(counts.tolist(), counts.tolist())
    if axis.schedules is None or not axis.schedules.knows("all_to_all"):
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=axis.group)
        return Counts(*torch.stack([counts, received]).tolist())
    every = counts.new_empty(axis.size * axis.size)
    dist.all_gather_single(every, counts, group=axis.group)
    table = every.view(axis.size, -1).tolist()
    return Counts(table[axis.rank], [row[axis.rank] for row in table], table)


def exchange_rows(x: Tensor, axis: Axis, counts: Counts, expected: int) -> Tensor:
    """Send each rank its rows of `x`, one rank after the other, and return those received in the same order.

    `expected`: the mean number of rows that a rank sends each rank, by the plan.
    """
    received = x.new_empty(sum(counts.back), *x.shape[1:])
    if axis.size == 1:
        return received.copy_(x)
    x, width = x.contiguous(), x.shape[1:].numel()
    num_bytes = IMBALANCE * axis.size**2 * expected * width * x.element_size()
    if counts.every is None or axis.schedules is None or not axis.schedules.has("all_to_all", num_bytes):
        dist.all_to_all_single(received, x, counts.back, counts.there, group=axis.group)
        return received
    units = [[rows * width for rows in row] for row in counts.every]
    axis.schedules.start_uneven("all_to_all", x.view(-1), received.view(-1), units, num_bytes).wait()
    return received
