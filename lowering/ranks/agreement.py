"""Agreement between ranks: tensors are compared by digests, and a model that differs is taken from rank 0.

A digest is a 64-bit hash of a tensor's values and their places, computed on the tensor's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.ranks.ranks import Ranks

_CHUNKS = {"cpu": 1 << 15, "cuda": 1 << 22}  # numbers mixed at a time: what a cache holds; on GPUs, few kernels
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def share_values(values: Mapping[str, Tensor], ranks: Ranks) -> list[str]:
    """Overwrite tensors that differ between ranks in place by rank 0's, as DDP does; return the names of these."""
    if not has_others(ranks) or not values:
        return []
    values = dict(sorted(values.items()))  # a model may have been built in another order on every rank
    own = torch.stack([digest(value).to(ranks.device) for value in values.values()])
    extremes = torch.stack([own, ~own])  # of all ranks, the largest and the complement of the smallest
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    names = [name for name, equal in zip(values, (extremes[0] == ~extremes[1]).tolist(), strict=True) if not equal]
    with torch.no_grad():
        for name in names:
            value = values[name].detach()
            sent = value.to(ranks.device).contiguous()
            sent = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
            dist.broadcast(sent, src=0)
            value.copy_(sent.view(torch.bool) if value.dtype == torch.bool else sent)
    return names


def order_of_rank_0(names: Sequence[str], ranks: Ranks) -> list[str]:
    """Return the names in rank 0's order; every rank must pass the same names."""
    message = [list(names)]
    if has_others(ranks):
        dist.broadcast_object_list(message, src=0)
    return message[0]


def has_others(ranks: Ranks) -> bool:
    """Return whether there is another rank to agree with."""
    return ranks.world > 1 and not ranks.is_dry


def gathered(row: Tensor, ranks: Ranks) -> list[list[int]]:
    """Return every rank's row of numbers, in rank order, by one collective; rows have the same length on all ranks."""
    rows = row.new_empty((ranks.world, len(row)))
    work = dist.all_gather_single(rows.view(-1), row, async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=ranks.timeout_s))
    return rows.tolist()


def digest(value: Tensor) -> Tensor:
    """Return a 64-bit hash of a tensor's bits and their order: an int64 without dimensions on the tensor's device."""
    flat = value.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    size = flat.element_size()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * size % 8:  # the reads then depend on the shape alone
        flat = flat.clone()
    numbers = flat.view(torch.int64 if flat.nbytes % 8 == 0 and flat.nbytes else _INTEGERS[size])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    size = _CHUNKS.get(flat.device.type, 1 << 15)
    for number, chunk in enumerate(numbers.split(size)):
        start = 1 + number * size
        places = torch.arange(start, start + chunk.numel(), device=flat.device)
        total += _mixed(chunk.long() ^ _mixed(places)).sum()
    return total


def _mixed(x: Tensor) -> Tensor:
    """Hash every number, so that each bit depends on all bits (the finalizer of SplitMix64, with signed shifts)."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)
