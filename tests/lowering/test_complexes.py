"""Models with complex numbers inside on two gloo ranks: rotary embeddings, neural operators, spectrograms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import Mesh
from shardwright.planning import certified_choices
from shardwright.search.tree.planner import Planner
from tests.lowering.runs import Case, assert_all_train_as_serial

BATCH, LENGTH, HEADS, SIZE = 4, 6, 2, 8


class Rotary(nn.Module):
    """Attention whose queries and keys are turned, as Llama's first code and Llama 4 turn them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, 4)
        angles = torch.outer(torch.arange(LENGTH), 100.0 ** (-torch.arange(0, SIZE, 2) / SIZE)).double()
        self.turns = torch.polar(torch.ones_like(angles), angles)  # neither a parameter nor a buffer

    def turned(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * self.turns[:, None]).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (self.turned(q), self.turned(k), v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


class Operator(nn.Module):
    """A layer of a Fourier neural operator; its weights are held as real pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.skip, self.out = nn.Conv2d(1, SIZE, 1), nn.Conv2d(SIZE, SIZE, 1), nn.Conv2d(SIZE, 1, 1)
        self.weights = nn.Parameter(torch.randn(SIZE, SIZE, 3, 3, 2) / SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x[:, None])
        z = torch.fft.rfft2(x)
        y = torch.zeros_like(z)
        y[..., :3, :3] = torch.einsum("bihw,iohw->bohw", z[..., :3, :3], torch.view_as_complex(self.weights))
        return self.out(F.gelu(torch.fft.irfft2(y, s=x.shape[-2:]) + self.skip(x))).square().mean()


class Spectrogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv1d(1, 4, 3, padding="same"), nn.Linear(5, 4)
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor) -> Tensor:
        waves = self.before(x.flatten(1)[:, None]).flatten(0, 1)
        power = torch.stft(waves, 8, 4, window=self.get_buffer("window"), return_complex=True).abs().square()
        return self.after(power.transpose(1, 2).add(1e-6).log()).square().mean()


MODELS = {"rotary": (Rotary, (BATCH, LENGTH, HEADS * SIZE)), "operator": (Operator, (BATCH, 6, 8)),
          "spectrogram": (Spectrogram, (BATCH, 4, 8))}  # fmt: skip


def share_split(graph: Graph) -> float:
    """Of the operators that the batch reaches."""
    reached = {n.name for n in graph.leaves("input")}
    for node in graph.nodes:
        if not reached.isdisjoint(node.inputs):
            reached.add(node.name)
    own = [n for n in graph.nodes if n.split and n.name in reached]
    return sum(bool(n.split[0].factors) for n in own) / len(own)


@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_one_process(name: str) -> None:
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    case = Case(kind().double(), {"x": torch.randn(shape, dtype=torch.float64)})
    planner = Planner(Cluster.local(2), certified_choices())
    plans = {role: planner.solve(case.captured.graph, Mesh.of(x=2), (role,), role).graph for role in ("data", "tensor")}
    assert not list(case.captured.graph.leaves("opaque"))
    assert share_split(plans["data"]) > 0.9
    assert share_split(plans["tensor"]) > 0.3
    assert_all_train_as_serial(case, plans, 1e-10)
