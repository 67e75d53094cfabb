"""A check that all layers of a long list do the same: it runs a model on tensors without data and notes its operators.

Both the whole model and the shortened one run like this. Every layer from the third on has to call the same operators
with the same numbers on the same values: its own, those of the layer right before, or those that all layers read. The
operators outside of layers have to be equal in both. That is a statement about all layers, not about a sample of them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map_only

from shardwright.pcg.capture.backwards import backwards_refused, check_backward, grad_fn
from shardwright.pcg.capture.depth import KEPT, Run, shortened
from shardwright.pcg.capture.hooks import captured_hooks
from shardwright.pcg.capture.state import Kept
from shardwright.pcg.capture.unseen import unseen_refused

_MOST_NUMBERS = 4096
"""The largest number of elements of a constant that is compared by value."""
_Place = tuple[str, int]
"""A layer of the list at a path, or a stretch outside of all of them, under the path ""."""
Forward = Callable[[nn.Module, Mapping[str, Any]], object]


def alike(model: nn.Module, tensors: Mapping[str, Any], found: Sequence[Run], forward: Forward) -> bool:
    """Return whether the shortened model stands for the whole one.

    `forward` runs a copy of it on a batch without data.
    """
    with _noting(model, tensors, found, forward) as noted:
        whole = noted()
        with shortened(model, found):
            return whole.are_as(noted())


def digest(model: nn.Module, tensors: Mapping[str, Any], forward: Forward) -> str | None:
    """Return a digest of all that a forward calls on tensors without data: where it is equal, so is the captured graph.

    None where that is not known: the forward changes state, or reads a large constant.
    """
    with _noting(model, tensors, (), forward) as noted:
        whole = noted()
    if any(whole.changed.values()) or whole.has_unknown:
        return None
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return hashlib.sha256(repr((modules, parameters, whole.calls, whole.result)).encode()).hexdigest()


@contextmanager
def _noting(
    model: nn.Module, tensors: Mapping[str, Any], found: Sequence[Run], forward: Forward
) -> Generator[Callable[[], _Notes]]:
    """Yield a function that runs the model as it is by then, and notes its operators."""
    mode = FakeTensorMode()
    for _, tensor in (*_tensors(model), *(("", leaf) for leaf in tree_leaves(tensors))):
        mode = getattr(tensor, "fake_mode", mode)

    def fake(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return mode.from_tensor(tensor)
        own = isinstance(tensor, nn.Parameter)  # otherwise changes in place would reach the model's tensor
        return tensor if own else tensor.detach().requires_grad_(tensor.requires_grad)

    def noted() -> _Notes:
        copy = deepcopy(model, {id(t): fake(t) for _, t in _tensors(model)})  # the Python state of the copy may change
        with captured_hooks(copy):
            return _Notes(copy, tree_map_only(Tensor, fake, dict(tensors)), found, mode, forward)

    quiet = mock.patch.object(logging.getLogger(FakeTensor.__module__), "disabled", new=True)  # no log of failures
    with quiet, mock.patch.object(mode, "allow_non_fake_inputs", new=True):  # tensors beside parameters and buffers
        yield noted


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers and other tensor attributes, by name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        yield from ((f"{path}.{name}", value) for name, value in vars(module).items() if isinstance(value, Tensor))


class _Notes(TorchDispatchMode):
    """The operators that a model calls, layer by layer."""

    def __init__(
        self, model: nn.Module, batch: Mapping[str, Any], found: Sequence[Run], mode: FakeTensorMode, forward: Forward
    ) -> None:
        super().__init__()
        self.found = {run.path: run for run in found}
        self.calls: dict[_Place, list[object]] = {}
        self._made: dict[int, tuple[_Place, int, int]] = {}  # by storage: place, call, result
        self._in: _Place | None = None
        self.has_unknown = False  # whether a constant was read whose values are not noted
        given = ((f"batch {number}", t) for number, t in enumerate(tree_iter(batch)) if isinstance(t, Tensor))
        leaves = [*_tensors(model), *given]
        self._leaves = {_storage(tensor): name for name, tensor in reversed(leaves)}
        self._given = {id(tensor): tensor for _, tensor in leaves}
        self._stays = [tensor.untyped_storage() for _, tensor in leaves]  # otherwise another storage may get its number
        hooks = [hook for run in found for hook in self._watched(model.get_submodule(run.path), run)]
        kept = Kept(model)
        try:
            refused = unseen_refused(model), backwards_refused(model)
            with refused[0], refused[1], kept.watched(), mode, self, _compiling_state_context():  # as when exported
                result = forward(model, batch)
                self.result = self._said(result)
            check_backward(result)
        finally:
            for hook in hooks:
                hook.remove()
        self.changed = self._by_layer(kept.changed)

    def _watched(self, layers: nn.Module, run: Run) -> list[Any]:
        hooks = list[Any]()
        for number, layer in enumerate(layers._modules.values()):
            if number >= run.start and layer is not None:
                place = (run.path, number)
                hooks.append(layer.register_forward_pre_hook(lambda *_, place=place: self._enter(place)))
                hooks.append(layer.register_forward_hook(lambda *_: self._enter(None)))
        return hooks

    def _by_layer(self, paths: Iterable[str]) -> dict[_Place, set[str]]:
        """Return the state that the forward changed (`pcg.capture.state`), by the layer that has it."""
        found = dict[_Place, set[str]]()
        for path in paths:
            layers = ((run, number) for run, number in self.calls if run and path.startswith(f"{run}.{number}."))
            place = next(layers, ("", 0))
            found.setdefault(place, set()).add(path.removeprefix(f"{place[0]}.{place[1]}."))
        return found

    def _enter(self, place: _Place | None) -> None:
        if place is not None:
            if self._in is not None or place in self.calls:
                raise ValueError("a layer runs twice, or inside another one")
            self.calls[place] = []
        self._in = place

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a question about a tensor
            return result
        if name := self._cast(func, args):
            self._leaves[_storage(result)] = name
            self._stays.append(result.untyped_storage())
            return result
        place = self._in or self._outside()
        calls = self.calls.setdefault(place, [])
        read = self._said((args, kwargs), place)
        for number, tensor in enumerate(tree_iter(result)):
            if isinstance(tensor, Tensor) and _storage(tensor) not in self._leaves:
                self._made.setdefault(_storage(tensor), (place, len(calls), number))
                self._stays.append(tensor.untyped_storage())
        calls.append((str(func), torch.is_grad_enabled(), read, self._said(result, place)))
        return result

    def _cast(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> str:
        """Return the leaf of which a result is a cast, made before all else (`pcg.capture.casting`), or ""."""
        is_early = func is torch.ops.aten._to_copy.default and not self.calls
        return self._leaves[_storage(args[0])] if is_early and id(args[0]) in self._given else ""

    def _outside(self) -> _Place:
        """Return the place of the stretch between layers that goes on, or of a new one."""
        last = next(reversed(self.calls), ("", 0))
        return last if self.calls and not last[0] else ("", len(self.calls_outside))

    @property
    def calls_outside(self) -> list[list[object]]:
        return [calls for (path, _), calls in self.calls.items() if not path]

    def _said(self, value: object, at: _Place = ("", -1)) -> object:
        if isinstance(value, Tensor):
            return self._named(value, at)
        if isinstance(value, (list, tuple)):
            return [self._said(x, at) for x in value]
        if isinstance(value, dict):
            return {name: self._said(x, at) for name, x in value.items()}
        return repr(value)  # True is 1, and -0.0 is 0.0

    def _named(self, tensor: Tensor, at: _Place) -> object:
        """Return the origin of a tensor, as seen from a place, and its shape, dtype, strides and the like."""
        storage, (path, number) = _storage(tensor), at
        gradient = tensor.requires_grad, self._is_followed(tensor)
        kind = tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.storage_offset(), gradient
        if storage in self._leaves:
            name, own = self._leaves[storage], f"{path}.{number}."
            return ("own", name.removeprefix(own), kind) if path and name.startswith(own) else ("leaf", name, kind)
        if storage not in self._made:
            value = _value(tensor)
            self.has_unknown |= not isinstance(value, str)
            return ("constant", value, kind)
        (home, layer), *place = self._made[storage]
        if (home, layer) == at:
            return ("own", place, kind)
        if home and home == path and layer == number - 1:
            return ("before", place, kind)
        if home and home != path and (home, layer + 1) not in self.calls:
            return ("last", home, place, kind)
        return (home, layer, place, kind)

    def _is_followed(self, tensor: Tensor) -> bool:
        """Return whether autograd goes on from a tensor, as it does not from `x.detach().requires_grad_()`."""
        base = tensor if tensor._base is None else tensor._base
        return all(grad_fn(x) is not None or id(x) in self._given for x in (tensor, base))

    def _of(self, place: _Place) -> object:
        """Return the calls of a layer and the state that it changes; None if the layer does not run."""
        return (self.calls[place], self.changed.get(place)) if place in self.calls else None

    def are_as(self, short: _Notes) -> bool:
        """Return whether the notes of the shortened model cover everything in these notes."""
        if self.result != short.result or self.calls_outside != short.calls_outside:
            return False
        if self.changed.get(("", 0)) != short.changed.get(("", 0)):
            return False
        for path, run in self.found.items():
            own, few = ([notes._of((path, n)) for n in range(run.start, run.stop)] for notes in (self, short))
            if None in own or few[KEPT:] != [None] * (len(few) - KEPT):
                return False
            if own[:KEPT] != few[:KEPT] or any(calls != own[KEPT - 2] for calls in own[KEPT - 2 :]):
                return False
        return _order(self) == _order(short)


def _order(notes: _Notes) -> list[str]:
    """Return the lists, and the stretches outside of them, in the order in which they run."""
    found = list[str]()
    for path, _ in notes.calls:
        if not path or not found or found[-1] != path:
            found.append(path)
    return found


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _value(tensor: Tensor) -> object:
    """Return the value of a tensor that forward makes of numbers; for others, an object equal to nothing else."""
    if isinstance(tensor, FakeTensor) or tensor.numel() > _MOST_NUMBERS:
        return object()
    with unset_fake_temporarily():
        return repr(tensor.detach().tolist())
