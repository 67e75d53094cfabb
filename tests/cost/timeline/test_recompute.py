"""What backward runs again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.program import program
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.step.execution import Execution


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Two products and a residual."""
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        """A loss of both blocks."""
        for block in self.blocks:
            x = block(x)
        return (x * x).sum()


def test_recomputation_stops_at_the_last_thing_that_backward_needs() -> None:
    """As torch's checkpoint does: nothing keeps what the last product gives, so only the first one runs again."""
    graph = capture(Model(), {"x": torch.randn(8, 16)}).graph
    found = program(graph, Cluster.preset("dgx-h100", 1, 1), Execution(recompute="full"))
    again = [t.name for t in found.stages[0].pieces[0].backward.tasks if t.name.endswith(" again")]
    ops = [graph.by_name[name.removesuffix(" again")].op for name in again]
    assert ops == ["linear", "gelu"] * 2


def test_torch_stops_there() -> None:
    calls: list[str] = []
    block = Block()
    for name, layer in block.named_children():
        layer.register_forward_hook(lambda *_, name=name: calls.append(name))
    checkpoint(block, torch.randn(8, 16, requires_grad=True), use_reentrant=False).sum().backward()
    assert calls == ["up", "down", "up"]
