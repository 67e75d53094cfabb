"""Decoder-only language models: those of published runs, on fake tensors with one block in place of all equal ones.

MPT: fused query-key-value projection, learned positions, biases, LayerNorm, GELU, head tied to the embedding
(mosaicml/llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml at the commit of the table). Llama: rotary positions,
grouped key heads, RMSNorm, SwiGLU, no biases (meta-llama/Meta-Llama-3-* config.json). Numbers of parameters are checked
against those that the tables give (tests/bench/test_published.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.graph import Graph

BLOCK = "blocks.0"
"""The module path of the block that stands for all."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a decoder-only language model: `ffn` is the hidden width of its MLP, `key_heads` share their keys."""

    family: str
    layers: int
    hidden: int
    heads: int
    key_heads: int
    ffn: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def num_parameters(self, seq: int) -> int:
        """Return the number of the whole model's parameters. Learned positions grow with the sequence."""
        whole, block = _sizes(self, seq)
        return whole + (self.layers - 1) * block

    def model_flops(self, seq: int, tokens: int) -> float:
        """FLOPs of forward and backward by the convention of llm-foundry: 6 per parameter, attention not halved."""
        return (6.0 * self.num_parameters(seq) + 12.0 * self.layers * self.hidden * seq) * tokens


def _mpt(layers: int, hidden: int, heads: int) -> Decoder:
    return Decoder("mpt", layers, hidden, heads, heads, 4 * hidden, 50368)


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> Decoder:
    return Decoder("llama", layers, hidden, heads, 8, ffn, 128256)


DECODERS: dict[str, Decoder] = {
    "125m": _mpt(12, 768, 12),
    "350m": _mpt(24, 1024, 16),
    "760m": _mpt(24, 1536, 12),
    "1b": _mpt(24, 2048, 16),
    "3b": _mpt(32, 2560, 20),
    "7b": _mpt(32, 4096, 32),
    "13b": _mpt(40, 5120, 40),
    "30b": _mpt(48, 7168, 56),
    "70b": _mpt(80, 8192, 64),
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    "llama3-405b": _llama3(126, 16384, 128, 53248),
}


class MPTBlock(nn.Module):
    """A pre-norm block of MPT."""

    def __init__(self, sizes: Decoder) -> None:
        super().__init__()
        self.heads, d = sizes.heads, sizes.hidden
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, sizes.ffn), nn.Linear(sizes.ffn, d)

    def forward(self, x: Tensor) -> Tensor:
        """The block on hidden states [batch, seq, hidden]."""
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LlamaBlock(nn.Module):
    """A block of Llama. With `even`, every query reads the first half of the keys: as much work as causal attention."""

    def __init__(self, sizes: Decoder, even: bool) -> None:
        super().__init__()
        self.even = even
        d, keys = sizes.hidden, sizes.key_heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.norm_1, self.norm_2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v = (nn.Linear(d, width, bias=False) for width in (d, keys, keys))
        self.out = nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, sizes.ffn, bias=False), nn.Linear(d, sizes.ffn, bias=False)
        self.down = nn.Linear(sizes.ffn, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The block on hidden states [batch, seq, hidden], with rotary tables [seq, head_dim]."""
        y = self.norm_1(x)
        q, k, v = (f(y).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        if self.even:
            k, v = (t[:, :, : t.shape[2] // 2] for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=not self.even, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class MPT(nn.Module):
    """MPT with so many blocks; the loss is the cross-entropy of the labels."""

    def __init__(self, sizes: Decoder, seq: int, blocks: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(sizes.vocab, sizes.hidden), nn.Embedding(seq, sizes.hidden)
        self.blocks = nn.ModuleList(MPTBlock(sizes) for _ in range(blocks))
        self.norm = nn.LayerNorm(sizes.hidden)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of token ids and labels [batch, seq]."""
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Llama(nn.Module):
    """Llama with so many blocks; the loss is the cross-entropy of the labels."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Decoder, seq: int, even: bool, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(sizes, even) for _ in range(blocks))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        frequencies = 1e4 ** -(torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
        angles = torch.outer(torch.arange(seq), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of token ids and labels [batch, seq]."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decoder(sizes: Decoder, seq: int, *, even: bool = False, blocks: int = 1) -> nn.Module:
    """The model with `blocks` of its blocks, on fake tensors if made under a `FakeTensorMode`."""
    model = MPT(sizes, seq, blocks) if sizes.family == "mpt" else Llama(sizes, seq, even, blocks)
    return model.train()


def captured(sizes: Decoder, batch: int, seq: int, even: bool = False) -> Graph:
    """The serial graph of the model with one block, for `batch` sequences of `seq` tokens.

    `even` makes Llama's attention the stand-in of which every part of the sequence has as much work (see `LlamaBlock`).
    """
    with FakeTensorMode():
        model = decoder(sizes, seq, even=even)
        ids = torch.zeros(batch, seq, dtype=torch.long)
        return capture(model, {"ids": ids, "labels": ids.clone()}, strict=True).graph


@lru_cache
def _sizes(sizes: Decoder, seq: int) -> tuple[int, int]:
    """Parameters of the model with one block, and of that block."""
    with FakeTensorMode():
        model = decoder(sizes, seq)
    return tuple(sum(p.numel() for p in m.parameters()) for m in (model, model.get_submodule(BLOCK)))  # type: ignore[return-value]
