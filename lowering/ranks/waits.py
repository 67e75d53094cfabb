"""Waits for other ranks during start-up: each ends after the module's timeout, with an error that says so.

The groups of a mesh's axes have this timeout anyway (`launch.connect`). The group of all ranks may be the user's, whose
own timeout is restored afterwards.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch.distributed as dist

from shardwright.lowering import private
from shardwright.pcg.errors import DistributedError

_SIGNS = (
    "Connection closed", "Connection reset", "Timed out", "timed out", "Wait timeout", "pair closure", "gloo", "NCCL",
    "Broken pipe", "Socket",
)  # fmt: skip


@contextmanager
def start_up(timeout_s: float) -> Generator[None]:
    """Limit the waits of ranks before the first step: a wait that takes longer raises a `DistributedError`."""
    try:
        with private.world_timeout(timeout_s):
            yield
    except RuntimeError as error:
        if (found := blame(error, f"start-up (timeout_s={timeout_s:g})")) is error:
            raise
        raise found from error


def blame(error: RuntimeError, phase: str) -> RuntimeError | DistributedError:
    """Return an error of the process group as a `DistributedError`, and any other error unchanged."""
    text = str(error)
    if not isinstance(error, dist.DistError) and not any(sign in text for sign in _SIGNS):
        return error
    rank = f"rank {dist.get_rank()} of {dist.get_world_size()}: " if dist.is_initialized() else ""
    return DistributedError(
        f"{rank}a collective failed in {phase}: {text.strip()}; another rank has probably failed or is stuck, see its "
        "output; start all ranks anew"
    )
