"""Draws of a forward from Python's or NumPy's generator, by a function that was imported by its name.

Of `from random import random`, capture sees no call: the generator's state shows the draw after forward. So the model
is run once more, and states are compared around each module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

from torch import nn

from shardwright.pcg.capture.exporting import line_of
from shardwright.pcg.capture.foreign import restored
from shardwright.pcg.capture.places import generators
from shardwright.pcg.capture.unseen import UnseenError, states
from shardwright.pcg.errors import CaptureError


def located(
    error: CaptureError, model: nn.Module, foreign: Collection[str], forward: Callable[[], object]
) -> CaptureError:
    """Return an error of such a draw with the module that draws; other errors as they are.

    `foreign`: the parts that may draw.
    """
    cause = error.__cause__
    if not isinstance(cause, UnseenError) or not cause.is_late:
        return error
    try:
        path = _first_that_draws(model, foreign, forward)
    except Exception:  # noqa: BLE001  a model that does not run draws nowhere
        path = None
    if not path:
        return error
    line = line_of(type(model.get_submodule(path)).forward)
    found = CaptureError(
        f"{type(model).__name__} could not be captured: in module {path!r} ({line}): {cause}. {cause.remedy}"
    ).inside(path, f"{line}: {cause}")
    found.__cause__ = cause
    return found


def _first_that_draws(model: nn.Module, foreign: Collection[str], forward: Callable[[], object]) -> str | None:
    """Return the path of the innermost module around the first draw outside of foreign parts."""
    before, found = dict[str, list[tuple[dict[str, bytes], list[Any]]]](), list[str]()

    def enter(path: str) -> None:
        before.setdefault(path, []).append((states(model), [get() for get, _ in generators(model)]))

    def leave(path: str) -> None:
        seen, values = before[path].pop()
        if path in foreign:
            for (_, put), value in zip(generators(model), values, strict=True):
                put(value)
        elif states(model) != seen:
            found.append(path)

    with restored(model), ExitStack() as stack:
        for path, module in model.named_modules():
            hooks = (
                module.register_forward_pre_hook(lambda *_, path=path: enter(path)),
                module.register_forward_hook(lambda *_, path=path: leave(path)),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        forward()
    return next(iter(found), None)
