"""Functions that `torch.compile` calls without tracing them.

`torch.compiler.disable` imports the compiler, which takes a second. So it is called before the first program is
compiled, and not where a function is defined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., object])
_called: list[list[Callable[..., Any]]] = []
"""What each of these functions calls: itself, and once programs are compiled, itself untraced."""


def untraced(function: _F) -> _F:
    """Return a function, or a method, that `torch.compile` calls as it is after `leave_untraced`."""
    called: list[Callable[..., Any]] = [function]
    _called.append(called)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return called[0](*args, **kwargs)

    return cast("_F", call)


def leave_untraced() -> None:
    """Hide the functions from `torch.compile`, which is about to be called."""
    for called in _called:
        called[0] = torch.compiler.disable(called[0])
    _called.clear()
