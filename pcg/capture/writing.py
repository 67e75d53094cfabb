"""Buffers that a forward assigns, treated as buffers that it writes in place, which are outputs of the graph.

    self.mean = new        at the end of forward: old.copy_(new)
    self.mean.data = new   at once: old.detach().copy_(new)

Within a forward Python has the new tensor already, so readers of a buffer after its assignment read that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.pcg.aten import dtype_name
from shardwright.pcg.capture.places import Place, Snapshot
from shardwright.pcg.errors import CaptureError
from shardwright.pcg.graph import Source


def write_back(before: Snapshot, after: Snapshot, where: Callable[[Place], Source]) -> None:
    """Write into each buffer of `before` the tensor that `after` has in its place.

    Raises `CaptureError` if that tensor is of another type, if other names of the buffer have another tensor by now, or
    if a parameter was replaced.
    """
    names, new = dict[int, str](), dict[int, Tensor]()
    changes = list[tuple[Tensor, Tensor]]()
    for path, place in before.places.items():
        old, now = place.value, after.places.get(path)
        if not isinstance(old, Tensor) or not place.kind or now is None or not isinstance(now.value, Tensor):
            continue
        if now.kind != place.kind or (now.value is not old and place.kind != "_buffers"):
            raise CaptureError(
                f"{where(now)}: forward replaces {path!r}, and what is trained must stay the same parameter; copy "
                "into it outside of forward, or register what forward changes as a buffer"
            )
        if new.setdefault(id(old), now.value) is not now.value:
            raise CaptureError(
                f"{where(now)}: forward assigns the buffer {names[id(old)]!r} or {path!r}, which were one tensor, so "
                "that from then on they are two; assign both, write in place, or register two buffers"
            )
        if id(old) not in names and now.value is not old:
            check_type(path, now, now.value, old, where)
            changes.append((old, now.value))
        names.setdefault(id(old), path)
    copies = [(old, value.detach().clone()) for old, value in changes]  # all of them first: two may be swapped
    for old, value in copies:
        with torch.no_grad() if old.requires_grad else torch.enable_grad():
            old.copy_(value)


def check_type(path: str, place: Place, new: Tensor, old: Tensor, where: Callable[[Place], Source]) -> None:
    """Raise a `CaptureError` if a tensor of another type is to be written into `old`."""
    if (given := _type(new)) != (expected := _type(old)):
        raise CaptureError(
            f"{where(place)}: forward assigns to {path!r} {given}, expected {expected} as it was before; a step must "
            "leave what the next one reads: make it in the shape and dtype that it has from then on, by hand or by a "
            "call of the model under torch.no_grad() before it is compiled"
        )


def _type(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)} on {tensor.device}"


class Shared:
    """Buffers with several names, and modules that have buffers. `torch.export` knows only the first names."""

    def __init__(self, model: nn.Module) -> None:
        first = dict[int, tuple[dict[str, Any], str]]()
        self._others = list[tuple[dict[str, Any], str, dict[str, Any], str]]()
        for holder, name, part in _parts(model):
            first_holder, own = first.setdefault(id(part), (holder, name))
            if first_holder is not holder or own != name:
                self._others.append((holder, name, first_holder, own))
        self._order = [(holder, list(holder)) for holder in {id(h): h for h, *_ in self._others}.values()]

    @contextmanager
    def hidden(self) -> Generator[None]:
        """Remove the other names inside the context."""
        for holder, name, *_ in self._others:
            holder.pop(name, None)
        try:
            yield
        finally:
            self._show()

    @contextmanager
    def shown(self) -> Generator[None]:
        """Restore the other names around the forward, inside of `hidden`."""
        self._show()
        try:
            yield
        finally:
            for holder, name, *_ in self._others:
                holder.pop(name, None)

    def _show(self) -> None:
        for holder, name, first, own in self._others:
            holder[name] = first[own]
        for holder, names in self._order:  # a list runs its modules in this order
            now = dict(holder)
            holder.clear()
            holder.update({name: now[name] for name in (*names, *now) if name in now})


def _parts(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor | nn.Module]]:
    """Yield buffers and modules with buffers, with their holder and name there, in the order of `named_modules`."""
    for path, module in model.named_modules(remove_duplicate=False):
        around, _, name = path.rpartition(".")
        if path and any(True for _ in module.buffers()):
            yield model.get_submodule(around)._modules, name, module
        for own, buffer in module._buffers.items():
            if buffer is not None:
                yield module._buffers, own, buffer


class DataAsCopies(TorchFunctionMode):
    """A mode in which `x.data` is `x.detach()` and an assignment to it copies into that, so that export sees both."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        is_data = getattr(func, "__self__", None) is _DATA
        if is_data and func.__name__ == "__get__":
            return args[0].detach()
        if is_data and func.__name__ == "__set__":
            tensor, value = args
            if _type(tensor) != _type(value):
                raise CaptureError(
                    f"forward sets the data of {_type(tensor)} to {_type(value)}, and capture keeps shapes and dtypes; "
                    "assign a new tensor"
                )
            return tensor.detach().copy_(value.detach())
        return func(*args, **(kwargs or {}))


_DATA = torch.Tensor.__dict__.get("data") or torch._C.TensorBase.__dict__["data"]
