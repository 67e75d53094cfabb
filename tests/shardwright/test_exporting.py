"""`export` writes trained weights as transformers reads them, and as `compile(weights=...)` does."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.errors import CheckpointError, DistributedError
from tests.each import some

PLANS: dict[str, dict[str, Any]] = {
    "zero": {"mesh": {"x": 2}, "roles": "zero"},
    "tensor": {"mesh": {"x": 2}, "roles": "tensor"},
    "stages": {"stages": 2, "microbatches": 2},
}


WORDS: dict[str, Any] = {
    "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0,
    "use_cache": False, "loss_type": "ForCausalLM", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0,
}  # fmt: skip


def model_of() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**WORDS))


IDS = torch.arange(32).view(4, 8)
BATCH = {"input_ids": IDS, "labels": IDS}


def compiled(name: str, **words: Any) -> Any:
    words |= {"timeout_s": 60, "check_capture": "never", **PLANS[name]}
    return sw.compile(model_of(), sw.Cluster.local(2), kwargs=BATCH, **words)


def trained(parallel: Any) -> None:
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.forward_backward(**BATCH)
    optimizer.step()


@pytest.mark.parametrize("name", some(["stages", "tensor", "zero"], 1))
def test_transformers_reads_what_was_trained(name: str) -> None:
    def body(folder: Path) -> dict[str, str]:
        parallel = compiled(name)
        sw.export(parallel, folder)  # an earlier export, in another number of files
        (folder / "model-ema.safetensors").touch()
        trained(parallel)
        return sw.export(parallel, folder, max_file_bytes=6000)

    def again(folder: Path) -> float:
        return float(compiled("zero", weights=folder).forward_backward(**BATCH))

    expected = model_of()
    expected(**BATCH).loss.backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        first, other = run_ranks(body, 2, 60, args=(folder,))
        assert first == other
        expected.config.save_pretrained(folder)
        found: Any = GPT2LMHeadModel.from_pretrained(folder)
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
        assert found.generate(IDS[:1], max_new_tokens=2).shape == (1, 10)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == first
        assert {path.name for path in folder.glob("model*")} == {
            *first.values(), "model.safetensors.index.json", "model-ema.safetensors",
        }  # fmt: skip
        assert len(set(first.values())) > 4
        assert "lm_head.weight" not in first  # it is tied
        for file in set(first.values()):
            with safe_open(folder / file, "pt") as tensors:
                assert set(tensors.keys()) == {tensor for tensor, own in first.items() if own == file}
        for loss in run_ranks(again, 2, 60, args=(folder,)):
            assert loss == pytest.approx(expected(**BATCH).loss.item(), rel=1e-5)


def test_a_failure_is_told_on_all_ranks_and_leaves_the_folder_as_it_was() -> None:
    def body(folder: Path) -> str:
        parallel = compiled("zero")
        sw.export(parallel, folder)
        before = (folder / "model.safetensors").read_bytes()
        if not dist.get_rank():
            (folder / "model.safetensors.partial").mkdir()
        dist.barrier()
        with pytest.raises((CheckpointError, DistributedError)) as error:
            sw.export(parallel, folder)
        assert (folder / "model.safetensors").read_bytes() == before
        with pytest.raises((CheckpointError, DistributedError), match="cannot export here"):
            sw.export(parallel, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="has no plan before its first call"):
            sw.export(sw.compile(model_of(), sw.Cluster.local(2), timeout_s=60), folder)
        return str(error.value)

    with tempfile.TemporaryDirectory() as place:
        for text in run_ranks(body, 2, 60, args=(Path(place),)):
            assert "cannot write model.safetensors.partial" in text
