"""Python state that forward changes: refused, but for caches that change nothing of what is computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from shardwright.pcg.capture import capture
from shardwright.pcg.errors import CaptureError
from tests.each import each

BATCH = {"x": torch.ones(2, 4)}


class Stateful(nn.Module):
    """Has state of every kind, and does with it what `change` does; what that returns scales the result."""

    calls = 0

    def __init__(self, change: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.inner, self.child, self.change = nn.Linear(4, 3), nn.Module(), change
        self.step, self.longest, self.ready, self.last = 0, 0, False, None
        vars(self.child)["step"], self.settings = 0, SimpleNamespace(step=0)
        self.start = torch.ones(())
        self.history, self.cache, self.seen = list[object](), dict[str, object](), set[int]()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        scale = self.change(self, y)
        return (y * (1.0 if scale is None else scale)).sum()


def counted(m: Any, y: Tensor) -> float:
    m.step += 1
    return float(m.step)


def counted_in_child(m: Any, y: Tensor) -> None:
    m.child.step += 1


def counted_in_class(m: Any, y: Tensor) -> None:
    type(m).calls += 1


def counted_in_object(m: Any, y: Tensor) -> None:
    m.settings.step += 1


def first_step(m: Any, y: Tensor) -> float:
    scale = 1.0 if m.ready else 2.0
    m.ready = True
    return scale


def read_later(m: Any, y: Tensor) -> Tensor:
    scale, m.last = m.start if m.last is None else m.last, y.detach().mean()
    return scale


def read_before(m: Any, y: Tensor) -> Tensor:
    scale, m.start = m.start, y.detach().mean()
    return scale


@each(
    "change, said",
    [
        (counted, r"^model \(test_state\.py:\d+\): forward changes 'step'.*keep what steps change in a buffer"),
        (counted_in_child, r"child \(test_state\.py:\d+\): forward changes 'step'"),
        (counted_in_class, "forward changes 'Stateful.calls'"),
        (counted_in_object, "forward changes 'settings.step'"),
        (first_step, "forward changes 'ready', and capture keeps only what forward computes: every step would be the"),
        (lambda m, y: m.history.append(1), r"forward changes 'history\[1\]'"),
        (lambda m, y: m.seen.add(len(m.seen)), r"forward changes 'seen\[1\]'"),
        (lambda m, y: m.history.append(y), r"forward changes 'history\[1\]'"),
        (read_later, "forward changes 'last'"),
        (read_before, "forward changes 'start'"),
    ],
)
def test_state_that_steps_change_is_refused(change: Callable[[Any, Tensor], object], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Stateful(change), BATCH)


def test_the_line_is_that_of_the_assignment() -> None:
    line = counted.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"^model \(test_state\.py:{line}\): "):
        capture(Stateful(counted), BATCH)


def longest(m: Any, y: Tensor) -> float:
    m.longest = max(m.longest, y.shape[0])
    return float(m.longest)


def cached(m: Any, y: Tensor) -> object:
    return m.cache.setdefault("scale", 3.0)


def averaged(m: Any, y: Tensor) -> None:
    m.mean = 0.9 * m.mean + 0.1 * y.detach().mean(0)


def passed_on(m: Any, y: Tensor) -> Tensor:
    m.last = y.detach().sum()
    scale, m.last = m.last, None
    return scale


def kept(m: Any, y: Tensor) -> None:
    m.last, m.history = y, [y]
    m.cache["last"] = y


def made_once(m: Any, y: Tensor) -> Tensor:
    if "positions" not in m.cache:
        m.cache["positions"] = torch.arange(3.0) * 2
    return m.cache["positions"]


@each(
    "change", [longest, cached, averaged, passed_on, kept, made_once, lambda m, y: m.settings.__dict__.update(step=0)]
)
def test_caches_and_buffers_are_captured_and_the_model_stays_as_it_was(change: Callable[[Any, Tensor], object]) -> None:
    model = Stateful(change)
    assert capture(model, BATCH).graph.outputs
    assert (model.longest, model.cache, model.last, model.history) == (0, {}, None, [])


def test_recurrent_layers_and_pruned_weights_are_no_state() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(4, 3), prune.l1_unstructured(nn.Linear(3, 2), "weight", amount=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0]).sum()

    assert capture(Recurrent(), {"x": torch.ones(2, 5, 4)}).graph.outputs
