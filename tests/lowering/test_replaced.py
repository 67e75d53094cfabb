"""Other tensors in the place of a compiled model's parameters are refused, as its program does not see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, vector_to_parameters

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import ShardwrightError
from tests.lowering.runs import Case
from tests.lowering.test_training import TWO, ZERO3, Net

Batch = dict[str, Tensor]


def zeros(parallel: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in parallel.named_parameters()}


def parametrized(parallel: ParallelModule) -> None:
    parametrize.register_parametrization(parallel.up, "weight", nn.Identity())


def assigned(parallel: ParallelModule, batch: Batch) -> None:
    next(parallel.parameters()).data = torch.zeros_like(next(parallel.parameters()))


def from_a_vector(parallel: ParallelModule, batch: Batch) -> None:
    vector_to_parameters(torch.zeros(sum(p.numel() for p in parallel.parameters())).double(), parallel.parameters())


def swapped(parallel: ParallelModule, batch: Batch) -> None:
    first = next(parallel.parameters())
    torch.utils.swap_tensors(first, nn.Parameter(torch.zeros_like(first)))


AT_ONCE: list[Callable[[Any, Batch], object]] = [
    lambda p, batch: functional_call(p, zeros(p), (), batch),
    lambda p, batch: functional_call(p, {name: torch.zeros(t.shape) for name, t in zeros(p).items()}, (), batch),
    lambda p, batch: functional_call(p.up, {"weight": zeros(p)["up.weight"]}, ()),
    lambda p, batch: torch.func.grad(lambda w: functional_call(p, w, (), batch))(dict(p.named_parameters())),
    lambda p, batch: p.up._parameters.update(weight=None),
]
AT_THE_NEXT_STEP = [assigned, from_a_vector, swapped]


def test_other_tensors_in_the_place_of_parameters_are_refused() -> None:
    torch.manual_seed(0)
    net = Case(Net().double(), {"ids": torch.randint(20, (8, 12)), "labels": torch.randint(20, (8, 12))})
    graph = net.graph(TWO, ZERO3, data_axes=(0,))

    def body() -> None:
        parallel = net.lower(graph)
        for replace in AT_ONCE:
            with pytest.raises(ShardwrightError, match=r"another tensor in its place .* copy values into it"):
                replace(parallel, net.batch)
        with pytest.raises(ShardwrightError, match="before compiling it"):
            parametrized(parallel)
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.data.copy_(parameter.data * 0.5)
        functional_call(parallel, {}, (), net.batch)
        parallel.forward_backward(**net.batch)
        for put in AT_THE_NEXT_STEP:
            parallel = net.lower(graph)
            put(parallel, net.batch)
            with pytest.raises(ShardwrightError, match=r"another tensor was put in its place .*p.data.copy_"):
                parallel(**net.batch)

    run_ranks(body, 2, 60)
