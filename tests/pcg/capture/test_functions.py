"""Functions of torch as foreign parts: found where they fail, named by the user, refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import get_overridable_functions, resolve_name

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.capture.functions import function_named
from shardwright.pcg.errors import CaptureError, PlanError
from shardwright.pcg.foreign import Call, calls
from tests.each import each
from tests.foreign import ROWS, WIDTH, Calling, Net, alignment


def found(function: Callable[[Tensor], Any], **options: Any) -> tuple[Call, ...]:
    torch.manual_seed(0)
    return calls(capture(Calling(function), {"x": torch.randn(ROWS, WIDTH)}, **options).graph)


def spread(y: Tensor) -> Tensor:
    return functional.gaussian_nll_loss(y, y.detach().roll(1, 0), y.square() + 1, reduction="none")


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.functional.ctc_loss": alignment,
    "torch.nn.functional.gaussian_nll_loss": spread,
    "torch.corrcoef": torch.corrcoef,
    "torch.Tensor.cov": lambda y: y.cov(),
    "torch.linalg.lstsq": lambda y: torch.linalg.lstsq(y, y.roll(1, 0)).solution,
}


@each("name", FUNCTIONS)
def test_a_function_is_found_alone(name: str) -> None:
    function = FUNCTIONS[name]
    with pytest.raises(CaptureError):
        found(function)
    (call,) = found(function, find=True)
    assert (call.name, call.state, call.draws) == (name, (), False)
    assert call.why
    (named,) = found(function, foreign={name: "whole"})
    assert (named.name, named.why, named.results, named.inputs) == (name, "", call.results, call.inputs)
    with pytest.raises(CaptureError):
        found(function, strict=True)


def test_why_names_the_line_of_the_model() -> None:
    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.corrcoef(x)

    (call,) = calls(capture(Net(Spread()), {"x": torch.randn(ROWS, ROWS)[:, :WIDTH]}, find=True).graph)
    assert call.name == "torch.corrcoef"
    assert call.why.startswith("test_functions.py:")


def test_every_call_of_a_function_is_one_of_its_name() -> None:
    one, two = found(lambda y: torch.corrcoef(y) + torch.corrcoef(y.tanh()), find=True)
    assert (one.name, one.number, two.name, two.number) == ("torch.corrcoef", 0, "torch.corrcoef", 1)


def test_another_name_of_a_function() -> None:
    (call,) = found(
        lambda y: y * torch.cosine_similarity(y, y * y)[:, None], foreign={"torch.cosine_similarity": "whole"}
    )
    assert call.name == "torch.nn.functional.cosine_similarity"


def test_a_function_along_the_batch() -> None:
    (call,) = found(spread, foreign={"torch.nn.functional.gaussian_nll_loss": "batch"})
    assert call.batched == (0, 1, 2)
    with pytest.raises(CaptureError, match=r"torch\.corrcoef cannot run along the batch"):
        found(torch.corrcoef, foreign={"torch.corrcoef": "batch"})


REFUSED = {
    "torch.Tensor.backward": "it differentiates",
    "torch.autograd.backward": "it differentiates",
    "torch.autograd.grad": "it differentiates",
    "torch.func.grad": "it differentiates",
    "torch.Tensor.register_hook": "it differentiates",
    "torch.Tensor.retain_grad": "it differentiates",
    "torch.Tensor.add_": "it changes a tensor in place",
    "torch.relu_": "it changes a tensor in place",
    "torch.nn.init.uniform_": "it changes a tensor in place",
    "torch.Tensor.__setitem__": "it is an operator of Python",
    "torch.Tensor.__getitem__": "it is an operator of Python",
    "torch.distributed.all_reduce": "it is a collective",
    "torch.save": "torch hands no call of it to modes",
    "torch.load": "torch hands no call of it to modes",
    "torch.rand": "torch hands no call of it to modes",
    "torch.manual_seed": "torch hands no call of it to modes",
}
"""Functions that no call in a graph may be, and why."""


@each("name", REFUSED)
def test_functions_with_effects_are_refused_by_name(name: str) -> None:
    with pytest.raises(
        PlanError, match=f"foreign: {name} cannot be foreign: {REFUSED[name]}.*; put the line, with all"
    ):
        found(torch.corrcoef, foreign={name: "whole"})


def test_what_is_no_function() -> None:
    for name in ("torch", "torch.Tensor", "torch.float32", "torch.nn.functional.none", "json.dumps", "torch.nn.Linear"):
        assert function_named(name) is None, name


def test_every_function_is_known_by_the_name_that_torch_has_for_it() -> None:
    """A plan has that name, and a program looks the function up by it."""
    named = {resolve_name(f): f for own in get_overridable_functions().values() for f in own}
    refused = dict[str, str]()
    for name, function in named.items():
        try:
            known = function_named(name or "")
        except PlanError as error:
            refused[str(name)] = str(error)
        else:
            assert known is None or known == (name, function), name
    assert not [name for name in refused if name.startswith("torch.functional.")]
    assert {name.rpartition(".")[2] for name, told in refused.items() if "it differentiates" in told} == {
        "backward",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
    }


EFFECTS: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "out": (
        "torch.mul", lambda y: torch.mul(y.detach(), 2, out=torch.empty(ROWS, WIDTH)), "that is given as out=",
    ),
    "in place": ("torch.nn.functional.relu", lambda y: functional.relu(y + 1, inplace=True), "it returns memory"),
    "draws": ("torch.nn.functional.dropout", functional.dropout, "it draws random numbers; put the line, with all"),
    "draws by number": ("torch.bernoulli", lambda y: y * torch.bernoulli(y.detach().abs()), "it draws random numbers"),
    "no tensor": ("torch.is_nonzero", lambda y: y * torch.is_nonzero(y[0, 0]), "it returns a bool"),
    "a view": ("torch.Tensor.view", lambda y: y.view(-1), "it returns memory that it is given"),
    "statistics": (
        "torch.nn.functional.batch_norm",
        lambda y: functional.batch_norm(y, torch.zeros(WIDTH), torch.ones(WIDTH), training=True),
        "writes into a tensor that it is given",
    ),
}  # fmt: skip


@each("name", EFFECTS)
def test_effects_of_a_call_are_refused(name: str) -> None:
    function, model, told = EFFECTS[name]
    with pytest.raises(CaptureError, match=f"{function} cannot be foreign: .*{told}"):
        found(model, foreign={function: "whole"})


class Widened(nn.Module):
    """A width that values decide."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, int((x[:, 0] > 9).sum())))[:, :WIDTH]


class Floored(nn.Module):
    """A floor that values decide, which a function is given as a number."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gaussian_nll_loss(x, x.roll(1, 0), x.square(), reduction="none", eps=x.abs().mean().item())


def test_a_number_that_values_decide_is_never_baked_in() -> None:
    for part in (Widened(), Floored()):
        (call,) = calls(capture(Net(part), {"x": torch.randn(ROWS, WIDTH)}, find=True).graph)
        assert call.name == "part", part


def test_the_model_itself_gets_the_hint() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() if x.sum() > 0 else x.mean()

    with pytest.raises(
        CaptureError,
        match=r"Or put the line, with all that it decides, into an nn\.Module of its own, which runs as it is",
    ):
        capture(Branch(), {"x": torch.ones(2)}, find=True)
    with pytest.raises(CaptureError, match=r"use torch\.where") as raised:
        capture(Branch(), {"x": torch.ones(2)})
    assert "nn.Module of its own" not in str(raised.value)


class Dropping(nn.Module):
    """Layers that are left out at random, as Python draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x if random.random() < 0.5 else layer(x)
        return x.square().mean()


def test_layers_left_out_at_random() -> None:
    """The model itself is never foreign; a module with the loop in it is."""
    batch = {"x": torch.randn(ROWS, WIDTH)}
    with pytest.raises(
        CaptureError, match=r"draws from Python's random.*Or put the line, with all that it decides, into"
    ):
        capture(Dropping(), batch, find=True)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Dropping()

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) + 0.0

    (call,) = calls(capture(Around(), batch, find=True).graph)
    assert call.name == "part"
