"""Draws by functions that were imported by their names: the module that draws runs as it is, or is named."""

from __future__ import annotations

import random
from random import random as uniform

import numpy as np
import pytest
import torch
from numpy.random import rand
from torch import Tensor, nn

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError
from shardwright.pcg.foreign import calls

BATCH = {"x": torch.ones(2, 4)}


class Skipped(nn.Module):
    """A layer that is left out at random."""

    def __init__(self, generator: str) -> None:
        super().__init__()
        self.lin, self.generator = nn.Linear(4, 4), generator

    def forward(self, x: Tensor) -> Tensor:
        return x if (rand() if self.generator == "NumPy's random" else uniform()) < 0.5 else self.lin(x)


class Outer(nn.Module):
    def __init__(self, *parts: nn.Module, draws: bool = False) -> None:
        super().__init__()
        self.parts, self.draws = nn.ModuleList(parts), draws

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.mean() * (uniform() if self.draws else 1)


@pytest.mark.parametrize("generator", ["Python's random", "NumPy's random"])
def test_the_modules_that_draw_are_foreign(generator: str) -> None:
    states = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    model = Outer(nn.Linear(4, 4), Skipped(generator), nn.Sequential(nn.Tanh(), Skipped(generator)))
    reasons = {call.name: call.why for call in calls(capture(model, BATCH, find=True).graph)}
    assert list(reasons) == ["parts.1", "parts.2.1"]
    assert all(
        why.endswith(f": forward draws from {generator}") and "test_late_draws.py:" in why for why in reasons.values()
    )
    assert (random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()) == states


def test_a_draw_beside_them_is_refused() -> None:
    model = Outer(Skipped("Python's random"), draws=True)
    with pytest.raises(
        CaptureError, match=r"in module 'Outer': UnseenError: forward draws from Python's random.*Or put"
    ):
        capture(model, BATCH, find=True)


def test_without_a_search_the_model_is_refused() -> None:
    with pytest.raises(CaptureError, match="forward draws from Python's random"):
        capture(Outer(Skipped("Python's random")), BATCH)
