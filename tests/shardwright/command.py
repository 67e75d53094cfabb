"""What tests of the command line share: a model file, rule files, and a way to run commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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


def write(*rules: object, name: str = "mine.json") -> str:
    """A rule file in the current folder."""
    Path(name).write_text(json.dumps({"version": 1, "rules": list(rules)}))
    return name
