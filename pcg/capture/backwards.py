"""Backwards other than those of a forward's operators: they are refused by name.

`torch.export` records operators, and a program differentiates them. Anything else that decides gradients would be lost:
an `autograd.Function`, a hook on a tensor or in autograd's graph, tensors that are saved in another form, derivatives
that forward itself takes. An `autograd.Function` is detected by the node that its call leaves in autograd's graph,
whatever alias of its `apply` is called; the others are functions of torch that are replaced while forward runs.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch.autograd import graph as autograd_graph
from torch.autograd.forward_ad import dual_level
from torch.utils.checkpoint import CheckpointFunction

from shardwright.pcg.capture.exporting import own_id, site_of
from shardwright.pcg.capture.unseen import Site, UnseenError

_FUNCTION = torch._C._FunctionBase
_OPERATORS = ("torch._library.", "torch._higher_order_ops.")
"""The modules of torch whose Functions are backwards of operators."""
_REMEDY = (
    "write it in differentiable operators (x + (f(x) - x).detach() passes gradients straight through), or make it an "
    "operator with torch.library.custom_op and register_autograd"
)


def _lost(what: str, remedy: str = _REMEDY, site: Site | None = None, function: str = "") -> UnseenError:
    return UnseenError(what, f"Capture would lose it: {remedy}", site, function)


class Ungraded:
    """The places where operators ran without gradients, as in an `autograd.Function`, by the next number of a node."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {own_id(module) for module in model.modules()}
        self._sites: dict[int, Site | None] = {}

    def note(self) -> None:
        """Note that an operator is called now; of several since the last node, the first one counts."""
        number = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
        if number not in self._sites:
            self._sites[number] = site_of(traceback.walk_stack(sys._getframe(1)), self._modules)

    def site_of(self, node: Any) -> Site | None:  # noqa: ANN401
        """Return the place where a Function was called, or None if it called no operators."""
        return self._sites.get(node._sequence_nr() + 1)


def grad_fn(x: Tensor) -> Any:  # noqa: ANN401
    """Return the node of autograd's graph that gave x, even if the attribute is replaced."""
    with torch._C.DisableTorchFunction():
        return vars(torch._C.TensorBase)["grad_fn"].__get__(x)


def refuse_foreign(node: object, ungraded: Ungraded | None = None) -> None:
    """Raise an `UnseenError` if a node of autograd's graph is that of an `autograd.Function`.

    `ungraded` has its call.
    """
    if not isinstance(node, _FUNCTION):
        return
    function = getattr(node, "_forward_cls", type(node))
    module, name = function.__module__, function.__qualname__.replace(".<locals>", "")
    if function.__name__ == "BackwardHookFunction":
        raise _backward_hook()
    if not module.startswith(_OPERATORS):
        site = ungraded.site_of(node) if ungraded is not None else None
        what = f"{name} is an autograd.Function with a backward of its own (in {module})"
        raise _lost(what, site=site, function=f"{module}.{function.__qualname__}")


def _backward_hook() -> UnseenError:
    return _lost("forward registers a backward hook on a module", "put it on the compiled model's parameters")


@contextmanager
def backwards_refused(model: nn.Module) -> Generator[None]:
    """Raise an `UnseenError` if the forward inside gives autograd more to do than to differentiate its operators."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(CheckpointFunction, "apply", _computed_once))
        for owner, name, refusal in _doors():
            stack.enter_context(mock.patch.object(owner, name, _refusing(refusal)))
        for owner, name, replaced in _doors_of_users():
            stack.enter_context(mock.patch.object(owner, name, replaced))
        yield
    for name, p in model.named_parameters():
        if p.requires_grad != before.get(name, p.requires_grad):
            raise _lost(
                f"forward leaves {name} {'frozen' if before[name] else 'with a gradient'}, which it was not",
                "set requires_grad before shardwright captures the model, or back before forward returns",
            )


def _computed_once(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> object:
    """Return the result of reentrant checkpointing; it has no gradient if no argument has one.

    Torch runs it without gradients, and enables them later, where no export sees it.
    """
    has_gradient = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    with nullcontext() if has_gradient else torch.no_grad():
        return run(*args)


def _refusing(refusal: UnseenError) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> object:
        raise refusal

    return refuse


def _doors() -> Iterator[tuple[object, str, UnseenError]]:
    """Yield functions of torch that forward may not reach, under any name."""
    hook = _lost("a hook is registered on the gradient of a tensor")
    own = "compute the derivative with operators (it is then differentiated as well), or outside of the model"
    yield Tensor, "register_hook", hook
    yield Tensor, "register_post_accumulate_grad_hook", hook
    yield Tensor, "retain_grad", _lost("forward keeps the gradient of a tensor (retain_grad)", "drop the call")
    for name in ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"):
        yield nn.Module, name, _backward_hook()
    taken = _lost("forward computes gradients itself (backward, torch.autograd.grad)", own)
    yield torch.autograd, "_engine_run_backward", taken
    functional = _lost("forward computes derivatives itself (grad, vjp, jacrev, hessian of torch.func)", own)
    yield eager_transforms, "grad_increment_nesting", functional
    forwards = _lost("forward computes derivatives itself (jvp, jacfwd of torch.func, torch.autograd.forward_ad)", own)
    yield eager_transforms, "jvp_increment_nesting", forwards
    yield dual_level, "__enter__", forwards


def _doors_of_users() -> Iterator[tuple[object, str, object]]:
    """Yield functions that forward may not use, although torch itself may."""
    enter = autograd_graph.saved_tensors_hooks.__enter__

    def entered(hooks: autograd_graph.saved_tensors_hooks) -> None:
        kind = type(hooks)
        if kind is autograd_graph.saved_tensors_hooks or not kind.__module__.startswith("torch."):
            raise _lost(
                "forward changes how tensors are saved for backward (torch.autograd.graph.saved_tensors_hooks)",
                "drop it; which activations are computed again or moved to the host, the plan says",
            )
        enter(hooks)

    edge = autograd_graph.get_gradient_edge

    def get_gradient_edge(tensor: Tensor) -> object:
        true_edge = edge(tensor)
        return true_edge._replace(node=_Node(true_edge.node))

    def looked_at(tensor: Tensor) -> object:
        node = grad_fn(tensor)
        librarys = sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        return node if node is None or librarys else _Node(node)

    yield autograd_graph.saved_tensors_hooks, "__enter__", entered
    yield autograd_graph, "get_gradient_edge", get_gradient_edge
    yield Tensor, "grad_fn", property(looked_at)


class _Node:
    """A node of autograd's graph that may be looked at but not changed."""

    def __init__(self, node: Any) -> None:  # noqa: ANN401
        self._node = node

    def __getattr__(self, name: str) -> object:
        if name in ("register_hook", "register_prehook"):
            raise _lost("a hook is registered on a node of autograd's graph (grad_fn)")
        return getattr(self._node, name)

    @property
    def next_functions(self) -> tuple[tuple[object, int], ...]:
        return tuple((None if node is None else _Node(node), i) for node, i in self._node.next_functions)


def check_backward(loss: object, ungraded: Ungraded | None = None, *, written: bool = False) -> None:
    """Raise an `UnseenError` if a loss has a backward other than its operators', or reads overwritten values.

    `written`: whether there were writes in place.
    """
    for node in _nodes(grad_fn(loss) if isinstance(loss, Tensor) else None):
        refuse_foreign(node, ungraded)
        if written:
            _refuse_overwritten(node)


def _nodes(root: Any) -> Iterator[Any]:  # noqa: ANN401
    pending, seen = [root] if root is not None else [], {root}
    while pending:
        node = pending.pop()
        yield node
        following = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(following)
        pending += following


def _refuse_overwritten(node: object) -> None:
    """Raise if a value that a node saved was overwritten; torch reports that when the value is read."""
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                getattr(node, name)
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):
                    raise UnseenError(
                        f"{type(node).__name__.removesuffix('0')} reads a value that forward overwrites in place",
                        "Its gradient would be another one (eager training fails, but for writes through .data): clone "
                        "the value before it is written, or write out of place",
                    ) from None
