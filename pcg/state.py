"""Python state that a forward leaves: attributes that it assigns, lists that it appends to, objects that it changes.

`torch.export` runs forward once and sets attributes back, so a program would compute for ever what the first step does.
What only settles is let be: caches, and values that every forward writes before it reads them. So a model that leaves
anything is captured once more, from there: it must leave the same and compute the same, but that it may read what it
kept where the first forward made that of constants. Buffers are not Python state: they are outputs of the graph.
Globals, closures and what iterators hold are not looked at.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from math import nan
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from shardwright.pcg.errors import CaptureError
from shardwright.pcg.exporting import line_of
from shardwright.pcg.graph import Graph, Source

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LISTS = (list, tuple, deque)
_OWN = frozenset(vars(nn.Module()))
"""What every module has: its parameters, buffers and children, its hooks, its mode."""
_DEEPEST = 8


Found = tuple[Graph, Mapping[str, torch.Tensor]]
"""A graph, and its constants by target."""


def settled(model: nn.Module, capture: Callable[[Kept], Found]) -> Found:
    """What `capture` gives; a `CaptureError` where it gives something else from the state that it leaves."""
    first, second = Kept(model), Kept(model, again=True)
    found = capture(first)
    if first.changed:
        with first.as_left():
            again = capture(second)
        if second.changed:
            raise second.refusal()
        if not _computes_the_same(found, again):
            raise first.refusal()
    return found


def _computes_the_same(found: Found, again: Found) -> bool:
    """Whether two graphs are equal, where the second one may read constants that the first one makes of constants."""
    (first, constants), (second, others) = found, again
    fixed = _made_of_constants(first)
    if [key for key, _ in first.outputs] != [key for key, _ in second.outputs]:
        return False
    pending = [(a, b) for (_, a), (_, b) in zip(first.outputs, second.outputs, strict=True)]
    seen: set[tuple[str, str]] = set()
    while pending:
        pair = pending.pop()
        if pair in seen:
            continue
        seen.add(pair)
        mine, other = first.by_name[pair[0]], second.by_name[pair[1]]
        if other.op == "constant" and mine.name in fixed:
            continue
        if (mine.op, mine.attrs, len(mine.inputs)) != (other.op, other.attrs, len(other.inputs)):
            return False
        if mine.op == "constant" and not _equal(*(of[str(mine.attr("target"))] for of in (constants, others))):
            return False
        pending += zip(mine.inputs, other.inputs, strict=True)
    return True


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or not (isinstance(one, FakeTensor) or isinstance(other, FakeTensor) or not one.equal(other))


def _made_of_constants(graph: Graph) -> set[str]:
    """The operators that compute the same in every step."""
    found: set[str] = set()
    for node in graph.nodes:
        if node.op not in ("parameter", "buffer", "input", "constant") and not node.is_random:
            found.update([node.name] * found.issuperset(i for i in node.inputs if graph.by_name[i].op != "constant"))
    return found


class Kept:
    """The Python state of a model's modules around a forward.

    again     whether it is about a second forward, of which tensors are other ones anyway
    changed   by path ("blocks.0.step", "history[3]"), the module and the attribute that the forward left changed
    """

    def __init__(self, model: nn.Module, *, again: bool = False) -> None:
        self.model, self.again = model, again
        self.changed: dict[str, tuple[str, str]] = {}
        self._left: dict[tuple[str, str], Any] = {}
        self._lines: dict[tuple[int, str], str] = {}

    @contextmanager
    def watched(self) -> Generator[None]:
        """Around the forward."""
        before, modules = _snapshot(self.model), dict(self.model.named_modules())
        with mock.patch.object(nn.Module, "__setattr__", self._noting(nn.Module.__setattr__)):
            yield
        after = _snapshot(self.model)
        self.changed = {
            path: after[path][0] if path in after else before[path][0]
            for path in {**before, **after}
            if path not in before or path not in after or not self._same(before[path][1], after[path][1])
        }
        self._left = {key: vars(modules[key[0]]).get(key[1], _LEFT_OUT) for key in self.changed.values()}

    @contextmanager
    def as_left(self) -> Generator[None]:
        """With attributes as the forward left them."""
        modules = dict(self.model.named_modules())
        before = {key: vars(modules[key[0]]).get(key[1], _LEFT_OUT) for key in self._left}
        _assign(modules, tree_map_only(torch.Tensor, self._stand_in, self._left))
        try:
            yield
        finally:
            _assign(modules, before)

    def refusal(self) -> CaptureError:
        """Of what makes later steps other ones than the first: where the first of it is, and what to do."""
        path, (owner, attribute) = next(iter(self.changed.items()))
        module = dict(self.model.named_modules())[owner]
        line = self._lines.get((id(module), attribute), "") or line_of(type(module).forward)
        return CaptureError(
            f"{Source(owner, line)}: forward changes {path.removeprefix(f'{owner}.')!r}, and capture keeps only what "
            "forward computes: every step would be the first one; keep what steps change in a buffer "
            "(register_buffer), or change it outside of forward and pass it in the batch"
        )

    def _same(self, before: object, after: object) -> bool:
        if isinstance(before, _PLAIN) and type(before) is type(after):
            return before == after or (before != before and after != after)  # noqa: PLR0124 - not a number
        tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
        return before is after or (tensors and self.again)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place of a tensor of the first capture, which is gone: whoever reads it computes something else."""
        modes = (p.fake_mode for p in self.model.parameters() if isinstance(p, FakeTensor))
        with next(modes, nullcontext()):
            value = nan if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 1
            return torch.full(tuple(tensor.shape), value, dtype=tensor.dtype, device=tensor.device)

    def _noting(self, assign: Callable[..., None]) -> Callable[..., None]:
        """The assignment of attributes, whose lines are noted."""

        def noted(module: nn.Module, name: str, value: object) -> None:
            frame = sys._getframe(1)
            self._lines[id(module), name] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            assign(module, name, value)

        return noted


_LEFT_OUT = object()
"""In place of an attribute that there is not."""
_TRAINED = torch.empty(0)
"""In place of a parameter or buffer, which capture sees as other tensors."""
_State = dict[str, tuple[tuple[str, str], Any]]


def _assign(modules: Mapping[str, nn.Module], values: Mapping[tuple[str, str], Any]) -> None:
    for (owner, attribute), value in values.items():
        if value is _LEFT_OUT:
            vars(modules[owner]).pop(attribute, None)
        else:
            vars(modules[owner])[attribute] = value


def _snapshot(model: nn.Module) -> _State:
    """By path, the module and attribute that it begins with, and the plain value or the object that is there."""
    found: _State = {}
    seen: dict[int, object] = {id(module): module for module in model.modules()}
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
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
    return {path: (at, _TRAINED if id(value) in own else value) for path, (at, value) in found.items()}


def _walk(path: str, at: tuple[str, str], value: Any, found: _State, seen: dict[int, object], depth: int) -> None:  # noqa: ANN401
    """Add what a value holds; what is shared is looked at once."""
    if isinstance(value, weakref.ref):  # keeps nothing
        return
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
