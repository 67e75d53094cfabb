"""Buffers that a forward assigns: outputs of the graph where they stay what they were, else an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.checking import check_capture
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError
from tests.each import each

BATCH = {"x": torch.ones(2, 4)}


class Moving(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.inner, self.child, self.change = nn.Linear(4, 3), nn.Module(), change
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("one", torch.zeros(3))
        self.child.register_buffer("one", self.get_buffer("one"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.change(self, y)
        return y.sum()


def doubled(m: Any, y: Tensor) -> None:
    m.mean = y.detach().mean(0).double()


def test_the_line_of_an_assignment_is_said() -> None:
    line = doubled.__code__.co_firstlineno + 1
    said = (
        rf"^model \(test_writing\.py:{line}\): forward assigns to 'mean' float64\[3\] on cpu, expected "
        r"float32\[3\] on cpu as it was before; .*make it in the shape and dtype"
    )
    with pytest.raises(CaptureError, match=said):
        capture(Moving(doubled), BATCH)


@each(
    "change, said",
    [
        (lambda m, y: setattr(m, "mean", y), r"assigns to 'mean' float32\[2, 3\] on cpu, expected float32\[3\]"),
        (lambda m, y: setattr(m, "one", y[0]), "assigns the buffer 'one' or 'child.one', which were one tensor"),
        (
            lambda m, y: setattr(m.inner, "bias", nn.Parameter(y[0])),
            "forward replaces 'inner.bias', and what is trained",
        ),
        (lambda m, y: setattr(m.mean, "data", y), r"sets the data of float32\[3\] on cpu to float32\[2, 3\] on cpu"),
        (lambda m, y: setattr(m.inner.bias, "data", y[0]), "mutates its parameter 'inner.bias'"),
    ],
)
def test_what_would_not_stay_the_same_buffer_is_refused(change: Callable[[Any, Tensor], object], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Moving(change), BATCH)


def both(m: Any, y: Tensor) -> None:
    m.one = m.child.one = m.one + 1


@each("change", [both, lambda m, y: m.one.add_(1), lambda m, y: m.child.one.add_(1)])
def test_a_buffer_of_two_names_is_one(change: Callable[[Any, Tensor], object]) -> None:
    assert [name for name, _ in capture(Moving(change), BATCH).graph.outputs if name != "loss"] == ["one"]


def test_data_that_is_read_is_a_value_without_gradient() -> None:
    model = Moving(lambda m, y: setattr(m, "mean", y.data.mean(0)))
    assert "mean" in dict(capture(model, BATCH).graph.outputs)


class Repeating(nn.Module):
    """A layer with buffers runs again under other names, between others."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.layers = nn.ModuleList([shared, nn.Linear(4, 4), shared, nn.Tanh(), shared])
        self.again = nn.ModuleDict({"first": shared, "norm": shared[1]})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.again["norm"](self.again["first"](x)).pow(3).sum()


def test_buffers_of_a_module_of_several_names_are_written() -> None:
    model = Repeating()
    names = list(model.state_dict())
    captured = capture(model, BATCH)
    buffers = [f"layers.0.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert sorted(name for name, _ in captured.graph.outputs if name != "loss") == sorted(buffers)
    assert list(model.state_dict()) == names
    assert check_capture(model, captured, (), BATCH).equal
