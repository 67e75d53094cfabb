"""What decides gradients and is no operator's backward is refused by name, through whatever door."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad, grad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from shardwright.pcg.capture.capture import capture
from shardwright.pcg.errors import CaptureError
from tests.each import each


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


class Set(Function):
    """In the style of functorch."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -grads[0]


class Overriding(Reversed):
    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super().apply(*args)


reverse = Reversed.apply
aliased_checkpoint = CheckpointFunction.apply


class Net(nn.Module):
    def __init__(self, form: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.form = form
        self.below, self.above = nn.Linear(3, 3), nn.Linear(3, 3)
        self.kept = reverse

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self, x).sum()


def refusal(form: Callable[[Net, Tensor], Tensor]) -> str:
    with pytest.raises(CaptureError) as error:
        capture(Net(form), {"x": torch.ones(2, 3)})
    return str(error.value)


def applied(apply: Callable[..., Any]) -> Callable[[Net, Tensor], Tensor]:
    return lambda net, x: net.above(apply(net.below(x)))


def in_checkpoint(reentrant: bool) -> Callable[[Net, Tensor], Tensor]:
    return lambda net, x: checkpoint(lambda h: net.above(reverse(h)), net.below(x), use_reentrant=reentrant)


FUNCTIONS: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "of the class": (applied(Reversed.apply), "Reversed"),
    "bound before": (applied(reverse), "Reversed"),
    "partial": (applied(partial(reverse)), "Reversed"),
    "on the module": (lambda net, x: net.above(net.kept(net.below(x))), "Reversed"),
    "set up apart": (applied(Set.apply), "Set"),
    "with an apply of its own": (applied(Overriding.apply), "Overriding"),
    "last": (lambda net, x: reverse(net.below(x).sum()), "Reversed"),
    "of a parameter": (lambda net, x: F.linear(x, reverse(net.below.weight)), "Reversed"),
    "in a checkpoint": (in_checkpoint(False), "Reversed"),
    "in a reentrant checkpoint": (in_checkpoint(True), "Reversed"),
    "torch's": (lambda net, x: nn.CrossMapLRN2d(2)(net.below(x)[None, :, :, None]), "CrossMapLRN2d"),
    "torch's checkpoint": (
        lambda net, x: cast(Tensor, aliased_checkpoint(net.above, True, net.below(x))), "CheckpointFunction",
    ),
}  # fmt: skip


@each("door", FUNCTIONS)
def test_functions_with_a_backward_of_their_own_are_refused(door: str) -> None:
    form, name = FUNCTIONS[door]
    message = refusal(form)
    module = "above" if name == "CheckpointFunction" else "Net"  # where it is called, not what reads its result
    line = Net.forward.__code__.co_firstlineno + 1
    assert message.startswith(f"Net could not be captured: in module {module!r} (test_backwards.py:{line}): ")
    assert f"{name} is an autograd.Function with a backward of its own (in " in message
    assert "Capture would lose it: write it in differentiable operators" in message


class Split(nn.Module):
    """Two functions of its own in one module, of which another one reads what the second one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.reads = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            start = reverse(self.inner(x))
        h = self.inner(x + start)
        h = reverse(h)
        return self.reads(h).sum()


def test_where_a_function_is_called() -> None:
    with pytest.raises(CaptureError) as error:
        capture(Split(), {"x": torch.ones(2, 3)})
    line = Split.forward.__code__.co_firstlineno + 4
    assert str(error.value).startswith(f"Split could not be captured: in module 'Split' (test_backwards.py:{line})")


def test_a_function_through_which_no_gradient_goes_is_captured() -> None:
    def form(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = reverse(net.below(x))
        return net.above(x) * y * reverse(net.below(x)).detach()

    capture(Net(form), {"x": torch.ones(2, 3)})


# ---- hooks and derivatives ----


def hooked(net: Net, x: Tensor, where: Callable[[Tensor], Any], register: str = "register_hook") -> Tensor:
    h = net.below(x)
    getattr(where(h), register)(lambda *_: None)
    return h


def on_module(register: str) -> Callable[[Net, Tensor], Tensor]:
    def form(net: Net, x: Tensor) -> Tensor:
        getattr(net.below, register)(lambda *_: None)
        return net.below(x)

    return form


def of_all_modules(net: Net, x: Tensor) -> Tensor:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        return net.above(net.below(x))
    finally:
        handle.remove()


def saved_otherwise(net: Net, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return net.below(x).sin()


def penalty(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return grad(net.below(x).sin().sum(), x, create_graph=True)[0]


def attacked(net: Net, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    net.below(x).sum().backward(inputs=[x])
    return net.below(x + 1)


def dual(net: Net, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return net.below(forward_ad.make_dual(x, x))


def summed(net: Net) -> Callable[[Tensor], Tensor]:
    return lambda y: net.below(y).sin().sum()


def left_frozen(net: Net, x: Tensor) -> Tensor:
    net.below.requires_grad_(False)
    return net.above(net.below(x))


HOOK, NODE = "a hook is registered on the gradient of a tensor", "a hook is registered on a node of autograd's graph"
MODULE = "forward registers a backward hook on a module. Capture would lose it: put it on the compiled model's param"
OWN = r"forward computes gradients itself \(backward, torch.autograd.grad\). Capture would lose it: compute the deriv"
FUNC, FORWARDS = r"itself \(grad, vjp, jacrev, hessian of torch.func\)", r"itself \(jvp, jacfwd of torch.func, "

OTHERS: dict[str, tuple[Callable[[Net, Tensor], Any], str]] = {
    "tensor": (lambda net, x: hooked(net, x, lambda h: h), HOOK),
    "several tensors": (
        lambda net, x: (torch.autograd.graph.register_multi_grad_hook([h := net.below(x)], print), h)[1], HOOK,
    ),
    "accumulated": (
        lambda net, x: hooked(net, x, lambda _: net.below.weight, "register_post_accumulate_grad_hook"), HOOK,
    ),
    "node": (lambda net, x: hooked(net, x, lambda h: h.grad_fn), NODE),
    "before a node": (lambda net, x: hooked(net, x, lambda h: h.grad_fn, "register_prehook"), NODE),
    "next node": (lambda net, x: hooked(net, x, lambda h: cast(Any, h.grad_fn).next_functions[0][0]), NODE),
    "edge": (lambda net, x: hooked(net, x, lambda h: torch.autograd.graph.get_gradient_edge(h).node), NODE),
    "kept gradient": (lambda net, x: (h := net.below(x), h.retain_grad())[0], r"\(retain_grad\). .*: drop the call"),
    "module": (on_module("register_full_backward_hook"), MODULE),
    "before a module": (on_module("register_full_backward_pre_hook"), MODULE),
    "old hook of a module": (on_module("register_backward_hook"), MODULE),
    "all modules": (of_all_modules, MODULE),
    "saved tensors": (saved_otherwise, "forward changes how tensors are saved for backward .*the plan says"),
    "penalty": (penalty, OWN),
    "backward": (attacked, OWN),
    "autograd.functional": (lambda net, x: torch.autograd.functional.vjp(summed(net), x)[1], OWN),
    "grad": (lambda net, x: torch.func.grad(summed(net))(x), FUNC),
    "vjp": (lambda net, x: torch.func.vjp(net.below, x)[1](x)[0], FUNC),
    "jacrev": (lambda net, x: torch.func.jacrev(summed(net))(x), FUNC),
    "hessian": (lambda net, x: torch.func.hessian(summed(net))(x), FORWARDS),
    "jvp": (lambda net, x: torch.func.jvp(net.below, (x,), (x,))[1], FORWARDS),
    "forward mode": (dual, FORWARDS),
    "frozen": (left_frozen, "forward leaves below.weight frozen, which it was not. .*or back before forward returns"),
}  # fmt: skip


@each("door", OTHERS)
def test_what_else_decides_gradients_is_refused(door: str) -> None:
    form, message = OTHERS[door]
    with pytest.raises(CaptureError, match=rf"^Net could not be captured: in module .*UnseenError: .*{message}"):
        capture(Net(form), {"x": torch.ones(2, 3)})


def test_a_parameter_that_forward_thaws_is_refused() -> None:
    model = Net(lambda net, x: net.below.requires_grad_(True)(x))
    model.below.requires_grad_(False)
    with pytest.raises(CaptureError, match=r"forward leaves below.weight with a gradient, which it was not"):
        capture(model, {"x": torch.ones(2, 3)})


def test_autograds_graph_may_be_looked_at() -> None:
    def form(net: Net, x: Tensor) -> Tensor:
        h = net.below(x)
        assert h.grad_fn is not None
        assert "AddmmBackward0" in h.grad_fn.name()
        return h if x.grad_fn is None else h * 2

    capture(Net(form), {"x": torch.ones(2, 3)})
