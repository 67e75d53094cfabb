"""The GPT that the speed benchmarks train, written by hand and without dropout, and the weights and batch they share.

Queries, keys and values are separate linears, as hand-written tensor parallelism wants them, and the head is not tied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 0


@dataclass(frozen=True)
class Size:
    """`batch` sequences of `seq` tokens through `layers` blocks of width `hidden`."""

    batch: int = 8
    seq: int = 128
    vocab: int = 512
    hidden: int = 256
    heads: int = 8
    layers: int = 4


class Attention(nn.Module):
    """Causal self-attention. `num_heads` is how many heads this module computes: all, or a rank's share."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(hidden, hidden)
        self.k = nn.Linear(hidden, hidden)
        self.v = nn.Linear(hidden, hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (f(x).view(batch, seq, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """Two linears around a GELU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.ln_attn = nn.LayerNorm(hidden)
        self.attn = Attention(hidden, num_heads)
        self.ln_mlp = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_attn(x))
        return x + self.mlp(self.ln_mlp(x))


class GPT(nn.Module):
    """A decoder-only language model that returns its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tok = nn.Embedding(size.vocab, size.hidden)
        self.pos = nn.Embedding(size.seq, size.hidden)
        self.blocks = nn.ModuleList(Block(size.hidden, size.heads) for _ in range(size.layers))
        self.ln = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of token ids [batch, seq] against targets [batch, seq]."""
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(size: Size) -> GPT:
    """The model; the same weights in every process and for every call."""
    torch.manual_seed(SEED)
    return GPT(size)


def make_batch(size: Size) -> dict[str, Tensor]:
    """A batch; the same in every process and for every call."""
    generator = torch.Generator().manual_seed(SEED + 1)
    ids, targets = torch.randint(size.vocab, (2, size.batch, size.seq), generator=generator)
    return {"ids": ids, "targets": targets}
