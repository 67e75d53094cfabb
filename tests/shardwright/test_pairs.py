"""Losses over pairs of a batch: it is gathered where pairs are made, and the encoder stays split."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardwright as sw
from shardwright.lowering.module import ParallelModule
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import PlanError
from tests.each import each, some

ROWS = 16
Batch = dict[str, Tensor]


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 16))


class NTXent(nn.Module):
    """Two views behind each other, the other view of a row among all others."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(self.encoder(torch.cat([a, b])), dim=1)
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        other = torch.arange(len(z), device=z.device).roll(len(a))
        return F.cross_entropy((z @ z.T / 0.5).masked_fill(itself, -1e9), other)


class Clip(nn.Module):
    """Two encoders, a learned temperature, and cross-entropy both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.scale = encoder(), encoder(), nn.Parameter(torch.tensor(2.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        logits = self.scale.exp() * F.normalize(self.one(a), dim=1) @ F.normalize(self.two(b), dim=1).T
        own = torch.arange(len(a), device=a.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


class Triplet(nn.Module):
    """The farthest row of the same class and the nearest one of another, for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, a: Tensor, labels: Tensor) -> Tensor:
        z = self.encoder(a)
        distance, same = (z[:, None] - z[None]).pow(2).sum(-1), labels[:, None] == labels[None]
        farthest, nearest = distance.masked_fill(~same, -1e9).amax(1), distance.masked_fill(same, 1e9).amin(1)
        return F.relu(farthest - nearest + 1.0).mean()


class Mined(nn.Module):
    """Negative rows picked by their numbers, on which a head works once more."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = encoder(), nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, a: Tensor, labels: Tensor) -> Tensor:
        z = self.encoder(a)
        alike = (z @ z.T).detach().masked_fill(labels[:, None] == labels[None], -1e9)
        return F.triplet_margin_loss(z, self.head(z), self.head(z[alike.argmax(1)]))


MODELS: dict[str, Callable[[], nn.Module]] = {"nt-xent": NTXent, "clip": Clip, "triplet": Triplet, "mined": Mined}
ROLES = ("data", "tensor")
CASES = some([(name, role) for role in ROLES for name in MODELS], 5)


def batch_of(name: str, rows: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    a, b = (torch.randn(rows, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(4, (rows,), generator=generator)
    return {"a": a, "b": b} if name in ("nt-xent", "clip") else {"a": a, "labels": labels}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


class Trained(NamedTuple):
    losses: list[float]
    gradients: dict[str, Tensor]


def split(parallel: ParallelModule) -> int:
    """The number of linears that lie in rows on the devices."""
    graph = parallel.graph
    kinds = [graph.types[node.name].layouts[0] for node in graph.nodes if node.op == "linear"]
    return sum(kind.is_shard and kind.dim == 0 for kind in kinds)


def trained(name: str, role: str) -> tuple[Trained, int]:
    """Two batches, the second of which two devices cannot share evenly."""
    model = model_of(name)
    parallel = sw.compile(
        model,
        sw.Cluster.local(2),
        kwargs=batch_of(name),
        mesh={"x": 2},
        roles=role,
        timeout_s=60,
        check_capture="never",
    )
    losses = [parallel.forward_backward(**batch_of(name, rows)).item() for rows in (ROWS, 7)]
    gradients = {n: g.full_tensor() for n, p in parallel.named_parameters() if isinstance(g := p.grad, DTensor)}
    return Trained(losses, gradients), split(parallel)


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], tuple[Trained, int]]:
    return run_ranks(lambda: {case: trained(*case) for case in CASES}, 2, 280)[0]


@each("name, role", CASES)
def test_losses_over_pairs_are_those_of_one_process(
    found: dict[tuple[str, str], tuple[Trained, int]], name: str, role: str
) -> None:
    (losses, gradients), num_split = found[name, role]
    model, expected = model_of(name), list[float]()
    for rows in (ROWS, 7):
        loss = model(**batch_of(name, rows))
        loss.backward()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-12)
    for parameter, p in model.named_parameters():
        torch.testing.assert_close(gradients[parameter], p.grad, rtol=1e-9, atol=1e-12)
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert num_split == (0 if role == "tensor" else linears + 2 * (name == "mined"))  # its head runs twice


def test_a_loss_over_pairs_is_not_cut_into_microbatches() -> None:
    with pytest.raises(PlanError, match="cannot be cut into 2 microbatches exactly here"):
        sw.plan(model_of("clip"), sw.Cluster.local(2), kwargs=batch_of("clip"), mesh={"x": 2}, microbatches=2)
