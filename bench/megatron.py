"""Megatron-style tensor parallelism written by hand, as the papers do it (Shoeybi et al. 2019, arXiv:1909.08053).

Every block's first linears are split by output, its last by input; f and g of the paper are `copy_in` and `sum_out`.
The embeddings and the head are split by output too, their results gathered, so that the layout is that of our plan.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from bench.gpt import GPT, Block

# pyright: reportIncompatibleMethodOverride=false

Context = Any


class _CopyIn(Function):
    """f: nothing forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _SumOut(Function):
    """g: all-reduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        x = x.detach().contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return grad


class _Gather(Function):
    """All-gather of the last dimension forward, this rank's slice backward."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x.contiguous())
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size(), -1)[dist.get_rank()].contiguous()


def copy_in(x: Tensor) -> Tensor:
    return _CopyIn.apply(x)


def sum_out(x: Tensor) -> Tensor:
    return _SumOut.apply(x)


def gather(x: Tensor) -> Tensor:
    return _Gather.apply(x)


class MegatronGPT(nn.Module):
    """This rank's share of a GPT, with a copy of its weights."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tok, self.pos, self.ln, self.head = model.tok, model.pos, model.ln, model.head
        self.blocks = nn.ModuleList(MegatronBlock(block) for block in model.blocks if isinstance(block, Block))
        _shard(self.tok, "weight", 1)
        _shard(self.pos, "weight", 1)
        _shard(self.head, "weight", 0)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = gather(self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        logits = gather(self.head(copy_in(self.ln(x))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class MegatronBlock(nn.Module):
    """A block whose heads and hidden units are divided among the ranks."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.ln_attn, self.attn, self.ln_mlp, self.mlp = block.ln_attn, block.attn, block.ln_mlp, block.mlp
        self.attn.num_heads //= dist.get_world_size()
        for linear in (self.attn.q, self.attn.k, self.attn.v, self.mlp.up):
            _shard(linear, "weight", 0)
            _shard(linear, "bias", 0)
        for linear in (self.attn.proj, self.mlp.down):
            _shard(linear, "weight", 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(copy_in(self.ln_attn(x)))
        hidden = F.gelu(self.mlp.up(copy_in(self.ln_mlp(x))))
        return x + sum_out(F.linear(hidden, self.mlp.down.weight)) + self.mlp.down.bias

    def _attention(self, x: Tensor) -> Tensor:
        a = self.attn
        batch, seq, _ = x.shape
        q, k, v = (f(x).view(batch, seq, a.num_heads, -1).transpose(1, 2) for f in (a.q, a.k, a.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, -1)
        return sum_out(F.linear(y, a.proj.weight)) + a.proj.bias


def _shard(module: nn.Module, name: str, dim: int) -> None:
    """Replace a parameter by this rank's slice of it."""
    whole = module.get_parameter(name)
    part = whole.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()
    setattr(module, name, nn.Parameter(part))


def sharded_dims() -> dict[str, int]:
    """The dimension along which each sharded parameter is divided, by the last two parts of its name."""
    rows = ("q.weight", "q.bias", "k.weight", "k.bias", "v.weight", "v.bias", "up.weight", "up.bias", "head.weight")
    columns = ("proj.weight", "down.weight", "tok.weight", "pos.weight")
    return {name: 0 if name in rows else 1 for name in rows + columns}
