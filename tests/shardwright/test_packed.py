"""Packed sequences: several in a row, told apart by segments, by positions that begin anew, or by where they begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardwright as sw
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import CaptureError
from tests.each import each, some

VOCAB, WIDTH, HEADS = 40, 32, 4
Batch = dict[str, Tensor]
LENGTHS = ([5, 3, 8], [2, 10, 4])
"""The lengths in a row of a first batch, and of a second one."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, VOCAB)

    def loss(self, ids: Tensor, positions: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        mask = (segments[:, :, None] == segments[:, None]) & (place[:, None] >= place)
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask[:, None])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Segments(Net):
    def forward(self, ids: Tensor, positions: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
        return self.loss(ids, positions, segments, labels)


class Restarted(Net):
    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        return self.loss(ids, positions, (positions == 0).cumsum(1), labels)


class Begins(Net):
    """All sequences in one row, and where each begins (`cu_seqlens`)."""

    def forward(self, ids: Tensor, positions: Tensor, begins: Tensor, labels: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        return self.loss(ids, positions, (place >= begins[:, None]).sum(0)[None], labels)


class InTurn(Net):
    def forward(self, ids: Tensor, positions: Tensor, begins: Tensor, labels: Tensor) -> Tensor:
        ends = begins.tolist()
        x = torch.cat([self.tokens(ids[:, i:j]) for i, j in zip(ends, [*ends[1:], ids.shape[1]], strict=True)], 1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def llama() -> nn.Module:
    """Transformers' own, which sees packed sequences by their positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=2,
        intermediate_size=64, use_cache=False,
    ))  # fmt: skip


def batch_of(kind: str, lengths: Sequence[int], rows: int = 4) -> Batch:
    """Sequences of these lengths in each row; for `Begins` all in one row, with other lengths first in every other."""
    each = [lengths if row % 2 == 0 else lengths[::-1] for row in range(rows)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in own]) for own in each])
    segments = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(own)]) for own in each])
    generator = torch.Generator().manual_seed(rows + lengths[0])
    ids, labels = (torch.randint(VOCAB, segments.shape, generator=generator) for _ in range(2))
    labels[:, 5] = -100
    if kind == "llama":
        return {"input_ids": ids, "position_ids": positions, "labels": labels}
    batch = {"ids": ids, "positions": positions, "labels": labels}
    if kind == "begins":
        batch = {name: x.flatten()[None] for name, x in batch.items()}
        ends = torch.tensor([n for own in each for n in own]).cumsum(0)
        return {**batch, "begins": torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])}
    return {**batch, "segments": segments} if kind == "segments" else batch


MODELS: dict[str, Callable[[], nn.Module]] = {
    "segments": Segments, "restarted": Restarted, "begins": Begins, "llama": llama
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "data": {"roles": "data"}, "context": {"roles": "context"}, "tensor": {"roles": "tensor"},
    "microbatches": {"roles": "data", "microbatches": 2},
}  # fmt: skip
CASES = some([
    ("segments", "data"), ("segments", "context"), ("segments", "microbatches"), ("restarted", "data"),
    ("begins", "context"), ("begins", "tensor"), ("llama", "context"),
], 4)  # fmt: skip


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().double()


class Trained(NamedTuple):
    losses: list[float]
    gradients: dict[str, Tensor]
    axes: set[int]
    """The dimensions in which results of linears are split."""


def batches(kind: str) -> list[Batch]:
    return [batch_of(kind, lengths) for lengths in LENGTHS]


def trained(kind: str, way: str) -> Trained:
    first, second = batches(kind)
    parallel = sw.compile(
        model_of(kind),
        sw.Cluster.local(2),
        kwargs=first,
        mesh={"x": 2},
        timeout_s=60,
        check_capture="never",
        **WAYS[way],
    )
    losses = [parallel.forward_backward(**batch).item() for batch in (first, second)]
    gradients = {n: g.full_tensor() for n, p in parallel.named_parameters() if isinstance(g := p.grad, DTensor)}
    kinds = [parallel.graph.types[n.name].layouts[-1] for n in parallel.graph.nodes if n.op == "linear"]
    return Trained(losses, gradients, {kind.dim if kind.is_shard else -1 for kind in kinds})


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Trained]:
    return run_ranks(lambda: {case: trained(*case) for case in CASES}, 2, 280)[0]


@each("kind, way", CASES)
def test_packed_sequences_are_trained_as_in_one_process(
    found: dict[tuple[str, str], Trained], kind: str, way: str
) -> None:
    own, model, losses = found[kind, way], model_of(kind), list[float]()
    for batch in batches(kind):
        result = model(**batch)
        loss = result if isinstance(result, Tensor) else result.loss
        loss.backward()
        losses.append(loss.item())
    assert own.losses == pytest.approx(losses, rel=1e-6 if kind == "llama" else 1e-12)  # its loss is in float32
    for name, p in model.named_parameters():
        torch.testing.assert_close(own.gradients[name], p.grad, rtol=1e-5 if kind == "llama" else 1e-9, atol=1e-9)
    if way != "tensor":
        assert own.axes == {1 if way == "context" else 0}


def test_a_row_of_several_sequences_is_as_these_by_themselves() -> None:
    model, batch = model_of("segments"), batch_of("segments", LENGTHS[0])
    batch["labels"][:, 5] = 1
    ends = torch.tensor([0, *LENGTHS[0]]).cumsum(0).tolist()
    alone = [{name: x[:1, i:j] for name, x in batch.items()} for i, j in pairwise(ends)]  # of the first row
    sums = sum(model(**own).item() * own["ids"].numel() for own in alone)
    assert model(**{name: x[:1] for name, x in batch.items()}).item() == pytest.approx(sums / ends[-1], rel=1e-12)


def test_lengths_as_numbers_are_refused_with_the_remedy() -> None:
    with pytest.raises(CaptureError, match="mask of equal segments"):
        sw.plan(InTurn(), sw.Cluster.local(2), kwargs=batch_of("begins", LENGTHS[0]), strict=True)
