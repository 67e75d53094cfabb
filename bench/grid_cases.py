"""Cases of the grid: models that people train, each with a global batch, and clusters of 8 to 256 devices."""

# pyright: reportCallIssue=false
# transformers' configurations take fields that their signatures do not name

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.search import Example, fake_llama
from examples.zoo import ResNeXt
from shardwright.pcg.step.precisions import Precision


@dataclass(frozen=True)
class Case:
    """A model with its batch, and the clusters that it is planned for: presets, and how many machines."""

    name: str
    build: Callable[[], Example]
    clusters: Sequence[tuple[str, int]]
    precision: Precision | None = None


def llama(hidden: int, layers: int, inner: int, heads: int, batch: int = 64, seq: int = 4096) -> Callable[[], Example]:
    """transformers' Llama 3 of these sizes on fake tensors, in bf16."""
    return lambda: fake_llama(batch, seq, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner,
                              num_attention_heads=heads)  # fmt: skip


def fake(make: Callable[[], Example]) -> Callable[[], Example]:
    """A model of transformers on fake tensors, in fp32 weights."""

    def build() -> Example:
        with FakeTensorMode():
            model, batch = make()
        return model.train(), batch

    return build


def tokens(batch: int, seq: int) -> dict[str, Tensor]:
    """A batch of a language model: zeros, int64."""
    ids = torch.zeros(batch, seq, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


@fake
def gpt2_xl() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False)), tokens(256, 1024)


@fake
def bert_large() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return BertForMaskedLM(config), tokens(256, 512)


@fake
def vit_22b() -> Example:
    """Return ViT-22B as transformers writes a ViT, without its parallel blocks."""
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.initialization import no_init_weights

    config = ViTConfig(
        hidden_size=6144, num_hidden_layers=48, num_attention_heads=48, intermediate_size=24576, patch_size=14,
        num_labels=1000,
    )  # fmt: skip
    batch = {"pixel_values": torch.zeros(512, 3, 224, 224), "labels": torch.zeros(512, dtype=torch.long)}
    with no_init_weights():  # trunc_normal_ asks for values
        return ViTForImageClassification(config), batch


@fake
def t5_11b() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=1024, d_ff=65536, num_heads=128, d_kv=128, num_layers=24, use_cache=False,
                      decoder_start_token_id=0)  # fmt: skip
    return T5ForConditionalGeneration(config), tokens(128, 512)


def mixtral(batch: int = 64) -> Callable[[], Example]:
    """8x7B."""

    def make() -> Example:
        from transformers import MixtralConfig, MixtralForCausalLM

        return MixtralForCausalLM(MixtralConfig(use_cache=False)), tokens(batch, 4096)

    return fake(make)


@fake
def qwen3_moe() -> Example:
    """30B, of which 3B are active."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config), tokens(64, 4096)


@fake
def resnext_101() -> Example:
    """32 groups of 8 channels."""
    batch = {"images": torch.zeros(256, 3, 224, 224), "labels": torch.zeros(256, dtype=torch.long)}
    return ResNeXt(64, 256, (3, 4, 23, 3), 32, 1000), batch


H100, A100, A100_40, A10 = "dgx-h100", "dgx-a100", "dgx-a100-40", "a10-box"
LLAMA_1B, LLAMA_8B, LLAMA_70B = (2048, 16, 8192, 32), (4096, 32, 14336, 32), (8192, 80, 28672, 64)
CASES = (
    Case(
        "Llama-1B",
        llama(*LLAMA_1B),
        ((H100, 1), (H100, 2), (H100, 4), (H100, 8), (A100, 1), (A100, 2), (A100_40, 2), (A10, 4)),
    ),
    Case("Llama-70B", llama(*LLAMA_70B), ((H100, 4), (H100, 8), (H100, 16), (H100, 32), (A100, 8))),
    Case("GPT-2 XL", gpt2_xl, ((A100, 1), (A100, 4), (A10, 4), (H100, 1), (H100, 4)), "amp_bf16"),
    Case("BERT-large", bert_large, ((A10, 1), (A10, 4), (A100, 1), (A100_40, 2)), "amp_bf16"),
    Case("ViT-22B", vit_22b, ((H100, 8), (H100, 32), (A100, 8), (A100, 16)), "amp_bf16"),
    Case("T5-11B", t5_11b, ((A100, 4), (A100, 8), (H100, 4), (H100, 8)), "amp_bf16"),
    Case("Mixtral 8x7B", mixtral(), ((H100, 4), (H100, 8), (A100, 8)), "amp_bf16"),
    Case("Mixtral 8x7B, batch 512", mixtral(512), ((H100, 8), (H100, 16), (A100, 16)), "amp_bf16"),
    Case("Qwen3-MoE 30B", qwen3_moe, ((H100, 2), (H100, 4), (A100, 4)), "amp_bf16"),
    Case("ResNeXt-101", resnext_101, ((A10, 1), (A100, 1), (H100, 1)), "amp_bf16"),
    Case(
        "Llama-8B",
        llama(*LLAMA_8B),
        ((H100, 1), (H100, 2), (H100, 4), (H100, 8), (A100, 1), (A100, 4), (A100, 8), (A100_40, 4)),
    ),
    Case("Llama-8B, batch 256", llama(*LLAMA_8B, batch=256), ((H100, 1), (H100, 2), (H100, 8), (A100, 4))),
    Case("Llama-8B, 8 × 32768", llama(*LLAMA_8B, batch=8, seq=32768), ((H100, 1), (H100, 4), (A100, 4))),
    Case("Llama-70B, 16 × 32768", llama(*LLAMA_70B, batch=16, seq=32768), ((H100, 8), (H100, 16))),
    Case("Llama-70B, batch 512", llama(*LLAMA_70B, batch=512), ((H100, 8), (H100, 16), (H100, 32))),
)
