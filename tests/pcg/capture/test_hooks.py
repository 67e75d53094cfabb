"""Hooks of a model that is captured: in the graph, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from examples.zoo import ZOO
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError
from tests.pcg.capture.test_capture import numpy_loss

BATCH = {"x": torch.randn(4, 3)}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().sum()


def note(*args: Any) -> None:
    """What hooks do that nothing is left of."""


def test_hooks_that_training_would_not_call_are_refused() -> None:
    """And they are as they were afterwards."""
    parameter: dict[str, Callable[[nn.Parameter], Any]] = {
        "inner.weight has the hook `note`.*call register_hook on the compiled model's": lambda p: p.register_hook(note),
        "inner.weight has the hook `note`.*call register_post_accumulate_grad_hook on": (
            lambda p: p.register_post_accumulate_grad_hook(note)
        ),
    }
    module: dict[str, Callable[[nn.Module], Any]] = {
        "the forward pre-hook `note` of 'inner' returns nothing": lambda m: m.register_forward_pre_hook(note),
        "the forward hook `note` of 'inner' returns nothing": lambda m: m.register_forward_hook(note),
        "the forward hook `partial` of 'inner' returns nothing": lambda m: m.register_forward_hook(partial(note, 1)),
        "the backward hook `note` of 'inner' would not be called": lambda m: m.register_full_backward_hook(note),
        "the full backward pre-hook `note` of 'inner' would": lambda m: m.register_full_backward_pre_hook(note),
    }
    for message, register in (parameter | module).items():
        model = Small()
        register(model.inner.weight if message in parameter else model.inner)  # type: ignore[arg-type]
        before = [dict(model.inner._forward_hooks), dict(model.inner._forward_pre_hooks)]
        with pytest.raises(CaptureError, match=message):
            capture(model, BATCH)
        assert [model.inner._forward_hooks, model.inner._forward_pre_hooks] == before


def test_hooks_on_all_modules_are_like_those_on_one() -> None:
    of_all = nn.modules.module
    for message, register in (
        ("the forward pre-hook `note` of all modules returns nothing", of_all.register_module_forward_pre_hook),
        ("the forward hook `note` of all modules returns nothing", of_all.register_module_forward_hook),
        ("the full backward pre-hook `note` of all modules would", of_all.register_module_full_backward_pre_hook),
        ("the backward hook `note` of all modules would not be", of_all.register_module_full_backward_hook),
    ):
        handle = register(note)
        with pytest.raises(CaptureError, match=message):
            capture(Small(), BATCH)
        handle.remove()

    def doubled(module: nn.Module, args: Any, result: Tensor) -> Tensor | None:
        return result * 2 if isinstance(module, nn.Linear) else None

    handle = of_all.register_module_forward_hook(doubled)  # pyright: ignore[reportArgumentType]
    try:
        assert numpy_loss(Small(), BATCH) == pytest.approx(Small()(**BATCH).item(), rel=1e-5)
    finally:
        handle.remove()


def test_what_hooks_give_is_captured() -> None:
    def doubled(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return result * 2

    def shifted(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] + 1,), kwargs

    for change in (
        lambda m: m.register_forward_hook(doubled),
        lambda m: m.register_forward_pre_hook(shifted, with_kwargs=True),
        lambda m: prune.random_unstructured(m, "weight", 0.5),
    ):
        model = Small()
        change(model.inner)
        assert numpy_loss(model, BATCH) == pytest.approx(model(**BATCH).item(), rel=1e-5)


def test_hooks_of_libraries_are_their_own() -> None:
    """Transformers collects hidden states and router logits by hooks that return nothing and stay on the model."""
    model, batch = ZOO["llama"]()
    model(**batch, output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert capture(model, {**batch, "output_hidden_states": True}).graph.nodes
