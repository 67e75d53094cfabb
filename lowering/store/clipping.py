"""Clipping by the global norm, on the ranks' own parts; a DTensor operation for each gradient would cost far more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.lowering import private
from shardwright.lowering.dtensors.reductions import all_extreme
from shardwright.lowering.ranks.movement import all_sum
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.ranks.waits import waiting
from shardwright.lowering.store.storage import Held
from shardwright.pcg.errors import NumericError

SHOWN = 10
"""The most parameters that an error names."""


def clip_gradients(
    parameters: Sequence[Held], ranks: Ranks, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before.

    With `error_if_nonfinite`, raises `NumericError` on all ranks if it is not finite.
    """
    held = [h for h in parameters if h.outside.grad is not None]
    gradients = [private.unwrap(h.outside.grad) for h in held if h.outside.grad is not None]
    dtype = reduce(torch.promote_types, (h.inside.dtype for h in parameters), torch.float32)
    with waiting("clipping", ranks.timeout_s):
        total = _global_norm(held, gradients, norm_type, ranks).to(dtype)
        if error_if_nonfinite and not total.isfinite():
            raise NumericError(_nonfinite(held, gradients, total, ranks))
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
    is_mine = torch.tensor(mine or [False], device=norms.device)
    total = torch.where(is_mine, norms**norm_type, 0.0).sum()  # infinity · 0 would be NaN
    return all_sum(total, ranks.everyone, inplace=True) ** (1.0 / norm_type)


def _nonfinite(held: list[Held], gradients: list[Tensor], total: Tensor, ranks: Ranks) -> str:
    """Return which parameters have gradients that are not finite, and on which ranks."""
    own = [h.name for h, gradient in zip(held, gradients, strict=True) if not gradient.isfinite().all()]
    by_rank = [own]
    if ranks.world > 1:
        by_rank = [list[str]() for _ in range(ranks.world)]
        dist.all_gather_object(by_rank, own)
    where: dict[str, list[int]] = {}
    for rank, names in enumerate(by_rank):
        for name in names:
            where.setdefault(name, []).append(rank)
    shown = [f"{name} (ranks {', '.join(map(str, on))})" for name, on in list(where.items())[:SHOWN]]
    more = f", and {len(where) - SHOWN} more" if len(where) > SHOWN else ""
    what = f"gradients with NaN or infinity: {', '.join(shown)}{more}" if where else "all gradients are finite"
    return (
        f"clip_grad_norm_: the norm is {total.item():g}; {what}; leave this step out, or look at its batch and weights"
    )
