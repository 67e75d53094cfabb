"""Mixtures of experts as models write them: sorted rows and grouped products, masks, one expert after the other.

Routing is real and uneven: of eight experts one gets most tokens, and one none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPERTS, USED = 8, 2
TOKENS, SIZE, HIDDEN = (8, 12), 16, 24


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """As transformers calls it where torch has no kernel for the dtype."""
    from transformers.integrations import moe

    assert moe
    return torch.ops.transformers.grouped_mm_fallback(x, w, ends)


def ends_of(experts: Tensor, num_experts: int = EXPERTS) -> Tensor:
    return torch.histc(experts.float(), num_experts, 0, num_experts - 1).cumsum(0, dtype=torch.int32)


class Routed(nn.Module):
    """x + y, where y[t] = Σ_k w[t, k] · expert_{e[t, k]}(x[t]), and a loss."""

    def __init__(self, gated: bool = True) -> None:
        super().__init__()
        self.gated = gated
        self.before, self.router = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, SIZE, HIDDEN * (1 + gated)) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, SIZE) / 4)
        with torch.no_grad():
            self.router.weight.mul_(3)
            self.router.bias.copy_(torch.tensor([1.5, 0.5, 0.25, 0.0, -0.25, -0.5, -1.0, -20.0]))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of every token, [tokens, k]."""
        weights, index = self.router(x).softmax(-1).topk(USED)
        return weights / weights.sum(-1, keepdim=True), index

    def active(self, h: Tensor) -> Tensor:
        if not self.gated:
            return F.gelu(h, approximate="tanh")
        gate, value = h.chunk(2, -1)
        return F.silu(gate) * value

    def experts(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        tokens = x.reshape(-1, SIZE)
        y = self.experts(tokens, *self.route(tokens)).view(x.shape)
        return (x + y).square().mean()


class Sorted(Routed):
    """Rows sorted by expert, grouped products, rows put back: what transformers does."""

    def experts(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        experts, order = index.reshape(-1).sort()
        ends = ends_of(experts)
        h = self.active(grouped_mm(x[order // index.shape[1]], self.up, ends))
        y = grouped_mm(h, self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        return y[self.inverse(order)].view(*index.shape, SIZE).sum(1)

    def inverse(self, order: Tensor) -> Tensor:
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return back


class Biased(Sorted):
    """Biases and a norm inside of the experts, and the order inverted by sorting it: rows of single products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(EXPERTS, n) / 4) for n in (2 * HIDDEN, SIZE))

    def experts(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        experts, order = index.reshape(-1).sort()
        ends = ends_of(experts)
        h = self.active(grouped_mm(x[order // index.shape[1]], self.up, ends) + self.first[experts])
        h = F.layer_norm(h, h.shape[-1:])
        y = (grouped_mm(h, self.down, ends) + self.second[experts]) * weights.reshape(-1)[order][:, None]
        return y[order.argsort()].view(*index.shape, SIZE).sum(1)


class First(Sorted):
    """One expert for each token, without weights that are trained apart from it."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        return scores.amax(-1), scores.argmax(-1)

    def experts(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        experts, order = index.sort()
        ends = ends_of(experts)
        y = grouped_mm(self.active(grouped_mm(x[order], self.up, ends)), self.down, ends)
        return y[self.inverse(order)] * weights.unsqueeze(-1)


class Masked(Routed):
    """Every expert sees every token: a mask of zeros and ones, and sums of products over all experts."""

    def experts(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        share = (F.one_hot(index, EXPERTS).to(x.dtype) * weights.unsqueeze(-1)).sum(1)
        h = self.active(torch.einsum("ti,eio->teo", x, self.up))
        return torch.einsum("teo,eoj,te->tj", h, self.down, share)


class Added(Sorted):
    """Rows gathered, and added to the token that they are of: what torchtitan does, and others with `index_add`."""

    def experts(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        order = index.reshape(-1).argsort(stable=True)
        ends, tokens = ends_of(index.reshape(-1)), order // index.shape[1]
        places = tokens.reshape(-1, 1).expand(-1, SIZE)
        y = grouped_mm(self.active(grouped_mm(x.gather(0, places), self.up, ends)), self.down, ends)
        y = y * weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).scatter_add(0, places, y) + x.index_add(0, tokens, y)


class Looped(Routed):
    """One expert after the other, over all tokens, of which those of others weigh nothing."""

    def experts(self, x: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            share = torch.where(index == expert, weights, 0.0).sum(-1, keepdim=True)
            y = y + share * (self.active(x @ self.up[expert]) @ self.down[expert])
        return y


def deepseek() -> tuple[nn.Module, dict[str, Tensor]]:
    """transformers' DeepSeek-V3: latent attention, groups of experts, one for all tokens, a first dense layer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=112, hidden_size=64, intermediate_size=96, moe_intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, n_group=4, topk_group=2,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(1, 112, TOKENS)
    return DeepseekV3ForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


MIXTURES: dict[str, Callable[[], Routed]] = {
    "sorted": Sorted, "not gated": lambda: Sorted(gated=False), "biased": Biased, "first": First, "masked": Masked,
    "added": Added, "looped": Looped,
}  # fmt: skip


def mixture(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """One of these, in double precision, and a batch."""
    torch.manual_seed(0)
    return MIXTURES[name]().double(), {"x": torch.randn(*TOKENS, SIZE).double()}
