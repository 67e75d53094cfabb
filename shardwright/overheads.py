"""A step that does next to nothing, as the lowering runs it: what a step and a parameter take whatever their size.

`cost.calibration.calibrate` names this module and its ranks import it, since costs know nothing of the lowering.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwright.api import certified_choices
from shardwright.cost.calibration.local import default_cluster
from shardwright.lowering import kernels
from shardwright.lowering.module import lower
from shardwright.pcg.capture import capture
from shardwright.search.planner import Planner

runtime = kernels
"""What lowered programs call `rt`."""


class _Chain(nn.Module):
    """A product with `num_parameters` parameters of three elements: no number of ranks but three can split them."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(3) for _ in range(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = x * factor
        return x.sum()


def chain_step(num_parameters: int, num_ranks: int) -> Callable[[], None]:
    """A training step of the chain, the same on every rank: a multiplication and an update for each parameter."""
    model, batch = _Chain(num_parameters), {"x": torch.ones(3)}
    captured = capture(model, batch)
    plan = Planner(default_cluster(num_ranks), certified_choices()).plan(captured.graph, "chain")
    module = lower(plan.graph, model, constants=captured.constants, options=captured.options)
    optimizer = torch.optim.AdamW(list(module.parameters()), lr=1e-4, fused=True)

    def step() -> None:
        module.forward_backward(**batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
