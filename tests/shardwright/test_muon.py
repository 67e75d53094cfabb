"""`sw.Muon`: whole matrices from parts in any layout, weights of one process in every bit, and what ranks send."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright as sw
from shardwright.cost.timeline.muon import orthogonalized
from shardwright.cost.timeline.steps import Steps
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.lowering.ranks.movement import Axis
from shardwright.muon import part_of, put
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import ShardwrightError
from tests.lowering.runs import whole


def test_parts_in_any_layout_make_the_whole() -> None:
    draw = random.Random(0)
    for _ in range(50):
        axes = [(draw.choice([1, 2, 3]), draw.randrange(2), draw.choice([1, 2])) for _ in range(draw.randrange(4))]
        shape = [draw.choice([36, 72]) * 4, draw.choice([36, 72]) * 4]
        matrix = torch.arange(shape[0] * shape[1]).view(shape)
        found = torch.full_like(matrix, -1)
        places: list[list[int]] = [[]]
        for size, _, _ in axes:
            places = [[*place, at] for place in places for at in range(size)]
        for place in places:
            steps = [(Axis("", size, at), dim, blocks) for (size, dim, blocks), at in zip(axes, place, strict=True)]
            put(found, part_of(matrix, steps), steps)
        assert torch.equal(found, matrix), axes


class Net(nn.Module):
    """With a matrix that is higher than wide, one that is wider than high, and a square one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(self.up(x).relu())).square().mean()


def updated(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The weights after two updates by gradients that do not depend on the layout."""
    for step in range(2):
        for number, (_, p) in enumerate(net.named_parameters()):
            torch.manual_seed(10 * step + number)
            p.grad = torch.randn_like(p)  # of a DTensor, each rank's part of the same numbers
        optimizer.step()
    return {name: whole(p).detach() for name, p in net.named_parameters()}


def matrices(net: nn.Module) -> list[Any]:
    """Two groups, of which one has other options."""
    first, *others = [p for p in net.parameters() if p.ndim == 2]
    return [{"params": [first], "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}, {"params": others}]


Moved = list[int]
"""The bytes that a rank sent to others or received from them in each exchange, whichever is more."""


@contextmanager
def noted() -> Generator[Moved]:
    moved, send = Moved(), dist.all_to_all_single

    def noting(room: Tensor, sent: Tensor, arriving: list[int], leaving: list[int], group: Any) -> Any:
        own = dist.get_rank(group)
        sizes = (sum(counts[:own] + counts[own + 1 :]) for counts in (arriving, leaving))
        moved.append(max(sizes) * sent.element_size())
        return send(room, sent, arriving, leaving, group=group)

    with mock.patch.object(dist, "all_to_all_single", noting):
        yield moved


def predicted(plan: sw.Plan) -> tuple[float, float]:
    """The bytes that the busiest rank is predicted to move in the two exchanges of an update."""
    steps = Steps(plan.graph, plan.cluster, plan.execution)
    return orthogonalized(steps, dict.fromkeys(steps.parameters, 1)).exchanged


def test_weights_are_those_of_one_process_in_every_bit_and_ranks_send_what_is_predicted() -> None:
    def net() -> Net:
        torch.manual_seed(0)
        return Net()

    batch = {"x": torch.ones(4, 16)}
    plans = [
        sw.plan(net(), sw.Cluster.local(2), kwargs=batch, mesh={"x": 2}, roles=roles, optimizer=sw.Muon)
        for roles in ("zero", "tensor", "data")
    ]

    def body() -> list[tuple[dict[str, Tensor], Moved]]:
        found = list[tuple[dict[str, Tensor], Moved]]()
        for plan in plans:
            model = net()
            parallel = sw.compile(model, kwargs=batch, plan=plan, timeout_s=60, check_capture="never")
            with noted() as moved:
                weights = updated(parallel, sw.Muon(matrices(parallel), parallel=parallel, lr=0.02))
            found.append((weights, moved))
            with pytest.raises(ShardwrightError, match=r"not one of parallel\.parameters"):
                sw.Muon(matrices(model), parallel=parallel)
        return found

    model = net()
    expected = updated(model, torch.optim.Muon(matrices(model), lr=0.02))
    ranks = run_ranks(body, 2, 60)
    for found in ranks:
        for weights, _ in found:
            torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    for number, plan in enumerate(plans):
        moved = map(max, *(found[number][1] for found in ranks))
        assert tuple(moved) == 2 * predicted(plan)  # of two steps


def test_one_rank_needs_nobody() -> None:
    def body() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Net()
        parallel = lower(capture(model, {"x": torch.ones(4, 16)}).graph, model)
        found = updated(parallel, sw.Muon(matrices(parallel), parallel=parallel, lr=0.02))
        torch.manual_seed(0)
        alone = Net()
        return found, updated(alone, torch.optim.Muon(matrices(alone), lr=0.02))

    ((found, expected),) = run_ranks(body, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
