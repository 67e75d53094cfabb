"""ZeRO-3 at run time: how much gathered memory there is, when it is reused, and that none of it goes stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.lowering.module import ParallelModule
from shardwright.lowering.runtime import buffers
from shardwright.pcg.layout import S
from shardwright.pcg.step.parameters import module_block
from tests.lowering.runs import Case, entry_of
from tests.lowering.test_training import TWO

NUM_LAYERS, WIDTH = 6, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def deep() -> Case:
    torch.manual_seed(0)
    return Case(Deep().double(), {"x": torch.randn(8, WIDTH).double()})


def on_shards(case: Case, body: Callable[[ParallelModule], Any]) -> list[Any]:
    storage = {name: (S(0),) for name, _ in case.model.named_parameters()} | {"x": (S(0),)}
    return case.on_ranks(case.graph(TWO, storage, data_axes=(0,)), body)


@pytest.mark.parametrize("large_bytes", [0, 1 << 18], ids=["direct", "packed"])
def test_a_deep_model_needs_the_memory_of_a_few_blocks(
    deep: Case, large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "PLACED_BYTES", large_bytes)

    def body(parallel: ParallelModule) -> tuple[int, int]:
        for _ in range(3):
            parallel.forward_backward(**deep.batch)
        blocks = entry_of(parallel).runner.blocks
        assert not any(block.memory for block in blocks.items)
        assert not blocks.owners
        (free,) = blocks.pool.free.values()
        return len(blocks.items), len(free)

    for num_blocks, num_sets in on_shards(deep, body):
        assert num_blocks == NUM_LAYERS
        assert num_sets <= 4


def test_autograd_keeps_no_gathered_parameter(deep: Case) -> None:
    def body(parallel: ParallelModule) -> list[bool]:
        loss = parallel(**deep.batch)
        held = [block.memory is not None for block in entry_of(parallel).runner.blocks.items]
        loss.backward()
        return held

    assert on_shards(deep, body) == [[False] * (NUM_LAYERS - 1) + [True]] * 2


def test_every_forward_sees_the_latest_parameters(deep: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
        reference = Case(Deep().double(), deep.batch).model
        reference.load_state_dict(deep.model.state_dict())
        other = torch.optim.SGD(reference.parameters(), 0.1)
        for _ in range(4):
            loss = reference(**deep.batch)
            torch.testing.assert_close(parallel(**deep.batch).detach(), loss.detach())
            torch.testing.assert_close(parallel.forward_backward(**deep.batch), loss.detach())
            loss.backward()
            for o in (optimizer, other):
                o.step()
                o.zero_grad()

    on_shards(deep, body)


def test_a_backward_through_part_of_the_loss_again(deep: Case) -> None:
    def body(parallel: ParallelModule) -> None:
        loss = parallel(**deep.batch)
        loss.backward(retain_graph=True)
        once = [p.grad.to_local().clone() for p in parallel.parameters()]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        loss.backward()
        for p, gradient in zip(parallel.parameters(), once, strict=True):
            torch.testing.assert_close(p.grad.to_local(), 2 * gradient)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

    on_shards(deep, body)


def test_parameters_belong_to_the_outermost_repeated_module() -> None:
    found = [
        module_block(name) for name in ("h.3.attn.0.weight", "layers.11.bias", "wte.weight", "a.b.weight", "0.weight")
    ]
    assert found == ["h.3", "layers.11", "", "", "0"]
