"""Functions of torch as foreign parts: which may be, how their calls are taken, and which one fails in a capture.

Torch hands each call of its public functions to a mode (`torch.overrides`), under whatever name a model has them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, get_ignored_functions, resolve_name

from shardwright.pcg.capture.exporting import is_library
from shardwright.pcg.errors import PlanError

_HERE = str(Path(__file__).parent)
_DIFFERENTIATES = frozenset({"backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
REMEDY = "put the line, with all that it decides, into an nn.Module of its own, which runs as it is"


def function_named(name: str) -> tuple[str, Callable[..., Any]] | None:
    """Return the function of torch of this name, with the name that torch has for it; None if there is none.

    Raises `PlanError` for a function that cannot be foreign: it has effects, or torch hands no call of it on.
    """
    first, *path = name.split(".")
    try:
        function = reduce(getattr, path, torch) if first == "torch" else None
    except AttributeError:
        function = None
    if not callable(function) or isinstance(function, type):
        return None
    if why := _unfit(name, function):
        raise PlanError(f"foreign: {name} cannot be foreign: {why}; {REMEDY}")
    return resolve_name(function) or name, function


def _unfit(name: str, function: Callable[..., Any]) -> str:
    """Return why the calls of a function cannot stand in a graph, or ""."""
    (_, *folders, last) = name.split(".")
    if folders[:1] in (["autograd"], ["func"]) or last in _DIFFERENTIATES:
        return "it differentiates, and the gradients that it leaves are no results"
    if folders[:1] == ["distributed"]:
        return "it is a collective, and a foreign part runs as in one process"
    if last.startswith("_"):
        return "it is an operator of Python or private, and all calls of a function become foreign"
    if last.endswith("_"):
        return "it changes a tensor in place, and a graph has values alone"
    if function in get_ignored_functions() or resolve_name(function) is None:
        return "torch hands no call of it to modes (torch.overrides), so that capture does not see it"
    return ""


class CallsTaken(TorchFunctionMode):
    """Let a taker have the calls of a function of torch: it gets the function, the arguments, and those by name."""

    def __init__(self, takers: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._takers = takers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        taker = self._takers.get(func)
        return func(*args, **(kwargs or {})) if taker is None else taker(func, args, kwargs or {})


def failing_function(error: BaseException | None) -> str:
    """Return the name of the function of torch, called by a model, in which an error was raised; "" if there is none.

    A mode of torch's own is active in an export, so that each such call has a frame of it.
    """
    name = ""
    for frame, _ in traceback.walk_tb(error.__traceback__ if error else None):
        path = frame.f_code.co_filename
        if frame.f_code.co_name == "__torch_function__" and "func" in frame.f_locals:
            name = name or resolve_name(frame.f_locals["func"]) or ""
        elif not is_library(path) and not path.startswith(_HERE):
            name = ""  # the model's own code again, which the function has called
    return name
