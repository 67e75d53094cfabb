"""A model is after a capture as it was before, whatever its forward changes, and whether or not it fails."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.capture.places import Snapshot, put_back
from shardwright.pcg.errors import CaptureError
from tests.each import each

BATCH = {"x": torch.ones(2, 4)}


class Holding(nn.Module):
    """Has state of every kind, and does with it what `change` does."""

    total = 0
    log: list[int] = []  # noqa: RUF012 - of all instances

    def __init__(self, change: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.inner, self.norm, self.change = nn.Linear(4, 3), nn.BatchNorm1d(3), change
        self.history, self.recent, self.cache, self.seen = [0], deque([0], 2), {"a": [0]}, {0}
        self.norm.history = self.history  # pyright: ignore[reportArgumentType] - shared
        self.settings, self.plain = SimpleNamespace(step=0, rates=[0.1]), torch.zeros(3)
        self.draws, self.numbers = random.Random(0), np.random.default_rng(0)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.inner(x))
        self.change(self, y)
        return y.sum()


def stopped(m: Any, y: Tensor) -> None:
    m.late, m.mean, m.plain = y, y, y
    m.history.append(y)
    raise ValueError("stopped")


def several(m: Any, y: Tensor) -> None:
    m.late, m.step, m.mean = y.mean(0), 1, y.mean(0)
    m.history.append(1)
    m.recent.append(1)
    m.cache["a"].append(2)
    m.cache["b"] = y
    m.seen.add(3)
    m.settings.step += 1
    m.settings.rates.append(0.2)
    type(m).total += 1
    type(m).log.append(1)
    m.norm.eval()
    m.inner.weight.requires_grad_(False)


def all_states(m: Any) -> list[bytes]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
    return [pickle.dumps(state) for state in (*states, m.draws.getstate(), m.numbers.bit_generator.state)]


@each(
    "change",
    [
        several,
        stopped,
        lambda m, y: m.plain.add_(1),
        lambda m, y: setattr(m, "late", y),
        lambda m, y: m.register_buffer("new", y),
        lambda m, y: m._buffers.pop("mean"),
        lambda m, y: m.draws.random(),
        lambda m, y: m.numbers.random(),
        lambda m, y: random.random(),
        lambda m, y: np.random.rand(),
        lambda m, y: torch.manual_seed(3),
        lambda m, y: m.register_forward_hook(lambda *_: None),
        lambda m, y: setattr(m, "inner", nn.Linear(4, 3)),
        lambda m, y: m.inner.register_parameter("more", nn.Parameter(torch.ones(1))),
        lambda m, y: delattr(m, "plain"),
    ],
)
def test_a_model_is_put_back(change: Callable[[Any, Tensor], object]) -> None:
    model = Holding(change)
    before = Snapshot(model)
    state, generators = copy.deepcopy(model.state_dict()), all_states(model)
    with contextlib.suppress(CaptureError):
        capture(model, BATCH)
    after = Snapshot(model)
    assert list(after.places) == list(before.places)
    assert not [path for path, place in before.places.items() if after.places[path].value is not place.value]
    assert not [name for name, value in model.state_dict().items() if not value.equal(state[name])]
    assert all_states(model) == generators
    assert model.norm.history is model.history
    assert model.plain.equal(torch.zeros(3))
    assert model.inner.weight.requires_grad


def test_large_containers_and_weak_references_are_not_looked_into() -> None:
    model = Holding(lambda m, y: None)
    vars(model).update(table=dict.fromkeys(range(20_000)), parent=weakref.ref(model))
    assert not [path for path in Snapshot(model).places if path.startswith(("table[", "parent"))]


def test_what_fails_is_put_back_too() -> None:
    model = Holding(lambda m, y: None)
    with pytest.raises(KeyError), put_back(model):
        model.cache["c"] = model.history.append(1) or model.cache["none"]
    assert model.history == [0]
