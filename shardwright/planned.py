"""The compiled models that a plan has given their layouts."""

from __future__ import annotations

from shardwright.lowering.module import ParallelModule
from shardwright.pcg.errors import ShardwrightError


def require_plan(parallel: ParallelModule, what: str, error: type[ShardwrightError]) -> None:
    """Raise `error`, which says that `what` takes compiled models with a plan, for anything else."""
    if not isinstance(parallel, ParallelModule):
        raise error(f"{what}: expected a model that shardwright.compile gave, got a {type(parallel).__name__}")
    if not hasattr(parallel, "ranks"):
        raise error(
            f"{what}: the model was compiled without a batch, and has no plan before its first call; give compile the "
            "batch, as kwargs=batch"
        )
