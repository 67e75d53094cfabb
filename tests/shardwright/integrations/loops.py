"""What the tests of training loops share: a small GPT-2, its data, and ranks as a launcher starts them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from shardwright.lowering.ranks.launch import run_ranks

LENGTH, VOCAB = 8, 32


def model_of(dropout: float = 0.1, vocab: int = VOCAB) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, embd_pdrop=dropout, attn_pdrop=dropout,
                        resid_pdrop=dropout, vocab_size=vocab, n_positions=LENGTH, bos_token_id=0,
                        eos_token_id=0, use_cache=False)  # fmt: skip
    return GPT2LMHeadModel(config)


def examples(many: int) -> list[dict[str, Tensor]]:
    """Sequences of which unlike numbers of tokens are targets, in some the first one too."""
    generator, found = torch.Generator().manual_seed(1), list[dict[str, Tensor]]()
    for number in range(many):
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
        where = torch.arange(LENGTH) < number % 3
        found.append({"input_ids": ids, "labels": ids.masked_fill(where, -100)})
    return found


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def example_batch(rows: int) -> dict[str, Tensor]:
    return collated(examples(1) * rows)


def launched(body: Callable[[], Any], num_ranks: int, timeout_s: float = 120.0) -> list[Any]:
    """Run ranks that find in the environment what torchrun puts there, which these libraries read."""

    def rank() -> Any:
        place, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ |= {"RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # the process group is there already
        return body()

    return run_ranks(rank, num_ranks, timeout_s)
