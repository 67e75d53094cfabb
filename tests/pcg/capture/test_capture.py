"""Import from torch: what becomes of parameters, buffers, losses, options and gradients, and how capture can fail."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench.accuracy import prepare
from shardwright.pcg.capture import exporting
from shardwright.pcg.capture.capture import Captured, capture, find_loss
from shardwright.pcg.errors import CaptureError, UnsupportedOperatorError
from shardwright.pcg.graph import OPAQUE
from shardwright.pcg.interpret import run_serial
from shardwright.search.check import difference
from tests.each import each
from tests.models import zoo
from tests.pcg.run_torch import run_torch


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


def values_by_target(model: nn.Module, captured: Captured, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that the leaves of a captured graph stand for."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants, **batch}


def numpy_loss(model: nn.Module, batch: Mapping[str, Any], known: Captured | None = None) -> float:
    """The captured graph's loss by the NumPy interpreter, on the model's own values."""
    captured = known or capture(model, batch)
    values = values_by_target(model, captured, batch)
    leaves = {n.name: values[str(n.attr("target"))].detach().numpy() for n in captured.graph.nodes if n.is_leaf}
    return float(run_serial(captured.graph, leaves)[dict(captured.graph.outputs)["loss"]])


class Composed(nn.Module):
    """Operators that torch composes of others: with rows of ours and without, by C++ and by Python."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.GroupNorm(2, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = self.norm(x[..., None, None].expand(-1, -1, 2, 2))
        wide = F.interpolate(image, scale_factor=2.0, mode="nearest-exact") + F.interpolate(image, (4, 4))
        y = torch.einsum("bchw,bchw->bc", wide, wide) + F.pairwise_distance(x, 2 * x)[:, None]
        return F.mse_loss(self.inner(torch.column_stack([y, x])[:, 4:]), F.one_hot(x.long().argmax(1), 4).float())


def test_composite_operators_are_as_if_all_kernels_were_replaced() -> None:
    own = capture(Composed(), BATCH)
    with mock.patch.object(exporting, "_operators_looked_up_once", nullcontext):
        assert difference(own.graph, capture(Composed(), BATCH).graph) is None


@pytest.mark.parametrize("name", zoo())
def test_every_model_is_captured_with_its_loss_and_without_opaque_operators(name: str) -> None:
    captured = prepare(name).captured
    graph = captured.graph
    loss = graph.types[dict(graph.outputs)["loss"]]
    assert (loss.shape, loss.dtype, loss.grad) == ((), "float32", True)
    assert not [n for n in graph.nodes if n.op == OPAQUE]
    assert {str(n.attr("target")) for n in graph.leaves("parameter")} == set(captured.aliases)


@pytest.mark.parametrize("name", zoo("mlp", "llama", "vit", "mixtral", "qwen3_moe", "resnext", "dlrm"))
def test_the_captured_graph_computes_the_models_loss(name: str) -> None:
    """Models without dropout, in NumPy and double precision where the graph allows."""
    found = prepare(name)
    assert numpy_loss(found.model, found.batch, found.captured) == pytest.approx(found.reference.loss, rel=2e-5)


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


@each(
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
        def forward(self, x: Any) -> Any:
            return self.inner(x["pixels"][0]).sum()

    captured = capture(Nested(), {"x": {"pixels": [BATCH["x"]]}})
    assert [n.attr("target") for n in captured.graph.leaves("input")] == ["x.pixels.0"]


def test_models_on_fake_tensors_are_captured_without_data() -> None:
    with FakeTensorMode():
        model = Small()
    graph = capture(model, BATCH).graph
    assert {n.op for n in graph.nodes} >= {"linear", "parameter", "sum"}


def test_the_mode_of_fake_tensors_may_still_be_on() -> None:
    """Capture looks at tensors of export's own mode, as for the order in which dropout draws."""

    class Dropped(Small):
        def forward(self, x: Any) -> Any:
            return F.dropout(self.inner(x).transpose(0, 1), 0.1).sum()

    expected = capture(Dropped(), BATCH).graph
    with FakeTensorMode() as mode:
        model, batch = Dropped(), {"x": torch.ones(BATCH["x"].shape)}
        assert capture(model, batch).graph == expected
    with mode:
        assert capture(model, {"x": torch.ones(BATCH["x"].shape)}).graph == expected
    with FakeTensorMode():
        assert capture(Dropped(), {"x": torch.ones(BATCH["x"].shape)}).graph == expected
        assert capture(model, batch).graph == expected


def test_sources_name_module_and_line() -> None:
    linear = next(n for n in capture(Small(), BATCH).graph.nodes if n.op == "linear")
    assert linear.source.module == "inner"
    assert linear.source.line.startswith("test_capture.py:")


# ---- gradients ----


def gradients_agree(model: nn.Module, batch: Mapping[str, Any], known: Captured | None = None) -> bool:
    """Whether the captured graph's loss and gradients, by the rows' torch expressions, are the model's."""
    captured = known or capture(model, batch)
    values = values_by_target(model, captured, batch)
    leaves = {n.name: values[str(n.attr("target"))].clone() for n in captured.graph.nodes if n.is_leaf}
    loss = run_torch(captured.graph, leaves)[dict(captured.graph.outputs)["loss"]]
    expected = find_loss(model(**batch))
    assert expected is not None
    parameters = list(model.parameters())
    got = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    want = torch.autograd.grad(expected, parameters, allow_unused=True, materialize_grads=True)
    return all(map(same_but_for_rounding, (loss, *got), (expected, *want)))


def same_but_for_rounding(got: Tensor, want: Tensor) -> bool:
    """Whether no element is off by more than rounding of the largest: small ones may be differences of large ones."""
    return bool((got - want).abs().max() <= 1e-5 * want.abs().max() + 1e-7)


def test_no_gradient_leaves_a_region_without_gradients() -> None:
    class Frozen(Small):
        def forward(self, x: Tensor) -> Any:
            h = self.inner(x)
            with torch.no_grad():
                scale = h.abs().mean() + self.inner.weight.sum()
            return (h * scale).sum()

    assert gradients_agree(Frozen(), BATCH)


def test_a_decorator_disables_gradients_too() -> None:
    class Frozen(Small):
        @torch.no_grad()
        def target(self, x: Tensor) -> Tensor:
            return self.inner(x)

        def forward(self, x: Tensor) -> Any:
            return ((self.inner(2 * x) - self.target(x)) ** 2).mean()

    assert gradients_agree(Frozen(), BATCH)


def test_gradients_enabled_inside_a_region_without_them() -> None:
    class Nested(Small):
        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                h = self.inner(x)
                with torch.enable_grad():
                    loss = (self.inner(x) * h).sum()
            return loss

    assert gradients_agree(Nested(), BATCH)


def test_what_a_region_without_gradients_passes_on_keeps_its_gradient() -> None:
    class Passed(Small):
        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                y, z = x * 2, self.inner.bias
            return (self.inner(y) * z).sum()

    assert gradients_agree(Passed(), BATCH)


def test_statistics_updated_without_gradients() -> None:
    class Averaging(Small):
        average: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.ones(3))

        def forward(self, x: Tensor) -> Any:
            h = self.inner(x)
            with torch.no_grad():
                self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
            return (h / self.average).sum()

    model = Averaging()
    graph = capture(model, BATCH).graph
    assert {key for key, _ in graph.outputs} == {"loss", "average"}
    assert not graph.types[dict(graph.outputs)["average"]].grad
    assert gradients_agree(model, BATCH)


def test_regions_without_parameters_are_not_detached() -> None:
    class Positions(Small):
        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                positions = torch.arange(4.0) * x.detach()
            return self.inner(x + positions).sum()

    assert "detach" not in {n.op for n in capture(Positions(), BATCH).graph.nodes}


def test_a_backward_of_ones_own_is_refused() -> None:
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    class Rounded(Small):
        def forward(self, x: Tensor) -> Any:
            return Straight.apply(self.inner(x)).sum()

    with pytest.raises(CaptureError) as error:
        capture(Rounded(), BATCH)
    message = str(error.value)
    assert message.startswith("Rounded could not be captured: in module 'Rounded' (test_capture.py:")
    assert f"Straight is an autograd.Function with a backward of its own (in {__name__}). Capture" in message
    assert Straight.apply(torch.tensor([0.6], requires_grad=True)).requires_grad  # and works again afterwards


def test_a_hook_on_a_gradient_is_refused() -> None:
    class Hooked(Small):
        def forward(self, x: Tensor) -> Any:
            h = self.inner(x)
            h.register_hook(lambda grad: grad * 2)
            return h.sum()

    with pytest.raises(CaptureError, match="a hook is registered on the gradient of a tensor"):
        capture(Hooked(), BATCH)


def test_checkpointed_modules_are_captured_as_they_are() -> None:
    class Checkpointed(Small):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False).pow(2).sum()

    class Reentrant(Small):
        """With and without gradients, and a region without them behind. Torch alone runs what it should give."""

        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            again = torch.compiler.is_exporting()
            h = checkpoint(self.outer, self.inner(x), use_reentrant=again).pow(2)
            h = h + (checkpoint(self.inner, x, use_reentrant=True) if again else self.inner(x).detach())
            with torch.no_grad():
                mean = h.mean()
            return (h * mean).sum()

    for model in (Checkpointed(), Reentrant()):
        assert gradients_agree(model, BATCH), model


# ---- operators ----


class InPlace(Small):
    """Writes into what it computed, through views."""

    def forward(self, x: Tensor) -> Any:
        h = self.inner(x)
        h[:, 1:].mul_(2)
        h[0] += 1
        h[h > 3] = 0.5
        h[:, -1].fill_(3.0)
        h.clamp_(min=-1).add_(1).relu_()
        y = torch.zeros_like(h)
        y[1:] = h[:-1]
        y.transpose(0, 1)[0].copy_(h[:, 2])
        return (y * h).sum()


def test_in_place_operators() -> None:
    model = InPlace()
    assert capture(model, BATCH, strict=True)
    assert gradients_agree(model, BATCH)
    assert numpy_loss(model, BATCH) == pytest.approx(model(**BATCH).item(), rel=1e-5)


class Composite(Small):
    """Composite operators without a handler, and other names of operators that have one."""

    def forward(self, x: Tensor) -> Any:
        h = torch.einsum("bi,oi->bo", x, self.inner.weight)
        h = torch.cat([torch.hstack([h, h]), torch.concat([h, -h], 1)])
        h = torch.clip(torch.subtract(h, torch.absolute(h)), -2, 2) + torch.outer(h[:, 0], h[0])
        h = F.group_norm(h, 2) + F.conv1d(h[None], torch.ones(4, 4, 1))[0]
        return F.l1_loss(F.leaky_relu(h), F.relu6(h))


def test_composite_operators_are_decomposed() -> None:
    assert capture(Composite(), BATCH, strict=True)
    assert gradients_agree(Composite(), BATCH)


def test_recurrent_layers_are_not_unrolled() -> None:
    class Recurrent(Small):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.cell = nn.LSTM(4, 3), nn.LSTMCell(3, 3)

        def forward(self, x: Tensor) -> Any:
            return self.cell(self.inner(x)[0])[0].sum()

    graph = capture(Recurrent(), BATCH).graph
    assert [n.attr("cell") for n in graph.leaves("recurrent")] == ["lstm"]


def test_random_operators_without_a_row_are_drawn_each_time() -> None:
    class Noisy(Small):
        def forward(self, x: Tensor) -> Any:
            return (self.inner(x).sum(1, keepdim=True) * (torch.rand_like(x) - torch.rand_like(x))).sum()

    graph = capture(Noisy(), BATCH).graph
    assert [n.attr("target") for n in graph.nodes if n.op == OPAQUE] == ["aten.rand_like.default"] * 2


def test_the_default_dtype_is_that_of_the_program() -> None:
    class Filled(Small):
        def forward(self, x: Tensor) -> Any:
            return (self.inner(x.double()) * torch.full((), 0.1) + torch.arange(3) * 0.1).sum()

    torch.set_default_dtype(torch.float64)
    try:
        graph = capture(Filled(), BATCH).graph
    finally:
        torch.set_default_dtype(torch.float32)
    assert {graph.types[n.name].dtype for n in graph.nodes if n.op == "full"} == {"float64"}


def test_numbers_beside_tensors_in_a_nest_are_baked_in() -> None:
    class Nested(Small):
        def forward(self, x: Any) -> Any:
            return self.inner(x["pixels"]).sum() * x["scale"]

    captured = capture(Nested(), {"x": {"scale": 3.0, "pixels": BATCH["x"]}})
    assert [n.attr("target") for n in captured.graph.leaves("input")] == ["x.pixels"]


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


def test_data_dependent_control_flow_names_module_line_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """And torch's print of the whole graph does not bury the message."""

    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            print("of the model's own", file=sys.stderr)
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
    assert capsys.readouterr().err == "of the model's own\n"


def test_an_error_in_forward_names_where() -> None:
    class Broken(Small):
        def forward(self, x: Tensor) -> Any:
            return self.inner(x[:, :2]).sum()

    with pytest.raises(
        CaptureError,
        match=r"Broken could not be captured: in module 'inner' \(test_capture\.py:\d+\).*outside Shardwright",
    ):
        capture(Broken(), BATCH)


class Named(nn.Module):
    """Parts with names that are given."""

    def __init__(self, module: str, parameter: str, buffer: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({module: nn.Linear(4, 4)})
        self.scales = nn.ParameterDict({parameter: nn.Parameter(torch.ones(4))})
        self.register_buffer(buffer, torch.zeros(4))
        self.names = module, parameter, buffer

    def forward(self, **batch: Tensor) -> Tensor:
        (x,) = batch.values()
        module, parameter, buffer = self.names
        return (self.parts[module](x) * self.scales[parameter] + getattr(self, buffer)).square().sum()


@each(
    ("names", "key", "path"),
    [
        (("class", "a", "b"), "x", "'parts.class'"),
        (("a", "lambda", "b"), "x", "'scales.lambda'"),
        (("a", "b", "if"), "x", "'if'"),
        (("a", "b", "c"), "from", "'from'"),
    ],
    ids=["module", "parameter", "buffer", "input"],
)
def test_names_that_are_keywords_are_named(names: tuple[str, str, str], key: str, path: str) -> None:
    assert capture(Named("a-b", "1", "match"), {"x": torch.ones(2, 4)}).graph  # other names are right
    with pytest.raises(CaptureError, match=f"^Named could .*: {path} has a name that is a keyword of Python, .*rename"):
        capture(Named(*names), {key: torch.ones(2, 4)})


def test_a_batch_norm_of_all_batches_is_named() -> None:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, momentum=None)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x).square().sum()

    with pytest.raises(CaptureError) as error:
        capture(Averaged(), {"x": torch.randn(8, 4)})
    assert "): BatchNorm1d(momentum=None) averages over all batches so far" in str(error.value)
    assert str(error.value).endswith("give it a momentum, such as 0.1")


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

    with pytest.raises(
        CaptureError, match=r"^model \(test_capture\.py:\d+\): the model mutates its input 'x' in place; clone it first"
    ):
        capture(Mutating(), {"x": BATCH["x"].clone()})


def test_refusals_inside_no_grad_name_the_module_and_its_forward() -> None:
    """Torch has no line of what runs there: rotary embeddings with complex numbers of transformers."""

    class Rotary(nn.Module):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return torch.polar(torch.ones_like(x), x).tanh().real

    class Turned(Small):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = Rotary()

        def forward(self, x: Tensor) -> Any:
            return (self.inner(x).mean() * self.rotary(x)).sum()

    with pytest.raises(CaptureError, match=r"^rotary \(test_capture\.py:\d+\): aten\.tanh.*no row for complex"):
        capture(Turned(), BATCH)


def test_mutated_parameters_are_refused() -> None:
    class Renormed(Small):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(6, 4, max_norm=1.0)

        def forward(self, x: Tensor) -> Any:
            return self.inner(self.tokens(x.long() % 6)).sum()

    with pytest.raises(CaptureError, match=r"in module 'tokens'.*renormalises the table of an embedding \(max_norm\)"):
        capture(Renormed(), BATCH)


@each("trains, remedy", [(True, "write into a clone, or change the parameter after"), (False, "make it a buffer")])
def test_writes_to_parameters_are_refused(trains: bool, remedy: str) -> None:
    class Clamped(Small):
        def forward(self, x: Tensor) -> Any:
            self.inner.weight.data.clamp_(-1, 1)
            return self.inner(x).sum()

    model = Clamped()
    model.inner.weight.requires_grad_(trains)
    where = r"^model \(test_capture\.py:\d+\): the model mutates its parameter 'inner\.weight' in place, and only optim"
    with pytest.raises(CaptureError, match=rf"{where}izers change parameters; {remedy}"):
        capture(model, BATCH)


def test_operators_with_graphs_of_their_own_are_refused() -> None:
    class Conditional(Small):
        def forward(self, x: Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (self.inner(x),)).sum()

    with pytest.raises(
        CaptureError, match=r"cond could not be lifted: .* have no rows; use torch.where for torch.cond"
    ):
        capture(Conditional(), BATCH)


def test_numbers_that_depend_on_data_are_refused() -> None:
    class Indexed(Small):
        def forward(self, x: Tensor) -> Any:
            return self.inner(x)[x[0, 0].long()].sum()

    with pytest.raises(CaptureError, match=r"it gives the number \w+, which depends on data; keep it a tensor"):
        capture(Indexed(), BATCH)


def test_cumulative_averages_of_statistics_are_refused() -> None:
    class Cumulative(Small):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4, momentum=None)

        def forward(self, x: Tensor) -> Any:
            return self.inner(self.norm(x)).sum()

    with pytest.raises(CaptureError, match="in module 'norm'"):
        capture(Cumulative(), BATCH)


class Drawing(Small):
    """Draws from a generator of its own."""

    def forward(self, x: Tensor) -> Any:
        generator = torch.Generator().manual_seed(0)
        return (self.inner(x) * torch.rand(3, generator=generator)).sum()


class DrawingFromKept(Small):
    """Draws from one that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Any:
        return (self.inner(x) * torch.bernoulli(x[:, :3] * 0 + 0.5, generator=self.generator)).sum()


@each("model", [Drawing, DrawingFromKept])
def test_generators_are_refused(model: type[Small]) -> None:
    with pytest.raises(CaptureError) as error:
        capture(model(), BATCH)
    assert str(error.value).startswith("model (test_capture.py:")
    assert "reads a Generator, which capture cannot keep" in str(error.value)
    assert "draw outside of forward and pass the tensor in the batch" in str(error.value)


def test_what_cannot_be_traced_is_named() -> None:
    class Counted(Small):
        def forward(self, x: Tensor) -> Any:
            return self.inner(x).sum() * len(x.numpy())

    with pytest.raises(
        CaptureError, match=r"\(test_capture\.py:.*torch\.export cannot trace this line: write it in other"
    ):
        capture(Counted(), BATCH)


_manual_seed, _default = torch.manual_seed, torch.default_generator


def _restored() -> None:
    """A draw that leaves the generator as it was."""
    with torch.random.fork_rng():
        torch.rand(1)


@each(
    "seed",
    [
        lambda: torch.manual_seed(0),
        lambda: torch.random.manual_seed(0),
        lambda: _manual_seed(0),
        torch.seed,
        lambda: torch.default_generator.manual_seed(0),
        _default.seed,
        lambda: torch.set_rng_state(torch.get_rng_state()),
        _restored,
    ],
)
def test_seeds_in_forward_are_refused(seed: Callable[[], object]) -> None:
    class Seeded(Small):
        def forward(self, x: Tensor) -> Any:
            seed()
            return F.dropout(self.inner(x)).sum()

    with pytest.raises(CaptureError, match=r"forward seeds torch's generator.* Capture would lose it: seed before"):
        capture(Seeded(), BATCH)
    torch.manual_seed(0)  # works again
    torch.set_rng_state(torch.get_rng_state())


class Drawn(Small):
    """Multiplies by a draw of each kind."""

    def __init__(self, draw: Callable[[Any], object]) -> None:
        super().__init__()
        self.draw, self.generator, self.python = draw, np.random.default_rng(0), random.Random(0)

    def forward(self, x: Tensor) -> Any:
        return (self.inner(x) * float(self.draw(self))).sum()  # type: ignore[arg-type]


_uniform = random.uniform


@each(
    "draw, said",
    [
        (lambda m: np.random.rand(), "forward draws from NumPy's random"),
        (lambda m: np.random.choice(3), "forward draws from NumPy's random"),
        (lambda m: random.random(), "forward draws from Python's random"),
        (lambda m: (np.random.seed(), np.random.rand())[1], "forward draws from NumPy's random"),
        (lambda m: _uniform(0, 1), "forward draws from Python's random"),
        (lambda m: m.generator.random(), "forward draws from generator"),
        (lambda m: m.python.random(), "forward draws from python"),
        (lambda m: np.random.default_rng().random(), "forward draws from a new generator of NumPy's"),
        (lambda m: np.random.default_rng(None).random(), "forward draws from a new generator of NumPy's"),
    ],
)
def test_draws_outside_torch_are_refused(draw: Callable[[Any], object], said: str) -> None:
    with pytest.raises(CaptureError) as error:
        capture(Drawn(draw), BATCH)
    assert f"{said}. Capture would give every step the same draw: draw with torch" in str(error.value)
    if "_uniform" not in draw.__code__.co_names and "'s random" in said:
        assert "(test_capture.py:" in str(error.value)


def test_draws_after_a_seed_of_forward_s_own_are_constants() -> None:
    model = Drawn(lambda m: (np.random.seed(3), np.random.rand())[1])
    np.random.seed(5)
    assert numpy_loss(model, BATCH) == pytest.approx(model(**BATCH).item(), rel=1e-5, abs=1e-6)
    assert np.random.rand() == np.random.RandomState(3).rand(2)[1]  # draws are what they were again


def test_side_effects_are_refused() -> None:
    class Checked(Small):
        def forward(self, x: Tensor) -> Any:
            inverse, info = torch.linalg.inv_ex(self.inner(x)[:, :2])
            torch.ops.aten._linalg_check_errors(info, "inv", is_matrix=True)
            return inverse.sum()

    with pytest.raises(CaptureError, match=r"aten\._linalg_check_errors\.default has a side effect"):
        capture(Checked(), BATCH)


def test_shapes_that_depend_on_data_and_sparse_tensors_are_refused() -> None:
    class Selected(Small):
        def forward(self, x: Tensor) -> Any:
            return self.inner(x).masked_select(x[:, :3] > 1).sum()

    class Sparse(Small):
        def forward(self, x: Tensor) -> Any:
            return torch.sparse.sum(self.inner(x).to_sparse())

    with pytest.raises(CaptureError, match="gives a tensor whose shape depends on data; choose elements with"):
        capture(Selected(), BATCH)
    with pytest.raises(CaptureError, match=r"gives a tensor of layout torch.sparse_coo; compute with dense ones"):
        capture(Sparse(), BATCH)


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
