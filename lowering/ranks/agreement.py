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
    local = torch.stack([one.to(ranks.device) for one in digests([*values.values()])])
    extremes = torch.stack([local, ~local])  # of all ranks, the largest and the complement of the smallest
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    names = [name for name, equal in zip(values, (extremes[0] == ~extremes[1]).tolist(), strict=True) if not equal]
    with torch.no_grad():
        for name in names:
            value = values[name].detach()
            sent = value.to(ranks.device).resolve_conj().contiguous()
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
    return digests([value])[0]


def digests(values: Sequence[Tensor]) -> list[Tensor]:
    """Return the hash of each tensor."""
    numbers = [_numbers(value) for value in values]
    most = dict[torch.device, int]()
    for group in numbers:
        most[group.device] = max(most.get(group.device, 0), len(group))
    mixers = {device: _Mixer(size, device) for device, size in most.items()}
    return [mixers[values.device].hash(values) for values in numbers]


def _numbers(value: Tensor) -> Tensor:
    """Return a tensor's bits as integers, eight bytes at a time where these divide them."""
    flat = value.detach().reshape(-1).contiguous()  # a vector of spaced numbers is reshaped as it is
    flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
    size = flat.element_size()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * size % 8:  # the reads then depend on the shape alone
        flat = flat.clone()
    return flat.view(torch.int64 if flat.nbytes % 8 == 0 and flat.nbytes else _INTEGERS[size])


class _Mixer:
    """Hashes integers, chunk by chunk, in memory that is made once."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._size = _CHUNKS.get(device.type, 1 << 15)
        most = min(most, self._size)
        self._own, self._spare = (torch.empty(most, dtype=torch.int64, device=device) for _ in range(2))
        self._places = torch.arange(1, 1 + most, device=device)
        _mix(self._places, self._spare)

    def hash(self, numbers: Tensor) -> Tensor:
        sums = [self._of_chunk(chunk) for chunk in numbers.split(self._size)]
        return sums[0] if len(sums) == 1 else self.hash(torch.stack(sums))

    def _of_chunk(self, chunk: Tensor) -> Tensor:
        """Return the sum of all numbers, each hashed with its place."""
        hashed = self._own[: len(chunk)]
        torch.bitwise_xor(chunk.long(), self._places[: len(chunk)], out=hashed)
        _mix(hashed, self._spare[: len(chunk)])
        return hashed.sum()


def _mix(x: Tensor, spare: Tensor) -> None:
    """Hash every number in place, so that each bit depends on all bits. `spare`: memory of its size.

    It is the finalizer of SplitMix64, with signed shifts.
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x ^= torch.bitwise_right_shift(x, shift, out=spare)
        x *= factor
    x ^= torch.bitwise_right_shift(x, 31, out=spare)
