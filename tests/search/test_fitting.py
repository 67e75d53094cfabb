"""Plans that keep what memory allows, of models whose blocks are not the plain kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.pcg.capture import capture
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.parameters import module_block
from shardwright.reports.facts import fits
from shardwright.search.check import check_plan
from shardwright.search.folding import fold
from tests.search.graphs import every_choice
from tests.search.test_tuning import limited, planner


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Around(nn.Module):
    """Part of a block is the model's own code: it lies between two modules of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList((Mlp(), Mlp())) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.layers:  # type: ignore[misc]
            x = second(torch.tanh(first(x) + x))
        return torch.tanh(x).square().mean()


class Backwards(nn.Module):
    """Blocks that run the last one first, with nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x.square().mean()


class Named(nn.Module):
    """Names in which a pattern would see more than they are."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({"1-2": nn.ModuleList(Mlp() for _ in range(5)), "a[b]": Mlp()})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.stages["1-2"]:  # type: ignore[union-attr]
            x = layer(x)
        return self.stages["a[b]"](x).square().mean()


@pytest.mark.parametrize("model", [Around, Backwards, Named])
def test_any_blocks_are_made_again_as_memory_asks_for(model: type[nn.Module]) -> None:
    graph = capture(model(), {"x": torch.randn(4, 64, 16)}).graph
    assert fold(graph).repeats
    search, way = planner(), {"mesh": Mesh.of(x=2), "roles": ("data",), "microbatches": 1}
    least, most = (
        search.plan(graph, **way, recompute=mode).prediction.memory.total_bytes  # type: ignore[arg-type]
        for mode in ("full", "none")
    )
    made = list[int]()
    for share in (0.9, 0.3):
        plan = limited(search, least + share * (most - least)).plan(graph, **way)  # type: ignore[arg-type]
        assert fits(plan)
        check_plan(plan, graph, every_choice)
        again = made_again(plan.graph, plan.execution).regions
        made.append(len({module_block(f"{plan.graph.by_name[name].source.module}.") for name in again} - {""}))
    assert 0 < made[0] <= made[1] == 5
