"""The model zoo: small models of real structure, with random weights.

Each function returns ``(model, batch)``: a module in train mode and the keyword batch with which
calling it gives a loss (``model(**batch)`` is a scalar, a dict with a ``"loss"``, or a transformers
output with ``.loss``). Models carry their libraries' default dropout. Weights and batch come from
torch's global generator, so the caller seeds::

    torch.manual_seed(0)
    model, batch = gpt2()

The command line addresses a model as ``examples/zoo.py:gpt2``. Transformers is imported only by the
functions that need it. ``resnext`` takes sizes too: the real ones make a real ResNeXt.

Sizes are tiny, divisible by 4 wherever a dim is worth sharding (Llama-like models have 2 KV heads), and
as distinct as their meaning allows, so that a test that mixes up two dims fails:

=========  ===========================================  ==========================
batch 8    seq 12 (so 96 tokens), T5's decoder 20        hidden 64, 4 heads of 16
vocab 112  ffn 160 (256 where the architecture says 4h)  2 layers
=========  ===========================================  ==========================
"""

# transformers' configurations take more keywords than their signatures name
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Example = tuple[nn.Module, dict[str, Tensor]]

BATCH = 8
SEQ = 12
VOCAB = 112
HIDDEN = 64
HEADS = 4
FFN = 160
LAYERS = 2


def _token_ids(seq: int = SEQ) -> Tensor:
    """Random token ids [BATCH, seq]; id 0 is left to padding."""
    return torch.randint(1, VOCAB, (BATCH, seq))


def _causal_lm_batch() -> dict[str, Tensor]:
    ids = _token_ids()
    return {"input_ids": ids, "labels": ids.clone()}


# Hand-written models


class MLP(nn.Module):
    """Three linear layers and a cross-entropy loss over classes."""

    def __init__(self, num_features: int, hidden: int, num_classes: int) -> None:
        super().__init__()
        self.up = nn.Linear(num_features, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The scalar loss of features [batch, num_features] against class ids [batch]."""
        h = F.relu(self.up(x))
        h = F.relu(self.mid(h))
        return F.cross_entropy(self.out(h), labels)


def mlp() -> Example:
    """A three-layer perceptron classifier; the loss is returned bare."""
    num_features, num_classes = 48, 20
    batch = {
        "x": torch.randn(BATCH, num_features),
        "labels": torch.randint(num_classes, (BATCH,)),
    }
    return MLP(num_features, FFN, num_classes), batch


class GPTBlock(nn.Module):
    """A pre-norm transformer block with one fused query-key-value projection."""

    def __init__(self, hidden: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.ln_attn = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.ln_mlp = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.resid_drop = nn.Dropout(dropout)

    def _attention(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        heads = (batch, seq, self.num_heads, hidden // self.num_heads)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(x).split(hidden, dim=2))
        dropout_p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """The block on hidden states [batch, seq, hidden]."""
        x = x + self.resid_drop(self._attention(self.ln_attn(x)))
        return x + self.resid_drop(self.down(F.gelu(self.up(self.ln_mlp(x)))))


class GPT(nn.Module):
    """A decoder-only language model whose head is its token embedding (tied)."""

    def __init__(self, vocab: int, max_seq: int, hidden: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        dropout = 0.1
        self.tok = nn.Embedding(vocab, hidden)
        self.pos = nn.Embedding(max_seq, hidden)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(hidden, num_heads, dropout) for _ in range(num_layers))
        self.ln = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        nn.init.normal_(self.pos.weight, std=0.02)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Loss and logits of token ids [batch, seq] against next-token ids [batch, seq]."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.tok(ids) + self.pos(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        return {"loss": loss, "logits": logits}


def gpt() -> Example:
    """A hand-written GPT: fused qkv, causal SDPA, GELU, dropout 0.1, tied head; returns a dict."""
    model = GPT(VOCAB, 32, HIDDEN, HEADS, LAYERS)
    return model, {"ids": _token_ids(), "targets": _token_ids()}


class ResNeXtBlock(nn.Module):
    """1x1, grouped 3x3, 1x1 convolutions around a (projected) shortcut; expansion 2."""

    expansion = 2

    def __init__(self, in_channels: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block on images [batch, channels, height, width]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        h += shortcut
        return self.relu(h)


class ResNeXt(nn.Module):
    """A ResNeXt: strided stem and max pool, four stages that halve the image, average pool, head."""

    def __init__(self, stem: int, width: int, depths: tuple[int, ...], groups: int, num_classes: int) -> None:
        """`width`: channels inside the blocks of the first stage; each further stage has twice as many."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, stem, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels, stages = stem, []
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(ResNeXtBlock(channels, width * 2**stage, stride, groups))
                channels = width * 2**stage * ResNeXtBlock.expansion
        self.blocks = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and logits of images [batch, 3, height, width] against class ids [batch]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = torch.flatten(self.avgpool(self.blocks(x)), 1)
        logits = self.fc(x)
        return F.cross_entropy(logits, labels), logits


def resnext(
    batch: int = BATCH,
    image_size: int = 48,
    stem: int = 16,
    width: int = 16,
    depths: tuple[int, ...] = (1, 2, 1, 1),
    groups: int = 8,
    num_classes: int = 20,
) -> Example:
    """A ResNeXt-50-like CNN: 8 groups, batch norm, stages of 1, 2, 1, 1 blocks; returns a tuple."""
    model = ResNeXt(stem, width, depths, groups, num_classes)
    images, labels = torch.randn(batch, 3, image_size, image_size), torch.randint(num_classes, (batch,))
    return model, {"images": images, "labels": labels}


def _relu_stack(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise(sizes):
        layers += [nn.Linear(num_in, num_out), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """A deep learning recommendation model (Naumov et al. 2019, arXiv:1906.00091).

    Dense features pass a bottom MLP; each categorical feature is looked up in its own table, the
    multi-valued one in a summing embedding bag. The pairwise dot products of all these vectors, with
    the dense vector, feed the top MLP, which gives one click logit for each sample.
    """

    rows: Tensor
    cols: Tensor

    def __init__(self, num_dense: int, table_sizes: list[int], bag_size: int, dim: int) -> None:
        super().__init__()
        self.bottom = _relu_stack([num_dense, 40, dim])
        self.tables = nn.ModuleList(nn.Embedding(size, dim) for size in table_sizes)
        self.bag = nn.EmbeddingBag(bag_size, dim, mode="sum")
        num_vectors = len(table_sizes) + 2
        rows, cols = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("cols", cols, persistent=False)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = nn.Sequential(_relu_stack([dim + num_pairs, 72, 36]), nn.Linear(36, 1))

    def forward(self, dense: Tensor, sparse: Tensor, history: Tensor, clicks: Tensor) -> Tensor:
        """The scalar loss of a batch.

        Args:
            dense: features [batch, num_dense].
            sparse: one id for each table [batch, num_tables].
            history: ids of the multi-valued feature [batch, num_values].
            clicks: targets in {0, 1} [batch].
        """
        x = self.bottom(dense)
        looked_up = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([x, *looked_up, self.bag(history)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = products[:, self.rows, self.cols]
        logits = self.top(torch.cat([x, pairs], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicks)


def dlrm() -> Example:
    """A DLRM: three one-valued tables and one embedding bag, pairwise interaction, BCE loss."""
    table_sizes, bag_size, num_dense = [56, 88, 104], 120, 28
    batch = {
        "dense": torch.randn(BATCH, num_dense),
        "sparse": torch.stack([torch.randint(size, (BATCH,)) for size in table_sizes], dim=1),
        "history": torch.randint(bag_size, (BATCH, 5)),
        "clicks": torch.randint(2, (BATCH,)).float(),
    }
    return DLRM(num_dense, table_sizes, bag_size, 32), batch


# Models of transformers


def gpt2() -> Example:
    """transformers' GPT-2 with its tied head and its default dropouts of 0.1."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config).train(), _causal_lm_batch()


def llama() -> Example:
    """transformers' Llama with grouped-query attention: 4 heads share 2 key-value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train(), _causal_lm_batch()


def bert() -> Example:
    """transformers' BERT as masked language model, on a batch with padding and few targets."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        max_position_embeddings=32,
        pad_token_id=0,
        use_cache=False,
    )
    lengths = SEQ - torch.arange(BATCH) % 5
    attention_mask = (torch.arange(SEQ) < lengths[:, None]).long()
    ids = _token_ids() * attention_mask
    # Every third token is a target; the phase differs by row, so every row has some, none of them padding.
    targeted = ((torch.arange(SEQ) + torch.arange(BATCH)[:, None]) % 3 == 0) & attention_mask.bool()
    batch = {
        "input_ids": ids,
        "attention_mask": attention_mask,
        "labels": torch.where(targeted, _token_ids(), -100),
    }
    return BertForMaskedLM(config).train(), batch


def vit() -> Example:
    """transformers' ViT classifier: 16 patches and a class token, so an odd sequence of 17."""
    from transformers import ViTConfig, ViTForImageClassification

    num_labels, image_size = 20, 32
    config = ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        image_size=image_size,
        patch_size=8,
        num_labels=num_labels,
    )
    batch = {
        "pixel_values": torch.randn(BATCH, 3, image_size, image_size),
        "labels": torch.randint(num_labels, (BATCH,)),
    }
    return ViTForImageClassification(config).train(), batch


def t5() -> Example:
    """transformers' T5: encoder, decoder with cross attention, relative position bias, dropout 0.1."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=24,
        d_ff=FFN,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    labels = _token_ids(seq=20)
    labels[1, -4:] = -100
    return T5ForConditionalGeneration(config).train(), {"input_ids": _token_ids(), "labels": labels}


def mixtral() -> Example:
    """transformers' Mixtral: 4 experts, 2 for each token, in the default ``grouped_mm`` implementation.

    Of the implementations of transformers 5.23, ``"eager"`` cannot be captured: it loops over
    ``nonzero()``, a shape that depends on data. ``"grouped_mm"`` (what users get) and ``"batched_mm"``
    are captured with static shapes, with a loss bitwise equal to the module's, and train on CPU.
    We keep the default, because ``batched_mm`` gathers a copy of its experts' weights for every token.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    return MixtralForCausalLM(config).train(), _causal_lm_batch()


def qwen3_moe() -> Example:
    """transformers' Qwen3-MoE: query and key norms, heads wider than hidden / heads, 16 experts, 4 used."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        moe_intermediate_size=44,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=20,
        num_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=32,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config).train(), _causal_lm_batch()


ZOO: dict[str, Callable[[], Example]] = {
    builder.__name__: builder for builder in (mlp, gpt, gpt2, llama, bert, vit, t5, mixtral, qwen3_moe, resnext, dlrm)
}
