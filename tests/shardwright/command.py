"""What tests of the command line share: a model file, rule files, and a way to run commands."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from shardwright.lowering.ranks.launch import run_ranks
from tests.forked import run_as_main

Run = Callable[..., tuple[int, str, str]]
"""`run("plan", "models.py:net")` gives (status, stdout, stderr)."""

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale=1.0):
        return (self.down(self.up(x).relu()) * scale).square().mean()

def net():
    return Net(), {"x": torch.randn(4, 8)}
"""


def launch(command: Sequence[str], num_ranks: int, *, quiet: bool = False) -> int:
    """What torchrun does, on forked ranks, which have loaded everything already; raises where one of them fails."""

    def rank() -> None:
        rank, world = str(dist.get_rank()), str(num_ranks)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        with contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
            run_as_main(command)
        sys.stdout.flush()
        sys.stderr.flush()

    run_ranks(rank, num_ranks, grace_s=20.0)
    return 0


def write(*rules: object, name: str = "mine.json") -> str:
    """A rule file in the current folder."""
    Path(name).write_text(json.dumps({"version": 1, "rules": list(rules)}))
    return name
