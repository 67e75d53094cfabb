"""A model for the benchmarks' tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.zoo import ZOO


def toy_example() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return ZOO["mlp"]()
