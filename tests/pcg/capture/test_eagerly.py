"""Branches on whether a model is compiled: capture takes those of eager mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting  # as most packages bind them
from torch.fx._symbolic_trace import is_fx_tracing

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError
from tests.each import each

BATCH = {"x": torch.arange(8.0).reshape(2, 4) + 1}


def named(module: str, name: str = "is_compiling") -> Callable[[], bool]:
    """One of the names that torch has for it."""
    return getattr(import_module(module), name)


def _deprecated() -> bool:
    with warnings.catch_warnings(action="ignore"):
        return named("torch._utils")()


ASK: dict[str, Callable[[], bool]] = {
    "is_compiling": is_compiling,
    "is_exporting": is_exporting,
    "is_dynamo_compiling": is_dynamo_compiling,
    "torch._dynamo.is_compiling": named("torch._dynamo"),
    "torch._dynamo.external_utils.is_compiling": named("torch._dynamo.external_utils"),
    "torch._utils.is_compiling": _deprecated,
    "torch.jit.is_tracing": named("torch.jit", "is_tracing"),
    "torch.jit.is_scripting": named("torch.jit", "is_scripting"),
    "torch.onnx.is_in_onnx_export": torch.onnx.is_in_onnx_export,
    "torch.fx is_fx_tracing": is_fx_tracing,
}


class Branching(nn.Module):
    """Two layers, and what `forward` makes of them."""

    def __init__(self, forward: Callable[[Tensor], Tensor], depth: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(forward) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Layer(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.beside = nn.Linear(4, 4), [forward]

    def forward(self, x: Tensor) -> Tensor:
        return self.beside[0](self.inner(x))


def ops(model: nn.Module) -> list[str]:
    return [node.op for node in capture(model, BATCH).graph.nodes if not node.is_leaf]


@each("ask", ASK.values(), ids=ASK)
def test_the_branch_of_eager_mode_is_captured(ask: Callable[[], bool]) -> None:
    found = ops(Branching(lambda x: torch.relu(x) if ask() else torch.tanh(x)))
    assert "tanh" in found
    assert "relu" not in found
    assert not ask()


def test_layers_of_a_deep_model_take_it_too() -> None:
    found = ops(Branching(lambda x: torch.relu(x) if is_compiling() else torch.tanh(x), depth=12))
    assert (found.count("tanh"), found.count("relu")) == (12, 0)


def _checked(x: Tensor) -> Tensor:
    if not is_compiling() and x.abs().sum() < 0:
        raise ValueError("less than nothing")
    return torch.tanh(x)


def test_where_it_looks_at_values_the_other_one_is_captured() -> None:
    """And torch answers as before once it is over."""
    assert "tanh" in ops(Branching(_checked))
    assert is_compiling.__code__.co_name == is_compiling.__name__
    assert is_compiling.__kwdefaults__ is None


class Own(Function):
    """A backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


def test_what_is_refused_in_eager_mode_is_refused() -> None:
    with pytest.raises(CaptureError, match="Own is an autograd"):
        capture(Branching(lambda x: x if is_compiling() else Own.apply(x)), BATCH)


def test_the_first_error_is_said_where_both_fail() -> None:
    def failing(x: Tensor) -> Tensor:
        raise ValueError("compiled" if is_compiling() else "eager")

    with pytest.raises(CaptureError, match="ValueError: eager"):
        capture(Branching(failing), BATCH)


def test_torch_itself_learns_the_truth() -> None:
    """`torch.cond` decides by it how it is traced."""
    model = Branching(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)))
    with pytest.raises(CaptureError, match=r"use torch\.where for torch\.cond"):
        capture(model, BATCH)
