"""Python state that a forward leaves: attributes that it assigns, lists that it appends to, objects that it changes.

`torch.export` runs forward once and sets attributes back, so a program would compute for ever what the first step does.
What only settles is let be: caches, and values that every forward writes before it reads them. So a model that leaves
anything is captured once more, from there: it must leave the same and compute the same, but that it may read what it
kept where the first forward made that of constants. Buffers are not Python state: they are outputs of the graph.
Globals, closures and what iterators hold are not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import nan
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.pcg.errors import CaptureError
from shardwright.pcg.exporting import is_library, line_of
from shardwright.pcg.graph import Graph, Source
from shardwright.pcg.places import CONTAINERS, PLAIN, Place, Snapshot
from shardwright.pcg.writing import DataAsCopies, write_back

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
    changed   by path ("blocks.0.step", "history[3]"), what the forward left changed, but for buffers
    """

    def __init__(self, model: nn.Module, *, again: bool = False) -> None:
        self.model, self.again = model, again
        self.changed: dict[str, Place] = {}
        self._left: Snapshot | None = None
        self._lines: dict[tuple[int, str], str] = {}

    @contextmanager
    def watched(self) -> Generator[None]:
        """Around the forward. What it assigns to buffers is written into them at the end."""
        before = Snapshot(self.model)
        with self._noting("__setattr__"), self._noting("register_buffer"), DataAsCopies():
            yield
        self._left = after = Snapshot(self.model)
        write_back(before, after, self.place_of)
        own = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        own |= {id(place.value) for place in before.places.values() if place.kind}
        self.changed = {
            path: after.places.get(path) or before.places[path]
            for path in {**before.places, **after.places}
            if not self._same(before.places.get(path), after.places.get(path), own)
        }

    @contextmanager
    def as_left(self) -> Generator[None]:
        """With attributes as the forward left them."""
        assert self._left is not None
        before, made = Snapshot(self.model), {id(place.value) for place in self.changed.values()}
        self._left.put(
            {place.origin for place in self.changed.values()},
            lambda value: self._stand_in(value) if isinstance(value, torch.Tensor) and id(value) in made else value,
        )
        try:
            yield
        finally:
            before.put_back()

    def refusal(self) -> CaptureError:
        """Of what makes later steps other ones than the first: where the first of it is, and what to do."""
        path, place = next(iter(self.changed.items()))
        return CaptureError(
            f"{self.place_of(place)}: forward changes {path.removeprefix(f'{place.origin.owner}.')!r}, and capture "
            "keeps only what forward computes: every step would be the first one; keep what steps change in a buffer "
            "(register_buffer), or change it outside of forward and pass it in the batch"
        )

    def place_of(self, place: Place) -> Source:
        """Where forward assigns to a place; where its module's forward begins, if that is not known."""
        module = self.model.get_submodule(place.origin.owner)
        line = self._lines.get((id(module), place.origin.attribute), "") or line_of(type(module).forward)
        return Source(place.origin.owner, line)

    def _same(self, before: Place | None, after: Place | None, own: Collection[int]) -> bool:
        if before is None or after is None:
            return False
        one, other = before.value, after.value
        if isinstance(one, PLAIN) and type(one) is type(other):
            return one == other or (one != one and other != other)  # noqa: PLR0124 - not a number
        if isinstance(one, CONTAINERS):
            return type(one) is type(other)
        tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        trained = before.kind == "_buffers" or (id(one) in own and id(other) in own)
        return one is other or (tensors and (self.again or trained))

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place of a tensor of the first capture, which is gone: whoever reads it computes something else."""
        modes = (p.fake_mode for p in self.model.parameters() if isinstance(p, FakeTensor))
        with next(modes, nullcontext()):
            value = nan if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 1
            return torch.full(tuple(tensor.shape), value, dtype=tensor.dtype, device=tensor.device)

    def _noting(self, method: str) -> AbstractContextManager[object]:
        """The lines of what assigns attributes are noted."""
        assign = getattr(nn.Module, method)

        def noted(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            frame: FrameType = sys._getframe(1)
            while frame.f_back is not None and (is_library(file := frame.f_code.co_filename) or file == __file__):
                frame = frame.f_back
            self._lines[id(module), name] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            assign(module, name, *args, **kwargs)

        return mock.patch.object(nn.Module, method, noted)
