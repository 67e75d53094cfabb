"""Calls of the lowering that calibration times: a step that does next to nothing, and collectives as in programs.

`cost.calibration.calibrate` names this module and its ranks import it, since costs know nothing of the lowering.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from shardwright.cost.clusters.local import default_cluster
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.movement import Axis
from shardwright.lowering.runtime import collectives, kernels
from shardwright.lowering.runtime.apart import Apart, PutOff, give_to_weights
from shardwright.pcg.capture.capture import capture
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner

runtime = kernels
"""The module that lowered programs call `rt`."""


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
    """Return a training step of the chain, the same on every rank: a product and an update for each parameter."""
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


def products(number: int, *, in_two: bool) -> Callable[[], None]:
    """Return forward and backward of `number` small products with weights, one after the other.

    `in_two`: with gradients of weights in a second part, as in a pipeline stage that others wait for.
    """
    weights, put_off = [torch.full((4, 4), 0.25, requires_grad=True) for _ in range(number)], list[Apart]()

    def step() -> None:
        x = torch.ones(4, 4, requires_grad=True)
        for weight in weights:
            x = PutOff.apply(put_off, linear, (weight,), x) if in_two else linear(x, weight)
        x.backward(torch.ones_like(x))
        give_to_weights(put_off)

    return step


def collective(name: str, group: dist.ProcessGroup, num_bytes: int, device: str) -> Callable[[], object]:
    """Return a call of a parallel operator whose forward is the collective `name`, on a tensor of `num_bytes` or more.

    It runs in fp32 with a gradient to come, and with all copies of the operator. Shards are of dimension 0, where no
    whole tensor needs to be copied. A broadcast, which is no parallel operator, is bare.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    axis, first = Axis("group", size, rank, group), dist.get_process_group_ranks(group)[0]
    whole = torch.zeros(size**2, size * ceil(num_bytes / 4 / size**3), device=device)
    mine = whole.new_zeros(size, whole.shape[1], requires_grad=True)
    trained = whole.detach().requires_grad_()
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: collectives.reduce(trained, axis, inplace=True),
        "all_gather": lambda: collectives.combine(mine, axis, 0),
        "reduce_scatter": lambda: collectives.reduce_scatter(trained, axis, 0),
        "all_to_all": lambda: collectives.all_to_all(mine, axis, (0, 1), (1, 1)),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
    }
    return calls[name]
