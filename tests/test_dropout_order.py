"""Dropout draws in the order of memory, as torch does, however a plan stores and divides the tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from bench.plans import Case, forced, single
from shardwright.lowering.module import lower
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import Captured, capture
from shardwright.pcg.graph import Graph

Batch = dict[str, Tensor]


class Drops(nn.Module):
    """Dropout of a transposed tensor, of a permuted slice, of an expanded tensor and of a contiguous one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        views = (
            y.transpose(0, 1),
            y.view(8, 6, 4, 6)[:, :5].permute(2, 0, 3, 1),
            y[:, :, None, :].expand(8, 6, 3, 24),
            y,
        )
        return torch.stack([F.dropout(view, 0.3).pow(2).mean() for view in views]).sum()


def step(model: nn.Module, batch: Batch) -> tuple[float, Tensor]:
    """The loss and what it leaves of the random state."""
    torch.manual_seed(1)
    return model(**batch).item(), torch.get_rng_state()


def both_steps(graph: Graph, model: nn.Module, batch: Batch, captured: Captured) -> tuple[float, Tensor, float]:
    """A lowered step by torch's generator, and the loss of one after `seed_exactly`."""
    lowered = lower(graph, model, constants=captured.constants, options=captured.options)
    loss, state = step(lowered, batch)
    with sw.seed_exactly(1):
        return loss, state, step(lowered, batch)[0]


@pytest.mark.parametrize("case", [single(), *forced(2)], ids=str)
def test_masks_are_the_single_processs(case: Case) -> None:
    torch.manual_seed(0)
    model, batch = Drops(), {"x": torch.randn(8, 6, 16)}
    captured = capture(model, batch)
    graph = case.plan(captured.graph, "Drops").graph
    loss, state = step(model, batch)
    with sw.seed_exactly(1):
        exact, _ = step(model, batch)
    for found, found_state, found_exact in run_ranks(both_steps, case.num_ranks, args=(graph, model, batch, captured)):
        assert found == pytest.approx(loss, rel=1e-6)
        assert torch.equal(found_state, state)
        assert found_exact == pytest.approx(exact, rel=1e-6) != loss
