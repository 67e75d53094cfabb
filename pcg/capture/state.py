"""The state that a forward leaves in a model: attributes it assigns, lists it appends to, objects it changes.

Buffers that it assigns are outputs of the graph (`pcg.capture.writing`); other state, and whether later steps are
still like the first, is for `pcg.capture.settling`. The state of iterators is not looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import nan
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.pcg.capture.exporting import is_library, line_of
from shardwright.pcg.capture.places import CONTAINERS, PLAIN, Place, Snapshot
from shardwright.pcg.capture.writing import DataAsCopies, check_type, write_back
from shardwright.pcg.errors import CaptureError
from shardwright.pcg.graph import Source

LEFT = "left "
"""The prefix of outputs that a forward leaves in the model; the path follows."""


class Carrier(NamedTuple):
    """A place whose value is an input of a graph. `is_first`: `value` is its value when training begins."""

    place: Place
    value: Tensor
    is_first: bool


class Carried(nn.Module):
    """Values at places of a model, as tensors that capture sees as buffers of this module around a forward."""

    def __init__(self, carriers: Mapping[str, Carrier]) -> None:
        super().__init__()
        self.carriers = dict(carriers)
        self.targets = {f"at{number}": path for number, path in enumerate(carriers)}
        for name, path in self.targets.items():
            self.register_buffer(name, carriers[path].value.detach())

    def put(self) -> None:
        """Put these tensors in their places."""
        for name, path in self.targets.items():
            self.carriers[path].place.put(self._buffers[name])


class Kept:
    """The Python state of a model's modules around a forward.

    carriers  the inputs of the graph, by path
    changed   other places that the forward changed, except buffers, by path ("blocks.0.step", "history[3]")
    """

    def __init__(self, model: nn.Module, carriers: Mapping[str, Carrier] | None = None) -> None:
        self.model, self.carriers = model, dict(carriers or {})
        self.changed: dict[str, Place] = {}
        self._before = self._left = Snapshot(nn.Module())
        self._lines: dict[tuple[int, str], str] = {}

    @contextmanager
    def watched(self, carried: Carried | None = None) -> Generator[None]:
        """Observe a forward inside the context.

        Write what it assigns to buffers, or to places of `carried`, into these.
        """
        if carried is not None:
            carried.put()
        self._before = before = Snapshot(self.model)
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
        if carried is not None:
            self._write_carried(carried)

    def _write_carried(self, carried: Carried) -> None:
        """Write into each carried tensor the value that its place has by now, which then does not count as changed."""
        copies = list[tuple[Tensor, Tensor]]()
        for name, path in carried.targets.items():
            old, place = carried.get_buffer(name), self.changed.get(path)
            if place is None or path not in self._left.places:
                continue
            value = place.value
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not old.dim():
                value = torch.full((), value, dtype=old.dtype, device=old.device)
            if isinstance(value, Tensor):
                check_type(path, place, value, old, self.place_of)
                copies.append((old, value.detach().clone()))
                del self.changed[path]
        for old, value in copies:
            old.copy_(value)

    def left(self) -> dict[str, Tensor]:
        """Return the tensors that the forward left in places that are not carried, by path."""
        places = {path: self._left.places.get(path) for path in self.changed}
        return {path: place.value for path, place in places.items() if place and isinstance(place.value, Tensor)}

    def left_tensors(self) -> dict[str, Carrier]:
        """Return the same as inputs of a second capture."""
        return {path: Carrier(self.changed[path], self._stand_in(value), False) for path, value in self.left().items()}

    def left_numbers(self) -> dict[str, Carrier]:
        """Return the numbers that the forward changed, as they were before."""
        numbers = dict[str, Carrier]()
        for path in self.changed:
            one, two = self._before.places.get(path), self._left.places.get(path)
            if one is None or two is None or one.origin.is_shared:
                continue
            if _is_number(one.value) and _is_number(two.value):
                real = isinstance(one.value, float) or isinstance(two.value, float)
                value = torch.tensor(one.value, dtype=torch.float64 if real else torch.int64)
                numbers[path] = Carrier(two, value, True)
        return numbers

    def plain_tensors(self) -> dict[str, Carrier]:
        """Return all tensors that are neither parameters nor buffers, with their values before the forward."""
        own = {id(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())}
        places = {path: p for path, p in Snapshot(self.model).places.items() if isinstance(p.value, Tensor)}
        once = {id(place.value): path for path, place in reversed(places.items()) if id(place.value) not in own}
        return {path: Carrier(places[path], places[path].value.detach().clone(), True) for path in once.values()}

    @contextmanager
    def as_left(self) -> Generator[None]:
        """Set attributes as the forward left them, inside the context."""
        before, made = Snapshot(self.model), {id(place.value) for place in self.changed.values()}
        self._left.put(
            {place.origin for place in self.changed.values()},
            lambda value: self._stand_in(value) if isinstance(value, Tensor) and id(value) in made else value,
        )
        try:
            yield
        finally:
            before.put_back()

    def refusal(self) -> CaptureError:
        """Return the error about the first place that makes later steps differ from the first, with a remedy."""
        path, place = next(iter(self.changed.items()))
        where, what = self.place_of(place), f"forward changes {path.removeprefix(f'{place.origin.owner}.')!r}"
        return CaptureError(
            f"{where}: {what}, and capture keeps only what forward computes: every step would be the first one; keep "
            "what steps change in a buffer (register_buffer), or change it outside of forward and pass it in the batch"
        ).inside(where.module, f"{where.line}: {what}")

    def place_of(self, place: Place) -> Source:
        """Return where forward assigns to a place, or if that is not known where its module's forward begins."""
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
        tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
        trained = before.kind == "_buffers" or (id(one) in own and id(other) in own)
        return one is other or (tensors and trained)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Return a substitute for a tensor of the first capture, which is gone; its readers compute something else."""
        modes = (p.fake_mode for p in self.model.parameters() if isinstance(p, FakeTensor))
        with next(modes, nullcontext()):
            value = nan if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 1
            return torch.full(tuple(tensor.shape), value, dtype=tensor.dtype, device=tensor.device)

    def _noting(self, method: str) -> AbstractContextManager[object]:
        """Note the lines that assign attributes."""
        assign = getattr(nn.Module, method)

        def noted(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            frame: FrameType = sys._getframe(1)
            while frame.f_back is not None and (is_library(file := frame.f_code.co_filename) or file == __file__):
                frame = frame.f_back
            self._lines[id(module), name] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            assign(module, name, *args, **kwargs)

        return mock.patch.object(nn.Module, method, noted)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
