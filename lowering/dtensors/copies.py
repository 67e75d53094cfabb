"""A check of writes into a part of a sharded DTensor: refused if torch would write to a copy and lose them.

    p[:16].zero_()    p is sharded along dim 0: torch gathers p, and the part is a slice of the gathered copy

In this case autograd calls the part a view of its tensor, but their local memory differs.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.tensor import DTensor

from shardwright.lowering import private, private_dtensors
from shardwright.pcg.errors import ShardwrightError


def refuse_lost_writes() -> None:
    """Make it an error, in this process, to write into a part of a DTensor of ours that is a copy."""
    private_dtensors.before_writes(_check)


def _check(op: private.OpOverload, written: Iterable[DTensor]) -> None:
    for part in written:
        whole = part._base
        if isinstance(whole, DTensor) and private.memory_of(part)[1:] != private.memory_of(whole)[1:]:
            raise ShardwrightError(
                f"{private_dtensors.name_of(op)} writes to a part {list(part.shape)} of a tensor {list(whole.shape)} "
                f"with placements {whole.placements}; the part cuts a dimension that is sharded, so torch has made a "
                "copy, and the write would be lost. Do it before shardwright.compile; or change the whole tensor and "
                "copy that, on every rank and under no_grad: whole = p.detach().full_tensor().clone(); whole[...] = "
                "...; p.copy_(distribute_tensor(whole, p.device_mesh, p.placements))"
            )
