"""Python state that forward changes: refused, but for caches that change nothing of what is computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
        self.child.step, self.settings = 0, SimpleNamespace(step=0)
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


def kept(m: Any, y: Tensor) -> None:
    m.last = y.detach()


def kept_in_cache(m: Any, y: Tensor) -> None:
    m.cache["last"] = y


@each(
    "change, said",
    [
        (counted, r"Stateful \(test_state\.py:\d+\): forward changes 'step'.*keep what steps change in a buffer"),
        (counted_in_child, r"child \(test_state\.py:\d+\): forward changes 'step'"),
        (counted_in_class, "forward changes 'Stateful.calls'"),
        (counted_in_object, "forward changes 'settings.step'"),
        (first_step, "forward changes 'ready', and capture keeps only what forward computes: every step would be the"),
        (lambda m, y: m.history.append(1), r"forward changes 'history\[1\]'"),
        (lambda m, y: m.seen.add(len(m.seen)), r"forward changes 'seen\[1\]'"),
        (kept, r"forward changes 'last'.*; return the tensor, or keep it in a buffer"),
        (kept_in_cache, r"forward changes \"cache\['last'\]\".*; return the tensor"),
    ],
)
def test_state_that_steps_change_is_refused(change: Callable[[Any, Tensor], object], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Stateful(change), BATCH)


def test_the_line_is_that_of_the_assignment() -> None:
    line = counted.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"^Stateful \(test_state\.py:{line}\): "):
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


@each("change", [longest, cached, averaged, passed_on, lambda m, y: m.settings.__dict__.update(step=0)])
def test_caches_and_buffers_are_captured_and_the_model_stays_as_it_was(change: Callable[[Any, Tensor], object]) -> None:
    model = Stateful(change)
    assert capture(model, BATCH).graph.outputs
    assert (model.longest, model.cache, model.last) == (0, {}, None)
