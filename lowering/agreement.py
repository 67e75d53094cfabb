"""One model on all ranks: its shape must be the same; where values differ, rank 0's count, as with DDP.

A model may have been built in another order on every rank, where it loops over a `set`: so everything goes by names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.lowering.launch import Ranks
from shardwright.pcg.capture import flat_batch, names_by_first, split_batch


def model_facts(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same on all ranks of a model and its batch, in words, by what it is of.

    Raises `CaptureError` where the model does not take the batch.
    """
    facts = {"the model": type(model).__name__}
    for name, module in model.named_modules(remove_duplicate=False):
        facts[f"module {name!r}"] = "in train mode" if module.training else "in eval mode"
    values = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for names in names_by_first(values).values():
        for name in names:
            kind = "trained" if values[name].requires_grad else "not trained"
            facts[f"tensor {name!r}"] = ", ".join([_type(values[name]), kind, *sorted(n for n in names if n != name)])
    tensors, options = split_batch(model, args, kwargs)
    for name, value in {**flat_batch(tensors), **options}.items():
        facts[f"batch: {name!r}"] = _type(value)
    return facts


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    plain = all(x is None or isinstance(x, (bool, int, float, str)) for x in tree_leaves(value))
    return repr(value) if plain else type(value).__name__  # where an object lies in memory differs


def share_values(values: Mapping[str, Tensor], ranks: Ranks) -> list[str]:
    """Overwrite, in place, what differs between ranks by what rank 0 has; the names of what differed."""
    if ranks.mesh.num_devices == 1 or ranks.is_dry or not values:
        return []
    values = dict(sorted(values.items()))
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
