"""The models whose steps are measured on one GPU, and the same with a few small layers, to try the command.

They are written by hand (`bench/decoders.py`, `examples/zoo.py`) such that what is captured is what runs: transformers'
models take other attention kernels when they are traced. GPT-2 medium is Radford et al., "Language models are
unsupervised multitask learners" (2019), table 2, without dropout; Llama has the blocks of meta-llama/Llama-3.2-1B's
config.json, 32000 tokens and a head of its own; ResNeXt-50 (32×4d) is Xie et al., "Aggregated residual transformations
for deep neural networks" (2017), table 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bench.decoders import Decoder, decoder
from examples.zoo import Example, resnext

GPT2 = Decoder("mpt", layers=24, hidden=1024, heads=16, key_heads=16, ffn=4096, vocab=50257)
LLAMA = Decoder("llama", layers=16, hidden=2048, heads=32, key_heads=8, ffn=8192, vocab=32000)
SMALL_GPT2 = Decoder("mpt", layers=2, hidden=64, heads=4, key_heads=4, ffn=256, vocab=112)
SMALL_LLAMA = Decoder("llama", layers=2, hidden=64, heads=4, key_heads=2, ffn=160, vocab=112)
SMALL_SEQ = 32


@dataclass(frozen=True)
class Model:
    """A model, `whole` and `small`, with a batch of as many samples as they are given; `batch`: for the whole one."""

    title: str
    batch: int
    whole: Callable[[int], Example]
    small: Callable[[int], Example]


def _language_model(sizes: Decoder, seq: int, batch: int) -> Example:
    model = decoder(sizes, seq, blocks=sizes.layers)
    ids, labels = torch.randint(sizes.vocab, (2, batch, seq))
    return model, {"ids": ids, "labels": labels}


def _resnext50(batch: int) -> Example:
    return resnext(batch, image_size=224, stem=64, width=128, depths=(3, 4, 6, 3), groups=32, num_classes=1000)


MODELS = {
    "gpt2-medium": Model(
        "GPT-2 medium", 8, partial(_language_model, GPT2, 1024), partial(_language_model, SMALL_GPT2, SMALL_SEQ)
    ),
    "llama-1b": Model(
        "Llama 1B", 4, partial(_language_model, LLAMA, 2048), partial(_language_model, SMALL_LLAMA, SMALL_SEQ)
    ),
    "resnext50": Model("ResNeXt-50", 64, _resnext50, resnext),
}
