"""Python state that a forward leaves: attributes that it assigns, lists that it appends to, objects that it changes.

`torch.export` runs forward once and sets attributes back, so a program would compute for ever what the first step does.
What only settles is let be: a cache that the next forward finds, leaves as it is and computes the same with. So a model
that leaves anything is captured once more, from there. Buffers are not Python state: they are outputs of the graph.
Globals, closures and what iterators hold are not looked at.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn

from shardwright.pcg.errors import CaptureError
from shardwright.pcg.graph import Graph

T = TypeVar("T")

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LISTS = (list, tuple, deque)
_OWN = frozenset(vars(nn.Module()))
"""What every module has: its parameters, buffers and children, its hooks, its mode."""
_DEEPEST = 8
_OF_TENSORS = "return the tensor, or keep it in a buffer (register_buffer)"
_OF_OTHERS = (
    "keep what steps change in a buffer (register_buffer), or change it outside of forward and pass it in the batch"
)


def settled(model: nn.Module, capture: Callable[[Kept], tuple[Graph, T]]) -> tuple[Graph, T]:
    """What `capture` gives; a `CaptureError` where it gives something else from the state that it leaves."""
    first, second = Kept(model), Kept(model)
    found = capture(first)
    if first.changed:
        with first.as_left():
            again = capture(second)
        if second.changed:
            raise second.refusal()
        if again[0] != found[0]:
            raise first.refusal()
    return found


class Kept:
    """The Python state of a model's modules around forwards.

    changed   by path ("blocks.0.step", "history[3]"), the module and the attribute that the last forward left changed
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changed: dict[str, tuple[str, str]] = {}
        self._left: dict[tuple[str, str], Any] = {}
        self._lines: dict[tuple[int, str], str] = {}

    @contextmanager
    def watched(self) -> Generator[None]:
        """Around a forward. A tensor that it leaves in an attribute is a `CaptureError`: none is there after a step."""
        before, modules = _snapshot(self.model), dict(self.model.named_modules())
        with mock.patch.object(nn.Module, "__setattr__", self._noting(nn.Module.__setattr__)):
            yield
        after = _snapshot(self.model)
        self.changed = {
            path: after[path][0] if path in after else before[path][0]
            for path in {**before, **after}
            if path not in before or path not in after or not _same(before[path][1], after[path][1])
        }
        self._left = {key: vars(modules[key[0]]).get(key[1], _left_out) for key in self.changed.values()}
        for path in self.changed:
            if path in after and isinstance(after[path][1], torch.Tensor):
                raise self.refusal(path, _OF_TENSORS)

    @contextmanager
    def as_left(self) -> Generator[None]:
        """With attributes as the last forward left them."""
        modules = dict(self.model.named_modules())
        before = {key: vars(modules[key[0]]).get(key[1], _left_out) for key in self._left}
        _assign(modules, self._left)
        try:
            yield
        finally:
            _assign(modules, before)

    def refusal(self, path: str = "", remedy: str = "") -> CaptureError:
        """Of what makes later steps other ones than the first, or of the change at `path`: where, and what to do."""
        path = path or next(iter(self.changed))
        owner, attribute = self.changed[path]
        module = dict(self.model.named_modules())[owner]
        line = self._lines.get((id(module), attribute), "") or _line_of(type(module).forward)
        return CaptureError(
            f"{owner or type(self.model).__name__} ({line}): forward changes {path.removeprefix(f'{owner}.')!r}, and "
            f"capture keeps only what forward computes: every step would be the first one; {remedy or _OF_OTHERS}"
        )

    def _noting(self, assign: Callable[..., None]) -> Callable[..., None]:
        """The assignment of attributes, whose lines are noted."""

        def noted(module: nn.Module, name: str, value: object) -> None:
            frame = sys._getframe(1)
            self._lines[id(module), name] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            assign(module, name, value)

        return noted


_left_out = object()
"""In place of an attribute that there is not."""


def _assign(modules: Mapping[str, nn.Module], values: Mapping[tuple[str, str], Any]) -> None:
    for (owner, attribute), value in values.items():
        if value is _left_out:
            vars(modules[owner]).pop(attribute, None)
        else:
            vars(modules[owner])[attribute] = value


def _line_of(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else "?"


def _same(before: object, after: object) -> bool:
    if isinstance(before, _PLAIN) and type(before) is type(after):
        return before == after or (before != before and after != after)  # noqa: PLR0124 - not a number
    return before is after


_State = dict[str, tuple[tuple[str, str], Any]]


def _snapshot(model: nn.Module) -> _State:
    """By path, the module and attribute that it begins with, and the plain value or the object that is there."""
    found: _State = {}
    seen = {id(module): module for module in model.modules()}
    for owner, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OWN:
                _walk(f"{owner}.{attribute}".lstrip("."), (owner, attribute), value, found, seen, 0)
        for kind in type(module).__mro__:
            if id(kind) not in seen and kind.__module__.split(".")[0] not in ("torch", "builtins"):
                seen[id(kind)] = kind
                for name, value in vars(kind).items():
                    if isinstance(value, (*_PLAIN, *_LISTS, dict, set)) and not name.startswith("__"):
                        _walk(f"{kind.__name__}.{name}", (owner, name), value, found, seen, 0)
    return found


def _walk(path: str, at: tuple[str, str], value: Any, found: _State, seen: dict[int, Any], depth: int) -> None:  # noqa: ANN401
    """Add what a value holds; what is shared is looked at once."""
    found[path] = at, type(value) if isinstance(value, (*_LISTS, dict, set)) else value
    if isinstance(value, (*_PLAIN, type, torch.Tensor)) or id(value) in seen or depth == _DEEPEST:
        return
    seen[id(value)] = value
    if isinstance(value, _LISTS):
        parts = {f"{path}[{i}]": part for i, part in enumerate(value)}
    elif isinstance(value, dict):
        parts = {f"{path}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, (set, frozenset)):
        parts = {f"{path}[{key!r}]": key for key in value}
    elif callable(value) or type(value).__module__.split(".")[0] == "torch":
        return
    else:
        parts = {f"{path}.{name}": part for name, part in getattr(value, "__dict__", {}).items()}
    for name, part in parts.items():
        _walk(name, at, part, found, seen, depth + 1)
