"""Hooks that a model has when it is captured; those that no program would call are refused.

Forward hooks run once, in the capture. Values that they return are part of the graph, and so are values that a
library's hooks set or collect (`torch.nn.utils.weight_norm`, the router logits of transformers); anything else they do
happens then and never again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from shardwright.pcg.errors import CaptureError

Hook = Callable[..., Any]
_INSTALLED = {"site-packages", "dist-packages"}
_ON_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_BACKWARD = {"_backward_pre_hooks": "full backward pre-hook", "_backward_hooks": "backward hook"}
_FORWARD = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}


@contextmanager
def captured_hooks(model: nn.Module) -> Generator[None]:
    """Set hooks up for the capture of a model. Raise `CaptureError` if it has hooks that training would not call."""
    with guards_left_out(model), _captured(model):
        yield


def is_guard(hook: Hook) -> bool:
    """Return whether a compiled model has put a hook on a module of its original."""
    return getattr(hook, "of_shardwright", False)


@contextmanager
def guards_left_out(model: nn.Module) -> Generator[None]:
    """Take off, around our forwards, the hooks that a compiled model has put on its original's modules."""
    removed = list[tuple[dict[int, Hook], int, Hook]]()
    for own in (module._forward_pre_hooks for module in model.modules()):
        removed += [(own, key, hook) for key, hook in own.items() if is_guard(hook)]
    for own, key, _ in removed:
        del own[key]
    try:
        yield
    finally:
        for own, key, hook in removed:
            own[key] = hook


@contextmanager
def _captured(model: nn.Module) -> Generator[None]:
    refuse_backward_hooks(model)
    gave: dict[str, bool] = {}  # by hook, whether it has returned a value
    kept: list[tuple[dict[int, Hook], dict[int, Hook]]] = []
    for where, attribute, hooks in _hooks(model):
        if kind := _FORWARD.get(attribute):
            kept.append((hooks, dict(hooks)))
            for key, hook in hooks.items():
                if not _is_librarys(hook):
                    hooks[key] = _reporting(hook, f"{kind} `{_name(hook)}` of {where}", gave)
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update((key, hook) for key, hook in own.items() if key in hooks)
    if silent := next((what for what, any_value in gave.items() if not any_value), ""):
        raise CaptureError(
            f"the {silent} returns nothing, so nothing of it is in the program: it would run once, now, and never "
            "in training; remove it before shardwright captures the model (a hook that returns a value in place of its "
            "module's is captured), and return from the model's forward what is to be seen"
        )


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise a `CaptureError` for hooks on gradients of modules or parameters, which the program would not call."""
    for path, parameter in model.named_parameters():
        for attribute, register in _ON_PARAMETERS.items():
            for hook in (getattr(parameter, attribute) or {}).values():
                raise CaptureError(
                    f"{path} has the hook `{_name(hook)}`, which training would not call, as the program has its own "
                    f"parameters; remove it, and call {register} on the compiled model's parameter of that name"
                )
    for where, attribute, hooks in _hooks(model):
        for hook in hooks.values() if attribute in _BACKWARD else ():
            raise CaptureError(
                f"the {_BACKWARD[attribute]} `{_name(hook)}` of {where} would not be called in training, as the "
                "program does not run module by module; remove it, or put it on the compiled model's parameters"
            )


def _hooks(model: nn.Module) -> Iterator[tuple[str, str, dict[int, Hook]]]:
    """Yield where hooks are registered, under which attribute, and the hooks."""
    for path, module in model.named_modules():
        for attribute in (*_FORWARD, *_BACKWARD):
            yield _where(path, model), attribute, getattr(module, attribute)
    for attribute, hooks in hooks_of_all().items():
        yield "all modules", attribute, hooks


def hooks_of_all() -> dict[str, dict[int, Hook]]:
    """Return the hooks that torch calls for every module of the process, by their attribute in a module."""
    return {attribute: vars(nn.modules.module)[f"_global{attribute}"] for attribute in (*_FORWARD, *_BACKWARD)}


def _reporting(hook: Hook, what: str, gave: dict[str, bool]) -> Hook:
    """Return the hook so wrapped that `gave` notes whether it returns a value."""

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        result = hook(*args, **kwargs)
        gave[what] = gave.get(what, False) or result is not None
        return result

    return call


def _is_librarys(hook: Hook) -> bool:
    function = getattr(hook, "func", hook)  # of a functools.partial
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is not None and not _INSTALLED.isdisjoint(Path(code.co_filename).parts)


def _name(hook: object) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


def _where(path: str, model: nn.Module) -> str:
    return repr(path) if path else type(model).__name__
