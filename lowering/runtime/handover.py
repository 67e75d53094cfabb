"""The loss of a step whose gradients have already been computed, such as one of several microbatches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.lowering import private
from shardwright.lowering.private import AutogradContext
from shardwright.lowering.runtime.reducer import Finished
from shardwright.pcg.errors import ShardwrightError


class _HandOver(Function):
    """The backward of a loss whose gradients have already been computed."""

    @staticmethod
    def forward(ctx: AutogradContext, anchor: Tensor, loss: Tensor, finished: Sequence[Finished]) -> Tensor:
        ctx.finished = list(finished)
        return loss.clone()

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.finished is None:
            raise ShardwrightError("the gradients of this loss have been handed over already; run the step again")
        finished, ctx.finished = ctx.finished, None
        if finished:
            private.scale_([part for _, part, _ in finished], gradient)
        for held, part, wrapped in finished:
            held.accept_gradient(part, wrapped)
        return None, None, None


def hand_over(loss: Tensor, finished: Sequence[Finished]) -> Tensor:
    """Return the loss with a `backward()` that scales these gradients and gives them to their parameters."""
    anchor = torch.empty(0, device=loss.device, requires_grad=True)
    return _HandOver.apply(anchor, loss, finished)
