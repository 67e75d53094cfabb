"""Owners of matrices, what is exchanged with them, and which matrices Muon is for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.step.muon import Exchanged, hidden_matrices, owners_of, products


def test_owners_have_about_equal_work() -> None:
    shapes = [(64, 64)] * 4 + [(64, 256), (256, 64)] * 4
    owners = owners_of(shapes, 4)
    assert [owners.count(rank) for rank in range(4)] == [3, 3, 3, 3]
    assert sorted(owners[4:]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert owners_of(shapes[:1], 4) == (0,)


def test_products_of_an_iteration_are_those_of_the_shorter_side() -> None:
    assert products((8, 3)) == products((3, 8)) == ((3, 3, 8), (3, 3, 3), (3, 8, 3))


def test_the_busiest_rank_counts() -> None:
    sharded, whole = (40, 10), (40, 40)
    assert Exchanged.among([(*sharded, 0)], 4) == (30, 30)
    assert Exchanged.among([(*whole, 0)], 4) == (0, 120)  # everybody has it, and nobody the update
    assert Exchanged.among([(*sharded, 0), (*sharded, 1)], 4) == (30, 30)
    assert Exchanged.among([(*sharded, 0), (*sharded, 0), (*sharded, 1)], 4) == (60, 60)
    assert Exchanged.among([(*whole, rank) for rank in range(4)], 4) == (0, 120)
    assert Exchanged.among([(*whole, 0)], 1) == (0, 0)


class Words(nn.Module):
    """A table, two matrices, a vector, a frozen matrix, and a head before a cross entropy."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.up, self.down, self.frozen = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(requires_grad=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        h = h + self.frozen(self.down(self.up(h).relu()))
        return F.cross_entropy(self.head(self.norm(h)).float().view(-1, 16), y.view(-1))


def test_tables_and_heads_are_not_for_muon() -> None:
    ids = torch.arange(8).view(2, 4)
    for tied in (False, True):
        graph = capture(Words(tied=tied), {"x": ids, "y": ids}).graph
        found = {str(graph.by_name[name].attr("target")) for name in hidden_matrices(graph)}
        assert found == {"up.weight", "down.weight"}
