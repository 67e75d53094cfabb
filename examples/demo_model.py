"""The demo's model and data: a GPT-2 of 11 million parameters on the Python standard library.

``model()`` gives transformers' GPT-2 architecture with random weights over a vocabulary of bytes;
``batches(...)`` gives real text that every machine with Python has: the standard library's source.
Seed torch before ``model()`` for repeatable weights.
"""

# transformers' configurations take more keywords than their signatures name
# pyright: reportCallIssue=false

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

VOCAB = 256
MAX_SEQ = 256
BATCH = 8
SEQ = 128

_MIN_CORPUS_BYTES = 1 << 20
_MAX_CORPUS_BYTES = 8 << 20
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def model() -> nn.Module:
    """A GPT-2 with 6 layers of width 384 and 6 heads, in train mode with its default dropouts."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=MAX_SEQ,
        n_embd=384,
        n_layer=6,
        n_head=6,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config).train()


@cache
def corpus(root: Path | None = None) -> Tensor:
    """The bytes of the Python sources under ``root``, one after the other, as uint8 [num_bytes].

    Args:
        root: a folder; by default the standard library without its tests and installed packages.

    Files are taken in the order of their paths until there are 8 MiB; those that cannot be read are skipped.

    Raises:
        FileNotFoundError: less than 1 MiB of source is readable under ``root``.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    chunks: list[bytes] = []
    num_bytes = 0
    for path in _sources(root):
        if num_bytes >= _MAX_CORPUS_BYTES:
            break
        try:
            chunks.append(path.read_bytes())
        except OSError:
            continue
        num_bytes += len(chunks[-1])
    if num_bytes < _MIN_CORPUS_BYTES:
        raise FileNotFoundError(
            f"{root}: found {num_bytes} bytes of readable Python source, expected at least "
            f"{_MIN_CORPUS_BYTES}; pass corpus(root=...) a folder with more .py files"
        )
    return torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8)


def _sources(root: Path) -> list[Path]:
    """The Python files under ``root``, in the order of their paths."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def batches(num_steps: int, batch_size: int = BATCH, seq_len: int = SEQ, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """``num_steps`` batches of random windows of the corpus, the same for the same arguments.

    Each is ``{"input_ids", "labels"}``, int64 [batch_size, seq_len]; the labels are the ids, which the
    model shifts by itself. The global random state is left alone.
    """
    text = corpus()
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(seq_len)
    for _ in range(num_steps):
        starts = torch.randint(len(text) - seq_len, (batch_size, 1), generator=generator)
        ids = text[starts + window].long()
        yield {"input_ids": ids, "labels": ids.clone()}
