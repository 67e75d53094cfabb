"""One state of a run in a folder: the next that is saved there takes its place once it is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.waits import waiting
from shardwright.lowering.store.checkpoint_folder import CheckpointFolder
from shardwright.pcg.errors import CheckpointError
from shardwright.ranks import from_rank_0
from shardwright.saving import Stateful, load, save

Folder = str | os.PathLike[str]


def save_state(
    folder: Folder, parallel: ParallelModule, optimizer: torch.optim.Optimizer | None, others: Stateful
) -> None:
    """Save a run by `shardwright.save` in place of the one that the folder has. Every rank calls it."""
    with waiting("save", parallel.ranks.timeout_s):
        steps = from_rank_0(lambda: CheckpointFolder(Path(folder)).steps(), "the states in a folder")
    save(folder, parallel, optimizer, others, step=steps[-1] + 1 if steps else 0, keep=1)


def load_state(
    folder: Folder, parallel: ParallelModule, optimizer: torch.optim.Optimizer | None, others: Stateful | None
) -> None:
    """Load what `save_state` has saved. Every rank calls it. Raises `CheckpointError` if there is nothing."""
    if load(folder, parallel, optimizer, others) is None:
        raise CheckpointError(f"{folder}: there is no state of a compiled model's run")


class Kept:
    """A value as an object with a state."""

    def __init__(self, value: Any = None) -> None:  # noqa: ANN401
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.value = state_dict["value"]
