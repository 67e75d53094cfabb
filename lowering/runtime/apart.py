"""A backward in two parts: gradients of activations first, gradients of weights on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright.lowering.private import AutogradContext

# pyright: reportIncompatibleMethodOverride=false


class Apart(NamedTuple):
    """A deferred computation of weight gradients: autograd's node of a result, its gradient, and the weights."""

    result: GradientEdge
    gradient: Tensor
    weights: tuple[Tensor, ...]


def give_to_weights(put_off: list[Apart]) -> None:
    """Compute the deferred gradients of weights and accumulate them, operator by operator."""
    while put_off:
        result, gradient, weights = put_off.pop(0)
        trained = [weight for weight in weights if weight.requires_grad]
        if all(weight.is_leaf for weight in trained):
            torch.autograd.backward((result,), (gradient,), inputs=trained)
        else:
            torch.autograd.backward(trained, torch.autograd.grad((result,), trained, (gradient,)))


class PutOff(Function):
    """A function whose backward computes only the gradients of its operands, and defers those of its weights."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        put_off: list[Apart],
        function: Callable[..., Tensor],
        weights: tuple[Tensor, ...],
        *operands: Tensor,
    ) -> Tensor:
        ctx.put_off, ctx.weights = put_off, weights
        with torch.enable_grad():
            ctx.operands = [x.detach().requires_grad_(x.requires_grad) for x in operands]
            result = function(*ctx.operands, *weights)
        ctx.result = get_gradient_edge(result)
        return result.detach()

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        result, trained = ctx.result, [x for x in ctx.operands if x.requires_grad]
        gradients = iter(torch.autograd.grad((result,), trained, (gradient,), retain_graph=True))
        ctx.put_off.append(Apart(result, gradient, ctx.weights))
        ctx.result = None
        return None, None, None, *(next(gradients) if x.requires_grad else None for x in ctx.operands)
