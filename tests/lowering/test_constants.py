"""Numbers in a program are as precise as the model's: no narrower, and no wider where the model makes them narrow."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.lowering.runs import Case, assert_same_step, parallel_step, serial_step
from tests.lowering.test_training import TWO


class Constants(nn.Module):
    """A model in float64 with numbers of its own, and with constants that it makes in other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = 0.1 * self.linear(x)
        y = y * torch.full((), 0.1, dtype=torch.float32) + torch.full((), 0.3, dtype=torch.bfloat16)
        y = y / torch.sqrt(torch.full((), 7.0)) + torch.rsqrt(torch.full((), 5))
        y = torch.where(y > 0, y, torch.full((), 0.7)) - torch.scalar_tensor(0.2)
        y = torch.clamp(y * torch.tensor(0.1) + torch.ones(()) * 0.1, min=torch.full((), 0.01))
        y = torch.pow(y, torch.full((), 1.1)) + torch.addcmul(y, y, y, value=0.1) + torch.full_like(y, 0.1).float() * y
        return (y + y.new_full((), 0.1)).pow(2).mean()


def test_constants_are_rounded_as_the_model_has_them() -> None:
    torch.manual_seed(0)
    case = Case(Constants().double(), {"x": torch.randn(4, 8).double()})
    graph, expected = case.graph(TWO, {}, data_axes=(0,)), serial_step(case)
    for step in case.on_ranks(graph, lambda parallel: parallel_step(parallel, case.batch)):
        assert_same_step(step, expected, 1e-13)
