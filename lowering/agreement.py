"""One model on all ranks: where ranks have built theirs from different seeds, rank 0's values count, as with DDP."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering.launch import Ranks


def share_values(values: Mapping[str, Tensor], ranks: Ranks) -> list[str]:
    """Overwrite, in place, what differs between ranks by what rank 0 has; the names of what differed."""
    if ranks.mesh.num_devices == 1 or ranks.is_dry or not values:
        return []
    names = different([_fingerprint(value) for value in values.values()], list(values), ranks)
    with torch.no_grad():
        for name in names:
            value = values[name].detach()
            sent = value.to(ranks.device).contiguous()
            sent = sent.view(torch.uint8) if sent.dtype == torch.bool else sent
            dist.broadcast(sent, src=0)
            value.copy_(sent.view(torch.bool) if value.dtype == torch.bool else sent)
    return names


def different(fingerprints: list[list[float]], names: list[str], ranks: Ranks) -> list[str]:
    """The names whose fingerprints are not the same on every rank."""
    low = torch.tensor(fingerprints, dtype=torch.float64, device=ranks.device)
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    same = (low == high).all(1).tolist()
    return [name for name, equal in zip(names, same, strict=True) if not equal]


def _fingerprint(value: Tensor) -> list[float]:
    """Two sums that tell different random values apart; NaN counts as a number of its own."""
    flat = torch.nan_to_num(value.detach().flatten().double(), nan=0.5)
    return [float(flat.sum()), float(flat[::2].sum())]
