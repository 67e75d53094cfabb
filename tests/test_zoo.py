"""Every model of the zoo, and the demo's, trains: a finite loss and a gradient for every parameter."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from examples import demo_model
from examples.zoo import ZOO, Example
from tests.models import zoo

SEED = 0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def build(name: str) -> Example:
    torch.manual_seed(SEED)
    return ZOO[name]()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of one forward pass whose dropout is seeded."""
    torch.manual_seed(SEED + 1)
    output = model(**batch)
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output[0]


@pytest.mark.parametrize("name", zoo("mlp"))
def test_the_tests_of_a_model_are_a_group(name: str, request: pytest.FixtureRequest) -> None:
    """One worker runs them, where there are several, and captures the model once."""
    assert request.node.nodeid.endswith(f"@{name}") == request.config.getoption("loadgroup", default=False)


@pytest.mark.parametrize("name", ZOO)
def test_model_trains(name: str) -> None:
    model, batch = build(name)
    assert model.training
    loss = loss_of(model, batch)
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    without_gradient = [
        param_name for param_name, param in model.named_parameters() if param.grad is None or not param.grad.any()
    ]
    assert without_gradient == []
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ZOO)
def test_seed_determines_weights_batch_and_loss(name: str) -> None:
    model, batch = build(name)
    again, batch_again = build(name)
    assert batch.keys() == batch_again.keys()
    assert all(torch.equal(batch[key], batch_again[key]) for key in batch)
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert torch.equal(loss_of(model, batch), loss_of(again, batch_again))


@pytest.mark.parametrize("name", ["gpt", "gpt2", "bert", "t5"])
def test_dropout_is_real(name: str) -> None:
    model, batch = build(name)
    dropped = loss_of(model, batch)
    assert not torch.equal(dropped, loss_of(model.eval(), batch))


def test_bert_batch_has_padding_and_ignored_targets() -> None:
    _, batch = build("bert")
    padding = batch["attention_mask"] == 0
    assert padding.any()
    assert (batch["labels"][padding] == -100).all()
    num_targets_by_row = (batch["labels"] != -100).sum(1)
    assert (num_targets_by_row > 0).all()
    assert num_targets_by_row.unique().numel() > 1


def test_demo_model_has_about_ten_million_parameters() -> None:
    with torch.device("meta"):
        model = demo_model.model()
    assert 9e6 < sum(p.numel() for p in model.parameters()) < 12e6


def test_demo_batches_are_text_and_repeat() -> None:
    first, second = (list(demo_model.batches(3, batch_size=2, seq_len=64, seed=5)) for _ in range(2))
    assert len(first) == 3
    for ours, theirs in zip(first, second, strict=True):
        assert ours["input_ids"].shape == (2, 64)
        assert torch.equal(ours["input_ids"], ours["labels"])
        assert torch.equal(ours["input_ids"], theirs["input_ids"])
    other = next(iter(demo_model.batches(1, batch_size=2, seq_len=64, seed=6)))
    assert not torch.equal(first[0]["input_ids"], other["input_ids"])


def test_demo_corpus_skips_what_it_cannot_read(tmp_path: Path) -> None:
    text = random.Random(0).randbytes(1 << 20)
    (tmp_path / "b.py").write_bytes(text)
    (tmp_path / "a.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "c.py").mkdir()
    assert bytes(demo_model.corpus(tmp_path).tolist()) == text


def test_demo_corpus_names_a_folder_without_sources(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"found 0 bytes of readable Python source, expected at least 1048576"):
        demo_model.corpus(tmp_path)
