"""`examples/lora.py` in small: its adapters, read by peft over the same base, have the loss that it tells."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from shardwright.cost.clusters.local import default_cluster
from tests.shardwright.command import launch
from tests.shardwright.test_demo import ROOT

ROWS, LENGTH = 8, 16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.filterwarnings("ignore:.* returns logits beside its loss")
def test_adapters_are_trained_and_read_by_peft(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("demo_model.py", "train.py", "lora.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    default_cluster(2).save(tmp_path / "cluster.json")
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=LENGTH, bos_token_id=0,
                        eos_token_id=0, tie_word_embeddings=False)  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    options = ["--folder", tmp_path / "adapter", "--base", tmp_path / "base", "--cluster", tmp_path / "cluster.json"]
    options += ["--steps", 60, "--lr", 0.01, "--batch", ROWS, "--length", LENGTH]
    launch([str(tmp_path / "lora.py"), *map(str, options)], 2)
    shown = capfd.readouterr().out
    losses = [float(loss) for loss in re.findall(r"step \d+/60  loss (\S+)", shown)]
    assert len(losses) == 60

    sys.path.insert(0, str(tmp_path))
    try:
        from train import data  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.remove(str(tmp_path))
        for name in ("train", "demo_model"):
            sys.modules.pop(name, None)
    rows = [data(LENGTH)[1][number]["input_ids"] for number in range(4 * ROWS)]
    parts = torch.stack(rows).split(ROWS)

    def mean(net: nn.Module) -> float:
        with torch.no_grad():
            return sum(net(input_ids=ids, labels=ids).loss.item() for ids in parts) / len(parts)

    (told,) = re.findall(r"loss on held-out text (\S+)", shown)
    base = GPT2LMHeadModel.from_pretrained(tmp_path / "base").eval()
    before = mean(base)
    after = mean(PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval())
    assert after == pytest.approx(float(told), rel=1e-4)
    assert after < before - 0.05
