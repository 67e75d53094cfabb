"""Gradients of captured programs are autograd's: writes in place, and what forward does to autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.pcg.capture.capture import Captured, capture
from shardwright.pcg.errors import CaptureError
from tests.each import each
from tests.pcg.run_torch import run_torch

Form = Callable[[Any, Tensor], Tensor]
"""What is done with a layer and its input; the loss is the sum of the results, squared."""


def batch() -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 36, dtype=torch.float64).sin().reshape(6, 6)}


class Forms(nn.Module):
    """Every form with a layer of its own, so that one capture shows all gradients."""

    def __init__(self, *forms: Form) -> None:
        super().__init__()
        self.forms = forms
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in forms)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([f(layer, x).square().sum() for f, layer in zip(self.forms, self.layers, strict=True)]).sum()


def write(change: Callable[[Tensor], object]) -> Form:
    """A write that gradients pass by, with the old value read before and the new one after it."""

    def form(layer: nn.Linear, x: Tensor) -> Tensor:
        h = layer(x)
        before = h * 3
        with torch.no_grad():
            change(h)
        return before + (h + 1).sin()

    return form


def through(alias: Callable[[Tensor], Tensor]) -> Form:
    """A write through what shares a value's memory, and not its gradient."""

    def form(layer: nn.Linear, x: Tensor) -> Tensor:
        h = layer(x)
        alias(h)[1:, :4].mul_(2).add_(1)
        return (h + 1).sin()

    return form


def detached_and_written(layer: nn.Linear, x: Tensor) -> Tensor:
    h = layer(x)
    h.detach_()
    h[:, 1:3].add_(layer(2 * x)[:, 1:3])
    return h


def frozen(layer: nn.Linear, x: Tensor) -> Tensor:
    layer.requires_grad_(False)
    y = layer(x)
    layer.requires_grad_(True)
    layer.bias.requires_grad = False
    z = layer(3 * x)
    layer.bias.requires_grad = True
    return (y + z).sin() * layer(2 * x)


def in_inference_mode(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = layer(x).mean()
        with torch.inference_mode(False):
            x = layer(x)
    return layer(x) * scale.clone()


def between_calls(layer: nn.Linear, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    y = layer(x)
    torch._C._set_grad_enabled(True)
    return y * layer(2 * x)


def view_without_gradient(layer: nn.Linear, x: Tensor) -> Tensor:
    h = layer(x)
    with torch.no_grad():
        view = h[:, :3]
    return view * layer(2 * x)[:, :3] + h[:, 3:]


def written_through_its_view(layer: nn.Linear, x: Tensor) -> Tensor:
    h = layer(x)
    view = h.t()[:3]
    with torch.no_grad():
        view.mul_(2)
        h[0].zero_()
    return view.t() + h[:, 3:].sin()


def leaf_of_its_own(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x).detach().requires_grad_() * layer(2 * x)


def written_without_gradient_first(layer: nn.Linear, x: Tensor) -> Tensor:
    found = torch.zeros(6, 6, dtype=x.dtype)
    alias = found.detach()
    alias[:3] = layer(x)[:3]
    with torch.no_grad():
        found[3:] = layer(x)[3:]
    return alias * layer(2 * x)


def batched(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: layer(row).detach() * layer(2 * row))(x)


def wide_diagonal(layer: nn.Linear, x: Tensor) -> Tensor:
    h = layer(x)[:, :2] * 1
    return h.fill_diagonal_(0.5, wrap=True)


def cubes_diagonal(layer: nn.Linear, x: Tensor) -> Tensor:
    h = (layer(x)[:2, :4] * 1).reshape(2, 2, 2)
    return h.fill_diagonal_(0.5)


FORMS: dict[str, Form] = {
    "clamp_": write(lambda h: h.clamp_(-0.3, 0.3)),
    "mul_ of itself": write(lambda h: h.mul_(h.mean())),
    "masked_fill_": write(lambda h: h.masked_fill_(h > 0, float("-inf")).clamp_(min=-4)),
    "slice": write(lambda h: h[:, :4].zero_()),
    "item": write(lambda h: h.__setitem__((slice(None), slice(1, 4)), -0.0)),
    "mask": write(lambda h: h.__setitem__(h > 0.1, 2.0)),
    "rounding": write(lambda h: h.copy_((h * 4).round() / 4)),
    "view": write(lambda h: h.view(-1)[:7].fill_(0.25)),
    "transpose": write(lambda h: h.t()[1].add_(1)),
    "out=": write(lambda h: torch.mul(h, 3, out=h)),
    "list": write(lambda h: torch.ops.aten._foreach_mul_([h], 2.0)),
    "index_fill_": write(lambda h: h.index_fill_(0, torch.tensor([1, 3]), 0.5)),
    "diagonal": write(lambda h: h.fill_diagonal_(0)),
    "detach": through(lambda h: h.detach()),
    "data": through(lambda h: h.data),
    "part, detached": through(lambda h: h[:5].detach()),
    "detach_": detached_and_written,
    "frozen": frozen,
    "inference mode": in_inference_mode,
    "set_grad_enabled": between_calls,
    "view under no_grad": view_without_gradient,
    "views": written_through_its_view,
    "leaf": leaf_of_its_own,
    "fresh memory": written_without_gradient_first,
    "data of a parameter": lambda layer, x: x @ layer.weight.data * layer(x),
    "vmap": batched,
    "saved on the host": lambda layer, x: _on_host(layer(x)),
    "fill_diagonal_": lambda layer, x: (layer(x) * 1).fill_diagonal_(0),
    "fill_diagonal_ of blocks": wide_diagonal,
    "fill_diagonal_ of a cube": cubes_diagonal,
}  # fmt: skip


def _on_host(h: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return h.sin()


Gradients = dict[str, tuple[Tensor, ...]]


@pytest.fixture(scope="module")
def gradients() -> tuple[Gradients, Gradients]:
    """By form, the gradients of its layer: eager training's, and the captured program's."""
    torch.manual_seed(0)
    model = Forms(*FORMS.values())
    captured, given = capture(model, batch()), batch()
    return of_forms(model, model(**given)), of_forms(model, captured_loss(model, captured, given))


def captured_loss(model: nn.Module, captured: Captured, given: dict[str, Tensor]) -> Tensor:
    values = {**dict(model.named_parameters()), **captured.constants, **given}
    leaves = {n.name: values[str(n.attr("target"))].clone() for n in captured.graph.nodes if n.is_leaf}
    return run_torch(captured.graph, leaves)[dict(captured.graph.outputs)["loss"]]


def of_forms(model: Forms, loss: Tensor) -> Gradients:
    found = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return {"loss": (loss,)} | {form: found[2 * i : 2 * i + 2] for i, form in enumerate(FORMS)}


@each("form", ["loss", *FORMS])
def test_gradients_are_autograds(form: str, gradients: tuple[Gradients, Gradients]) -> None:
    for eager, program in zip(*(of[form] for of in gradients), strict=True):
        torch.testing.assert_close(program, eager, rtol=1e-12, atol=1e-12)


def test_a_value_written_without_gradient_is_bitwise_what_was_written() -> None:
    def form(layer: nn.Linear, x: Tensor) -> Tensor:
        h = layer(x)
        with torch.no_grad():
            h.copy_(torch.tensor([0.1, -0.0, 1e-310, float("inf"), -1e300, 0.3], dtype=x.dtype))
            h.copy_(h.clamp(max=7.1))
        return h.reciprocal().clamp(-9, 9)

    torch.manual_seed(0)
    model, given = Forms(form), batch()
    assert torch.equal(captured_loss(model, capture(model, given), given), model(**given))


# ---- refused ----


def saved_and_written(layer: nn.Linear, x: Tensor, alias: Callable[[Tensor], Tensor]) -> Tensor:
    h = layer(x)
    y = h * h
    alias(h).mul_(2)
    return y + h


def two_gradients(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    y.detach().add_(layer(2 * x))
    return y


def written_in_vmap(layer: nn.Linear, x: Tensor) -> Tensor:
    def row(x: Tensor) -> Tensor:
        y = layer(x)
        y.detach().mul_(2)
        return y

    return torch.vmap(row)(x)


REFUSED: dict[str, tuple[Form, str]] = {
    "overwritten": (lambda layer, x: layer(x).exp().mul_(2), "ExpBackward reads a value that forward overwrites"),
    "overwritten through detach": (lambda layer, x: saved_and_written(layer, x, Tensor.detach), "MulBackward reads a"),
    "overwritten through data": (lambda layer, x: saved_and_written(layer, x, lambda h: h.data), "eager training"),
    "two gradients": (two_gradients, r"add_ writes what has a gradient through detach\(\) or .data, .*: write"),
    "vmap": (written_in_vmap, "mul_ writes in place, without a gradient, inside torch.vmap. Capture would"),
    "max_norm": (
        lambda layer, x: nn.functional.embedding(torch.tensor([0, 2]), layer.weight, max_norm=0.5),
        r"max_norm\). Parameters change in the optimizer's step alone: scale the rows",
    ),
    "view from elsewhere": (lambda layer, x: _no_grad_view(layer(x)).mul_(2), "A view was created in no_grad mode"),
}  # fmt: skip


@torch.no_grad()
def _no_grad_view(h: Tensor) -> Tensor:
    return h[:, :3]


@each("name", REFUSED)
def test_writes_that_no_program_has_are_refused(name: str) -> None:
    form, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message) as error:
        capture(Forms(form), batch())
    assert "Forms could not be captured: in module " in str(error.value)


def test_where_a_write_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"in module 'Forms' \(test_autograd\.py:\d+\): UnseenError: add_"):
        capture(Forms(two_gradients), batch())


def test_what_was_replaced_is_put_back() -> None:
    def failing(layer: nn.Linear, x: Tensor) -> Any:
        raise ValueError("x")

    def replaced() -> tuple[object, ...]:
        return torch._C._set_grad_enabled, torch.inference_mode.__enter__, Tensor.grad_fn, Tensor.register_hook

    before = replaced()
    with pytest.raises(CaptureError, match="ValueError: x"):
        capture(Forms(failing), batch())
    assert replaced() == before
