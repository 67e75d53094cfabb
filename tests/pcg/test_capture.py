"""Import from torch: what becomes of parameters, buffers, losses and options, and every way in which capture can fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from examples.zoo import ZOO
from shardwright.pcg.capture import capture, find_loss
from shardwright.pcg.errors import CaptureError, UnsupportedOperatorError
from shardwright.pcg.graph import OPAQUE
from shardwright.pcg.interpret import run_serial


class Small(nn.Module):
    """A linear model; subclasses say how the loss is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.result((self.inner(x) ** 2).mean())

    def result(self, loss: Tensor) -> Any:
        return loss


BATCH = {"x": torch.arange(8.0).reshape(2, 4)}


def numpy_loss(model: nn.Module, batch: Mapping[str, Any]) -> float:
    """The captured graph's loss by the NumPy interpreter, on the model's own values."""
    captured = capture(model, batch)
    values = dict(model.named_parameters()) | dict(model.named_buffers()) | captured.constants | dict(batch)
    leaves = {n.name: values[str(n.attr("target"))].detach().numpy() for n in captured.graph.nodes if n.is_leaf}
    return float(run_serial(captured.graph, leaves)[dict(captured.graph.outputs)["loss"]])


@pytest.mark.parametrize("name", ZOO)
def test_every_model_is_captured_with_its_loss_and_without_opaque_operators(name: str) -> None:
    model, batch = ZOO[name]()
    captured = capture(model, batch, strict=True)
    graph = captured.graph
    loss = graph.types[dict(graph.outputs)["loss"]]
    assert (loss.shape, loss.dtype, loss.grad) == ((), "float32", True)
    assert not [n for n in graph.nodes if n.op == OPAQUE]
    assert {str(n.attr("target")) for n in graph.leaves("parameter")} == set(captured.aliases)


@pytest.mark.parametrize("name", ["mlp", "llama", "vit", "mixtral", "qwen3_moe", "resnext", "dlrm"])
def test_the_captured_graph_computes_the_models_loss(name: str) -> None:
    """Models without dropout, in NumPy and double precision where the graph allows."""
    torch.manual_seed(0)
    model, batch = ZOO[name]()
    expected = find_loss(model(**batch))
    assert expected is not None
    assert numpy_loss(model, batch) == pytest.approx(expected.item(), rel=2e-5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.tokens(ids)), ids)


def test_tied_weights_are_one_leaf_with_all_their_names() -> None:
    captured = capture(Tied(), {"ids": torch.tensor([1, 2, 3])})
    assert captured.aliases == {"tokens.weight": ("tokens.weight", "head.weight")}
    assert len(list(captured.graph.leaves("parameter"))) == 1


def test_frozen_parameters_carry_no_gradient() -> None:
    model = Small()
    model.inner.bias.requires_grad_(False)
    graph = capture(model, BATCH).graph
    assert {str(n.attr("target")): graph.types[n.name].grad for n in graph.leaves("parameter")} == {
        "inner.weight": True,
        "inner.bias": False,
    }


def test_running_statistics_are_outputs() -> None:
    class Normed(Small):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            return self.inner(self.norm(x)).sum()

    graph = capture(Normed(), BATCH).graph
    assert {key for key, _ in graph.outputs} == {
        "loss",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_dropout_is_numbered_in_the_order_of_the_draws() -> None:
    class Dropped(Small):
        def forward(self, x: Tensor) -> Any:
            return F.dropout(self.inner(F.dropout(x, 0.5)), 0.25).sum()

    graph = capture(Dropped(), BATCH).graph
    assert [(n.attr("p"), n.attr("seed")) for n in graph.nodes if n.op == "dropout"] == [(0.5, 0), (0.25, 1)]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: loss,
        lambda loss: (loss, torch.zeros(3)),
        lambda loss: (torch.zeros(3), loss),
        lambda loss: {"loss": loss, "logits": torch.zeros(3)},
        lambda loss: type("Output", (dict,), {})(loss=loss),
    ],
)
def test_the_loss_is_found(wrap: Any) -> None:
    class Wrapped(Small):
        def result(self, loss: Tensor) -> Any:
            return wrap(loss)

    assert [key for key, _ in capture(Wrapped(), BATCH).graph.outputs] == ["loss"]


def test_options_are_baked_in_and_positional_arguments_are_named() -> None:
    class Scaled(Small):
        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            return self.inner(x).sum() * scale

    captured = capture(Scaled(), {"scale": 3.0}, (BATCH["x"],))
    assert captured.options == {"scale": 3.0}
    assert [n.attr("target") for n in captured.graph.leaves("input")] == ["x"]


def test_nested_batches_are_named_by_their_path() -> None:
    class Nested(Small):
        def forward(self, batch: Any) -> Any:
            return self.inner(batch["x"][0]).sum()

    captured = capture(Nested(), {"batch": {"x": [BATCH["x"]]}})
    assert [n.attr("target") for n in captured.graph.leaves("input")] == ["batch.x.0"]


def test_models_on_fake_tensors_are_captured_without_data() -> None:
    with FakeTensorMode():
        model = Small()
    graph = capture(model, BATCH).graph
    assert {n.op for n in graph.nodes} >= {"linear", "parameter", "sum"}


def test_sources_name_module_and_line() -> None:
    linear = next(n for n in capture(Small(), BATCH).graph.nodes if n.op == "linear")
    assert linear.source.module == "inner"
    assert linear.source.line.startswith("test_capture.py:")


# ---- errors ----


def test_a_model_without_a_loss_is_told_what_to_return() -> None:
    class Logits(Small):
        def forward(self, x: Tensor) -> Any:
            return {"logits": self.inner(x)}

    with pytest.raises(CaptureError) as error:
        capture(Logits(), BATCH)
    assert "Logits returns dict with keys ['logits'], in which there is no scalar loss; return the loss as" in str(
        error.value
    )


def test_data_dependent_control_flow_names_module_line_and_remedy() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    class Outer(Small):
        def __init__(self) -> None:
            super().__init__()
            self.branch = Branch()

        def forward(self, x: Tensor) -> Any:
            return self.branch(self.inner(x)).sum()

    with pytest.raises(CaptureError) as error:
        capture(Outer(), BATCH)
    message = str(error.value)
    assert message.startswith("Outer could not be captured: in module 'branch' (test_capture.py:")
    assert "use torch.where instead of `if` on tensor values" in message


def test_an_error_in_forward_names_where() -> None:
    class Broken(Small):
        def forward(self, x: Tensor) -> Any:
            return self.inner(x[:, :2]).sum()

    with pytest.raises(
        CaptureError,
        match=r"Broken could not be captured: in module 'inner' \(test_capture\.py:\d+\).*outside Shardwright",
    ):
        capture(Broken(), BATCH)


def test_arguments_that_do_not_fit_are_named() -> None:
    with pytest.raises(CaptureError, match=r"Small\.forward cannot take this batch: missing a required argument: 'x'"):
        capture(Small(), {"y": BATCH["x"]})


def test_a_batch_without_tensors_is_refused() -> None:
    class Free(nn.Module):
        def forward(self, n: int) -> Tensor:
            return torch.zeros(())

    with pytest.raises(CaptureError, match="the batch holds no tensor; pass example inputs"):
        capture(Free(), {"n": 3})


def test_variadic_positional_arguments_are_refused() -> None:
    class Variadic(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return xs[0].sum()

    with pytest.raises(CaptureError, match=r"takes \*xs; give the batch as keyword arguments"):
        capture(Variadic(), {}, (BATCH["x"],))


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(CaptureError, match="is on device 'meta', where gradients can get lost silently"):
        capture(Small().to("meta"), BATCH)


def test_mutated_inputs_are_refused() -> None:
    class Mutating(Small):
        def forward(self, x: Tensor) -> Any:
            x.add_(1)
            return self.inner(x).sum()

    with pytest.raises(CaptureError, match="the model mutates its input 'x' in place; clone it first"):
        capture(Mutating(), {"x": BATCH["x"].clone()})


class Unknown(Small):
    def forward(self, x: Tensor) -> Any:
        return torch.linalg.matrix_exp(self.inner(x)[:, :2]).sum()


def test_operators_without_a_row_run_opaque() -> None:
    graph = capture(Unknown(), BATCH).graph
    (node,) = [n for n in graph.nodes if n.op == OPAQUE]
    assert node.attr("target") == "aten.linalg_matrix_exp.default"
    assert graph.types[node.name].shape == (2, 2)


def test_strict_refuses_them() -> None:
    with pytest.raises(UnsupportedOperatorError) as error:
        capture(Unknown(), BATCH, strict=True)
    assert "operator aten.linalg_matrix_exp.default has no row in the op table, and strict=True" in str(error.value)
