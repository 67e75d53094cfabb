"""Tensors without memory get the values that their constructor gives them on real memory, one tensor at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import shardwright as sw
from shardwright.pcg.capture import replay as replaying
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.capture.fake import record_of
from shardwright.pcg.capture.record import Record, Version, Window
from shardwright.pcg.capture.replay import replay
from shardwright.pcg.errors import PlanError
from tests.each import each

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
BEGINS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Own(nn.Module):
    """Every initializer of torch, in place and not, on parts of tensors, with generators and seeds of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        nn.init.orthogonal_(self.one.weight)
        nn.init.trunc_normal_(self.one.bias, std=0.1)
        nn.init.xavier_normal_(self.two.weight)
        nn.init.sparse_(self.two.weight, 0.2)
        nn.init.trunc_normal_(self.two.weight[:4], std=2.0)
        nn.init.eye_(self.two.weight[8:])
        self.joined = nn.Parameter(torch.cat([torch.randn(3, 4), torch.zeros(2, 4), torch.rand(3, 4)]))
        own = torch.Generator().manual_seed(3)
        self.drawn = nn.Parameter(torch.randn(5, generator=own))
        self.order = nn.Parameter(torch.randperm(7, generator=own).float())
        self.parts = nn.Parameter(torch.empty(6, 6))
        with torch.no_grad():
            self.parts[:3].normal_()
            before = self.parts.clone()
            self.parts[3:].copy_(self.parts[:3] * 2)
            self.parts.mul_(self.parts.norm())
            before.zero_()
        self.copied = copy.deepcopy(self.one)
        first = torch.randn(3)
        self.register_buffer("old", first + torch.rand(3))  # it is replayed after the write
        self.register_buffer("first", first.mul_(2))
        torch.manual_seed(11)
        self.seeded = nn.Bilinear(3, 4, 5)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.measured = nn.BatchNorm1d(4)
        self.measured(torch.randn(3, 4) + 2)
        self.register_buffer("listed", torch.tensor([1.0, 2.0, 3.0]) * 2)


def in_turn() -> nn.Module:
    """The rate of each layer is a number out of a tensor."""
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
    return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(3, 3))


def applied() -> nn.Module:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).apply(fill)


def rounded(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)),
    "converted": lambda: nn.Sequential(nn.Linear(8, 16), nn.Embedding(16, 20, padding_idx=2)).to(torch.bfloat16),
    "encoder, one layer copied": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 3),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32),
    "lstm": lambda: nn.LSTM(8, 16, 2),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8)),
    "own": Own,
    "numbers": in_turn,
    "apply": applied,
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=96, **BEGINS)),
    "Llama": lambda: rounded(LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2))),
    "Llama in bf16": lambda: AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.bfloat16),
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=2)),
    "BERT": lambda: BertForMaskedLM(BertConfig(**SMALL)),
    "T5": lambda: T5ForConditionalGeneration(T5Config(num_layers=2, d_model=32, d_ff=64, num_heads=4, vocab_size=96)),
    "ViT": lambda: ViTForImageClassification(ViTConfig(**SMALL, image_size=32, patch_size=8)),
}


def named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def of(values: dict[str, Tensor]) -> tuple[Record, dict[str, Window]]:
    """Their record, and their windows in it."""
    record = next(found for value in values.values() if (found := record_of(value)) is not None)
    return record, {n: found for n, value in values.items() if (found := record.window(value)) is not None}


def made(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in replay(*of(values))}


@pytest.mark.filterwarnings("ignore::UserWarning")
@each("name", MODELS)
def test_values_are_those_of_a_real_constructor(name: str) -> None:
    """In every bit, all at once or some of them alone; torch's generator stays where it is."""
    torch.manual_seed(5)
    expected = named(MODELS[name]())
    torch.manual_seed(5)
    with sw.fake():
        values = named(MODELS[name]())
    assert all(isinstance(value, FakeTensor) for value in values.values())
    torch.manual_seed(6)
    found = made(values)
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(6).get_state())
    assert found.keys() == expected.keys()
    for own, value in expected.items():
        assert found[own].dtype == value.dtype, own
        assert torch.equal(found[own], value), own
    last = list(values)[-2:]
    for own, value in made({own: values[own] for own in last}).items():
        assert torch.equal(value, expected[own]), own


@each("convert, most", [(False, 1), (True, 2)])
def test_one_tensor_is_alive_at_a_time(convert: bool, most: int) -> None:
    """Also where the model is filled again once it is whole, and converted, for which a tensor is there twice."""
    with sw.fake():
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(20)))
        for module in model:
            nn.init.normal_(module.get_parameter("weight"))
        model = model.double() if convert else model
    alive = list[int]()
    keep = replaying._Memory._keep

    def noted(memory: replaying._Memory, version: Version, storage: UntypedStorage) -> None:
        keep(memory, version, storage)
        alive.append(len(memory._alive))

    with mock.patch.object(replaying._Memory, "_keep", noted):
        assert len(made(named(model))) == 40
    assert max(alive) == most


def test_what_nobody_wants_is_only_drawn() -> None:
    """Of layers before the last one, draws alone, which advance the generator; steps without draws are left out."""
    with sw.fake():
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)).double()
    values = named(model)
    record, windows = of(values)
    steps = [record.steps[i].name for i in record.needed([windows["2.bias"].version])]
    assert steps.count("aten::uniform_") == 4
    assert steps.count("aten::_to_copy") == 1
    assert not {"aten::ones", "aten::fill_"} & {*steps}
    assert not any(record.steps[i].draws for i in record.needed([windows["1.weight"].version]))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.mean()


def test_capture_leaves_no_steps() -> None:
    """Although it runs the forward of a deep model, to see that its layers are alike."""
    with sw.fake():
        model = Deep()
    record, _ = of(named(model))
    before = len(record.steps)
    capture(model, {"x": torch.ones(4, 8)})
    assert len(record.steps) == before


def test_numbers_out_of_draws_are_not_known() -> None:
    with sw.fake(), pytest.raises(DataDependentOutputException):
        torch.rand(3).sum().item()


def test_real_tensors_inside_are_read_as_they_are() -> None:
    table = torch.arange(6.0)
    with sw.fake():
        values = {"view": table.view(2, 3)[1], "sum": table + 1, "fresh": torch.tensor([1.0, 2.0])}
        values["half"], values["other"] = table.split(3)
        values["sum"].mul_(2)
        values["fresh"].mul_(2)
    for found in (made(values), made(values)):
        assert {name: value.tolist() for name, value in found.items()} == {
        "view": [3, 4, 5], "sum": [2, 4, 6, 8, 10, 12], "fresh": [2, 4], "half": [0, 1, 2], "other": [3, 4, 5],
    }  # fmt: skip


@each("write", [lambda x: x.mul_(2), lambda x: x[2:].mul_(2), lambda x: x.data.mul_(2)])
def test_a_real_tensor_that_is_written_inside(write: Callable[[Tensor], object]) -> None:
    """torch would write it, and fake tensors leave it; a step that reads it is refused."""
    table = torch.arange(6.0)
    with sw.fake():
        write(table)
        values = {"sum": table + 1}
    record, _ = of(values)
    assert record.has_written(table)
    assert not record.has_written(table.clone())
    with pytest.raises(
        PlanError, match=r"^aten::add reads a real tensor \[6\] into which something was written inside"
    ):
        made(values)


def test_a_step_on_a_tensor_of_another_record() -> None:
    with sw.fake():
        other = torch.ones(3)
    with sw.fake():
        model = nn.Linear(3, 3)
        model.bias = nn.Parameter(other + model.weight[0])
    with pytest.raises(PlanError, match=r"^aten::add.* from a tensor \[3\] that was not made inside of the same `with"):
        made(named(model))


class Typed(nn.Module):
    """Tensors whose dtype is the default one, which the constructor sets."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        self.ones, self.rand = nn.Parameter(torch.ones(8)), nn.Parameter(torch.rand(8))
        self.full, self.third = nn.Parameter(torch.full((8,), 0.1)), nn.Parameter(torch.arange(8) / 3)
        torch.set_default_dtype(before)


@each("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_is_that_of_the_constructor(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    expected = named(Typed(dtype))
    torch.manual_seed(5)
    with sw.fake():
        values = named(Typed(dtype))
    for name, value in made(values).items():
        assert value.dtype == dtype
        assert torch.equal(value, expected[name]), name
    assert torch.get_default_dtype() == torch.float32


def test_a_step_that_makes_another_tensor_is_refused() -> None:
    with sw.fake():
        values = {"x": torch.ones(8)}
    record, windows = of(values)
    record.steps[0] = replace(record.steps[0], dtype=torch.float64)
    expected = r"^aten::ones makes a tensor of torch.float64 \[8\] now, and made one of torch.float32 \[8\] inside"
    with pytest.raises(PlanError, match=expected):
        list(replay(record, windows))


def seeded_again() -> list[nn.Module]:
    torch.manual_seed(3)
    first = nn.Linear(3, 3)
    torch.manual_seed(3)
    return [first, nn.Linear(3, 3)]


def forked() -> list[nn.Module]:
    first = nn.Linear(3, 3)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        second = nn.Linear(3, 3)
    return [first, second, nn.Linear(3, 3)]


def put_back() -> list[nn.Module]:
    first, state = nn.Linear(3, 3), torch.get_rng_state()
    second = nn.Linear(3, 3)
    torch.set_rng_state(state)
    return [first, second, nn.Linear(3, 3), nn.Linear(3, 3)]


def put_back_to_the_start() -> list[nn.Module]:
    state, first = torch.get_rng_state(), nn.Linear(3, 3)
    torch.set_rng_state(state)
    return [first, nn.Linear(3, 3)]


def own_generators() -> list[nn.Module]:
    own, other = torch.Generator().manual_seed(3), torch.Generator()
    drawn = [torch.randn(5, generator=own)]
    other.set_state(own.get_state())
    drawn += [torch.randn(5, generator=own), torch.randn(5, generator=other), torch.rand(3)]
    own.manual_seed(3)
    drawn += [torch.randn(5, generator=own), torch.randn(5, generator=other)]
    own.manual_seed(torch.initial_seed() + 1)
    drawn.append(torch.randn(5, generator=own))
    return [nn.ParameterList(drawn)]


STATES: list[Callable[[], list[nn.Module]]] = [seeded_again, forked, put_back, put_back_to_the_start, own_generators]


@each("build", STATES)
def test_generators_that_a_constructor_puts_back(build: Callable[[], list[nn.Module]]) -> None:
    """Their draws are those of a real constructor; afterwards they are as if nothing had been drawn."""
    torch.manual_seed(5)
    expected = named(nn.ModuleList(build()))
    torch.manual_seed(5)
    with sw.fake():
        values = named(nn.ModuleList(build()))
    seed = 3 if build is seeded_again else 5
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(seed).get_state())
    for found in (made(values), *(made({name: values[name]}) for name in values)):
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


def test_a_draw_after_the_block_is_refused() -> None:
    with sw.fake():
        model = nn.Linear(3, 3)
    nn.init.normal_(model.weight)
    assert not made({"bias": model.bias})["bias"].isnan().any()
    with pytest.raises(PlanError, match=r"^aten::normal_ draws for the model after the `with shardwright.fake\(\)`"):
        made({"weight": model.weight})


def test_a_real_tensor_that_changes_after_its_step() -> None:
    """A step reads it as it was; a part of it, and one that is expanded."""
    row = np.zeros(4, np.float32)
    real = torch.from_numpy(row)
    with sw.fake():
        values = {name: torch.empty(4) for name in "abcd"}
        for i, value in enumerate(values.values()):
            row[:] = np.arange(4) + i
            value.copy_(real if i < 2 else real[1].expand(4) if i == 2 else real[::3].repeat(2))
    assert {name: value.tolist() for name, value in made(values).items()} == {
        "a": [0, 1, 2, 3], "b": [1, 2, 3, 4], "c": [3, 3, 3, 3], "d": [3, 6, 3, 6],
    }  # fmt: skip


def filled(std: float, real: Tensor, seed: int = 0) -> Record:
    with sw.fake():
        own = torch.Generator().manual_seed(seed)
        x = torch.empty(4).normal_(std=std, generator=own)
        x[:2].copy_(real)
    record, _ = of({"x": x})
    return record


def test_a_digest_tells_what_is_not_shared() -> None:
    """Numbers, and kinds of real tensors; the values of these, and random states, are shared."""
    first = filled(1.0, torch.ones(1).expand(2))
    assert first.digest == filled(1.0, torch.zeros(2), seed=1).digest
    others = [filled(2.0, torch.ones(2)), filled(1.0, torch.ones(1)), filled(1.0, torch.ones(2).double())]
    assert first.digest not in {other.digest for other in others}
    assert [tuple(value.shape) for value in first.given.values()] == [(5056,), (1,)]
