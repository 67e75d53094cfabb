"""`loss_fn=`: a model that returns logits is trained by a loss of them, under its own names, and evaluated as it is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shardwright as sw
from shardwright.cli.main import cli
from shardwright.lowering.ranks.launch import run_ranks
from shardwright.pcg.capture.capture import capture
from shardwright.pcg.capture.with_loss import with_loss, without_loss
from shardwright.pcg.errors import CaptureError
from tests.shardwright.test_evaluation import gathered


class Classifier(nn.Module):
    """With statistics, a parameter of its own, and a mode that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return factor * self.norm(self.inner(x)).relu() * self.scale


def loss_of(result: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return cross_entropy(result, batch["labels"], label_smoothing=0.1)


def model_of() -> Classifier:
    torch.manual_seed(0)
    return Classifier().double()


def batch_of(rows: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    labels = torch.randint(8, (rows,), generator=generator)
    return {"x": torch.randn(rows, 6, generator=generator).double(), "labels": labels, "factor": 0.5}


def test_it_trains_and_evaluates_as_one_process() -> None:
    def body() -> tuple[list[float], Tensor, dict[str, Tensor]]:
        model = model_of()
        words: dict[str, Any] = {"mesh": {"x": 2}, "roles": "zero", "timeout_s": 60}
        parallel = sw.compile(model, sw.Cluster.local(2), kwargs=batch_of(), loss_fn=loss_of, **words)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
        losses = list[float]()
        for rows in (8, 8, 4):  # the last batch has a program of its own
            losses.append(float(parallel.forward_backward(**batch_of(rows))))
            optimizer.step()
            optimizer.zero_grad()
        whole, unlabelled = (gathered(parallel.evaluate(**batch)) for batch in (batch_of(), {"x": batch_of()["x"]}))
        torch.testing.assert_close(unlabelled, whole, rtol=0, atol=0)
        return losses, gathered(whole), gathered(dict(parallel.named_parameters()))

    model, losses = model_of(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for rows in (8, 8, 4):
        batch = batch_of(rows)
        loss = loss_of(model(batch["x"], batch["factor"]), batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    expected = model.eval()(batch_of()["x"], 0.5)
    for found, logits, parameters in run_ranks(body, 2, 60):
        torch.testing.assert_close(found, losses, rtol=1e-10, atol=0)
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(parameters, dict(model.named_parameters()), rtol=1e-9, atol=1e-11)


def test_it_is_the_model_in_another_class() -> None:
    model = model_of()
    view = with_loss(model, loss_of)
    assert isinstance(view, Classifier)
    assert [*view.named_parameters()] == [*model.named_parameters()]
    view.eval()
    assert not model.training
    assert with_loss(model, None) is model
    batch = batch_of()
    torch.testing.assert_close(view(**batch), loss_of(model(batch["x"], 0.5), batch))
    torch.testing.assert_close(view(batch["x"], labels=batch["labels"]), loss_of(model(batch["x"]), batch))
    torch.testing.assert_close(without_loss(model)(**batch), model(batch["x"], 0.5))
    twin = copy.deepcopy(view)
    with torch.no_grad():
        twin.scale.zero_()
    torch.testing.assert_close(view(**batch), loss_of(model(batch["x"], 0.5), batch))
    assert twin(**batch).item() != view(**batch).item()


def test_a_forward_of_the_objects_own_is_called() -> None:
    model = model_of()
    model.forward = MethodType(lambda self, x: self.inner(x), model)
    batch = batch_of()
    torch.testing.assert_close(with_loss(model, loss_of)(**batch), loss_of(model.inner(batch["x"]), batch))


def test_the_loss_has_lines_of_its_own() -> None:
    graph = capture(with_loss(model_of(), loss_of), batch_of()).graph
    (loss,) = (node for node in graph.nodes if node.op == "cross_entropy_sum")
    assert loss.source.line.startswith("test_loss_fn.py:")


def test_what_is_no_loss_is_refused() -> None:
    x, one = batch_of(), sw.Cluster.local(1)
    with pytest.raises(CaptureError, match=r"loss_fn returns a tensor of shape \[8, 8\]"):
        sw.plan(model_of(), one, kwargs=x, loss_fn=lambda result, _: result)
    with pytest.raises(CaptureError, match=r"loss_fn returns a float"):
        sw.plan(model_of(), one, kwargs=x, loss_fn=lambda *_: 1.0)
    with pytest.raises(CaptureError, match=r"no scalar loss; .* or give loss_fn="):
        sw.plan(model_of(), one, kwargs={"x": x["x"]})
    hooked = model_of()
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"Classifier: loss_fn= for a model with forward hooks of its own"):
        sw.plan(hooked, one, kwargs=x, loss_fn=loss_of)


def test_a_function_of_the_command_line_may_return_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def made():\n"
        "    batch = {'input': torch.randn(4, 6), 'target': torch.randn(4, 2)}\n"
        "    return nn.Linear(6, 2), batch, lambda result, batch: (result - batch['target']).square().mean()\n"
    )
    said = CliRunner().invoke(cli, ["plan", f"{file}:made", "--cluster", "local:2"])
    assert said.exit_code == 0, said.output
