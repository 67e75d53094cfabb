"""Functions that `torch.compile` calls without tracing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

_F = TypeVar("_F", bound=Callable[..., object])


def untraced(function: _F) -> _F:
    """Return a function, or a method, that `torch.compile` calls as it is."""
    return cast("_F", torch.compiler.disable(function))
