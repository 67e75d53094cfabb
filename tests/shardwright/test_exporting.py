"""`export` writes trained weights as transformers reads them, and as `compile(weights=...)` does."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright as sw
from shardwright import whole
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


class Odd(nn.Module):
    """Buffers that are saved and not, a tied weight, and one that no step reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.unread = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.full((1,), 2.0).expand(8), persistent=False)
        self.words = ["kept"]

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.norm(self.first(x))) * self.scale).square().mean()


X = torch.arange(64.0).view(8, 8).sin()


@pytest.mark.parametrize("name", ["zero", "tensor"])
def test_the_model_itself_with_its_trained_weights(name: str) -> None:
    def body(unreal: bool) -> tuple[bool, Any]:
        with sw.fake() if unreal else nullcontext():
            model = Odd()
        words: dict[str, Any] = {"timeout_s": 60, "check_capture": "never", **PLANS[name]}
        parallel: Any = sw.compile(model, sw.Cluster.local(2), kwargs={"x": X}, **words)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        parallel.forward_backward(x=X)
        optimizer.step()
        assert (sw.export(parallel) is None) == bool(dist.get_rank())
        found: Any = sw.export(parallel, everywhere=True)
        assert found is not model
        assert (type(found), found.words, found.words is model.words) == (Odd, ["kept"], False)
        assert found.last.weight is found.first.weight
        assert found.training
        state = {n: value.tolist() for n, value in [*found.named_parameters(), *found.named_buffers()]}
        loss = float(found(X).detach())  # which is no call of a model with old weights
        return isinstance(found.first.weight, nn.Parameter) and found.first.weight.requires_grad, (loss, state)

    expected = Odd()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected(X).backward()
    optimizer.step()
    values = {n: v.detach().clone() for n, v in [*expected.named_parameters(), *expected.named_buffers()]}
    loss = expected(X).item()
    for unreal in (False, True):
        for is_leaf, (found, state) in run_ranks(body, 2, 60, args=(unreal,)):
            assert is_leaf
            assert found == pytest.approx(loss, rel=1e-4)
            assert state.keys() == values.keys()
            for n, value in values.items():
                torch.testing.assert_close(torch.tensor(state[n]), value, rtol=1e-4, atol=1e-5)


def test_what_is_done_to_the_model_after_it_was_compiled_changes_no_weight() -> None:
    """Its dtypes do not round them; of weights that are tied later there would be one for two."""

    def body(_: None) -> tuple[torch.dtype, bool, str]:
        model = Odd()
        parallel = sw.compile(
            model, sw.Cluster.local(2), kwargs={"x": X}, timeout_s=60, check_capture="never", **PLANS["zero"]
        )
        weight = parallel.state_dict()["first.weight"].full_tensor()
        model.half()
        found: Any = sw.export(parallel, everywhere=True)
        model.first.bias = model.last.bias
        with pytest.raises((CheckpointError, DistributedError)) as error:
            sw.export(parallel)
        return found.first.weight.dtype, torch.equal(found.first.weight, weight), str(error.value)

    for rank, (dtype, equal, text) in enumerate(run_ranks(body, 2, 60, args=(None,))):
        assert (dtype, equal) == (torch.float32, True)
        assert "'first.bias' and 'last.bias' are one tensor in the model, and were two" in text, rank


@pytest.mark.parametrize("name", ["stages", "zero"])
def test_transformers_goes_on_with_the_model_itself(name: str) -> None:
    def body(folder: Path) -> list[int]:
        parallel = compiled(name)
        trained(parallel)
        with pytest.raises((CheckpointError, DistributedError), match="gone, so there is none to copy; keep a ref"):
            sw.export(parallel)
        model = model_of()
        parallel: Any = sw.compile(model, sw.Cluster.local(2), kwargs=BATCH, timeout_s=60, **PLANS[name])
        trained(parallel)
        found: Any = sw.export(parallel)
        if found is None:
            return []
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
        assert found.lm_head.weight is found.transformer.wte.weight
        found.save_pretrained(folder)
        return found.generate(IDS[:1], max_new_tokens=4, do_sample=False).tolist()[0]

    expected = model_of()
    expected(**BATCH).loss.backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    with tempfile.TemporaryDirectory() as place:
        written, nothing = run_ranks(body, 2, 60, args=(Path(place),))
        again: Any = GPT2LMHeadModel.from_pretrained(place)
        assert nothing == []
        assert again.generate(IDS[:1], max_new_tokens=4, do_sample=False).tolist()[0] == written


def test_a_constant_without_values_is_told() -> None:
    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.table = torch.arange(8.0)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * self.table).square().mean()

    def body() -> None:
        with sw.fake():
            model = Tabled()
        parallel = sw.compile(model, sw.Cluster.local(1), kwargs={"x": X}, timeout_s=60)
        with pytest.raises(CheckpointError, match="'table' of Tabled has no values, and the compiled model has none"):
            sw.export(parallel)

    run_ranks(body, 1, 60)


def test_a_model_that_does_not_fit_is_told_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> str:
        model = Odd()
        parallel = sw.compile(model, sw.Cluster.local(2), kwargs={"x": X}, timeout_s=60, check_capture="never")
        with pytest.raises((CheckpointError, DistributedError)) as error:
            sw.export(parallel, everywhere=True)
        model.first, model.unread = nn.Linear(8, 8), nn.Parameter(torch.randn(1))
        with pytest.raises((CheckpointError, DistributedError), match=r"'unread' of Odd was \[3\] .* and is \[1\]"):
            sw.export(parallel)
        del model.unread
        with pytest.raises((CheckpointError, DistributedError), match="Odd has no tensor 'unread'"):
            sw.export(parallel)
        return str(error.value)

    monkeypatch.setattr(whole, "free_bytes", lambda device: 400.0)
    text, _ = run_ranks(body, 2, 60)
    assert "the whole model takes 500 B on each of 2 ranks of this machine" in text
    assert "and cpu has 400 B free; export into a folder" in text
