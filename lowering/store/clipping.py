"""Clipping by the global norm, on the ranks' own parts; a DTensor operation for each gradient would cost far more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering import private
from shardwright.lowering.dtensors.reductions import all_extreme
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.store.storage import Held


def clip_gradients(parameters: Sequence[Held], ranks: Ranks, max_norm: float, norm_type: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before."""
    held = [h for h in parameters if h.outside.grad is not None]
    gradients = [private.unwrap(h.outside.grad) for h in held if h.outside.grad is not None]
    dtype = reduce(torch.promote_types, (h.outside.dtype for h in parameters), torch.float32)
    total = _global_norm(held, gradients, norm_type, ranks).to(dtype)
    if gradients:
        private.scale_(gradients, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def _global_norm(held: list[Held], gradients: list[Tensor], norm_type: float, ranks: Ranks) -> Tensor:
    """Return the norm over all elements of all gradients; each shard counts once, however many ranks hold a copy.

    All ranks compute it in fp64, as a stage may have gradients of another dtype, or none.
    """
    if not gradients and ranks.world == 1:
        return torch.zeros((), device=ranks.device)
    norms = private.norms(gradients, norm_type) if gradients else torch.zeros(1, device=ranks.device)
    norms = norms.double()
    if norm_type == float("inf"):
        return all_extreme(norms.max())
    mine = [
        h.counts
        and all(
            x.is_shard or axis.group is None or axis.rank == 0 for x, axis in zip(h.layouts, ranks.axes, strict=True)
        )
        for h in held
    ]
    total = (norms**norm_type * torch.tensor(mine or [False], device=norms.device)).sum()
    dist.all_reduce(total)
    return total ** (1.0 / norm_type)
