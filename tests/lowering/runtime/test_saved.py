"""What autograd keeps of a step, on one rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright.lowering.private import storage_key, weakly
from shardwright.lowering.runtime.blocks import Blocks
from shardwright.lowering.runtime.saved import Saved
from shardwright.lowering.runtime.schedule import BlockSchedule


def ignore(shard: Tensor, gradient: Tensor) -> None:
    """There are no shards."""


def saved() -> Saved:
    return Saved(Blocks(ignore, BlockSchedule()), (), torch.device("cpu"))


def test_a_region_is_let_go_of_with_the_last_that_backward_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever still holds what it gave, or the hooks: a thread of gloo, for longer on one rank than on another.

    Where ranks freed a block at different times, one gathered it again and another did not, and all waited for ever
    (llama, four ranks, pair 10020 of `bench.random_plans`).
    """
    held = list[object]()

    def hooks(*both: Callable[..., Any]) -> saved_tensors_hooks:
        held.extend(both)
        return saved_tensors_hooks(*both)

    monkeypatch.setattr("shardwright.lowering.runtime.saved.saved_tensors_hooks", hooks)
    x = torch.ones(4, requires_grad=True)
    kept, made = x * 2, saved()
    operand = weakref.ref(kept)
    with made.hooks():
        result = made.remade(torch.exp, kept)
        loss = (result * result).sum()
    del kept
    assert operand() is not None
    loss.backward()
    assert operand() is None
    assert len(held) == 6  # of the program, of the region, and of the region when it has run again
    torch.testing.assert_close(x.grad, 4 * result.detach() ** 2)


def test_a_region_that_backward_does_not_need_is_let_go_of_behind_forward() -> None:
    kept, made = torch.ones(4, requires_grad=True) * 2, saved()
    operand = weakref.ref(kept)
    with made.hooks():
        result = made.remade(torch.neg, kept)
        result.sum()
    del kept
    assert operand() is None


def passed_on(x: Tensor) -> Tensor:
    """In the same memory, as `replicate` gives it."""
    return _Passed.apply(x)


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


def test_a_result_is_made_again_whoever_passes_it_on() -> None:
    """Such as keys and values that are gathered again: they were kept whole, as only another tensor had them."""
    x, made = torch.ones(4, requires_grad=True), saved()
    with made.hooks():
        result = made.remade(torch.exp, x)
        again = passed_on(result)
        memory = weakly(result)
        del result
        loss = (made.remade(torch.sin, again) * again).sum()
        del again
    assert memory.expired()
    loss.backward()
    exp = x.detach().exp()
    torch.testing.assert_close(x.grad, (exp.cos() * exp + exp.sin()) * exp)


def test_what_lies_where_a_result_has_lain_is_kept_as_it_is() -> None:
    """While a region may be asked for its result, no other tensor has its key."""
    x, made = torch.ones(4, requires_grad=True), saved()
    with made.hooks():
        for _ in range(100):
            made.remade(torch.exp, x)
            later = torch.ones(4)
            assert storage_key(later) not in made.given
            assert made.pack(later) is later
        assert len(made.given) == 100
    assert not made.given
