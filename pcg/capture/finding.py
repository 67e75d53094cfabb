"""The search for the parts of a model that have to be foreign: where capture fails, the smallest part around it.

capture ──fails──▶ the function that fails, its module, or the nearest around it that a graph can call ──▶ capture again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.pcg.capture.foreign import Parts, part_of
from shardwright.pcg.capture.functions import REMEDY, failing_function
from shardwright.pcg.capture.late_draws import located
from shardwright.pcg.capture.unseen import UnseenError
from shardwright.pcg.errors import CaptureError, PlanError

T = TypeVar("T")


def with_foreign(
    parts: Parts, capture: Callable[[Parts], T], forward: Callable[[], object], *, find: bool
) -> tuple[T, Parts]:
    """Return what `capture` gives with some parts of a model foreign, and those parts.

    With `find`, each failure of `capture` adds one. Raises the error of `capture` if none helps.
    """
    if parts.by_name:
        parts.record(forward)
    while True:
        try:
            return capture(parts), parts
        except CaptureError as failure:
            error = located(failure, parts.model, parts.by_name, forward) if find else failure
            wider = _wider(parts, error, forward) if find and error.where is not None else None
            if wider is None and find and (hint := _hint(parts, error)):
                raise CaptureError(f"{error}. {hint}") from error
            if wider is None:
                raise error from error.__cause__
            parts = wider


def _hint(parts: Parts, error: CaptureError) -> str:
    """Return what makes a part possible where there is none, or ""."""
    if error.where and any(isinstance(p, FakeTensor) for p in parts.model.parameters()):
        why = "a part that cannot be captured runs as it is, but its types come from a run with real values"
        return f"Build the model outside of shardwright.fake(): {why}"
    return f"Or {REMEDY}" if error.where is not None and error.__cause__ is not None else ""


def _wider(parts: Parts, error: CaptureError, forward: Callable[[], object]) -> Parts | None:
    """Return the parts with one more, or with a larger one, so that the place of an error is inside; None: no part is.

    The part is called, and a graph can call it: it takes and returns tensors, whose shapes depend on no values as far
    as a few runs show.
    """
    for name in _around(parts, error):
        inner = {own for own in parts.by_name if f"{own}.".startswith(f"{name}.")}
        try:
            part = part_of(parts.model, name, why=error.why)
            wider = parts.having([*(one for own, one in parts.by_name.items() if own not in inner), part])
            wider.record(forward)
        except (CaptureError, PlanError):
            continue
        if name in wider.by_name:  # else its forward is not called, but another method of it
            return wider
    return None


def _around(parts: Parts, error: CaptureError) -> Iterator[str]:
    """Yield what may be made foreign for an error, the smallest first: a function, the module, modules around it."""
    function = error.function or ("" if isinstance(error.__cause__, UnseenError) else failing_function(error.__cause__))
    if function and function not in parts.by_name:
        yield function
    path = error.where or ""
    while path:
        module = parts.model.get_submodule(path)
        if path not in parts.by_name and type(module).forward is not nn.Module.forward:
            yield path
        path = path.rpartition(".")[0]
