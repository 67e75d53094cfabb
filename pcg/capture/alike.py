"""The kinds of layers in a long list: the model runs on tensors without data, and every operator is noted.

Layers are of a kind if they call the same operators with the same numbers on the same values: their own, those of the
layer right before, or those that all layers read; and if the layer after them reads the same of them. Then the
shortened model runs likewise. Each of its layers, and all operators outside of layers, have to be as in the whole
model. That is a statement about all layers, not about a sample of them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from shardwright.pcg.capture.depth import Layers, shortened
from shardwright.pcg.capture.hooks import captured_hooks
from shardwright.pcg.capture.importing import flat_batch
from shardwright.pcg.capture.kinds import chosen
from shardwright.pcg.capture.places import put_back
from shardwright.pcg.capture.record import written_by
from shardwright.pcg.capture.results import KnownResults
from shardwright.pcg.capture.state import Kept
from shardwright.pcg.capture.unseen import unseen_refused

_MOST_NUMBERS = 4096
"""The largest number of elements of a constant that is compared by value."""
_Place = tuple[str, int]
"""A layer of the list at a path, or a stretch outside of all of them, under the path ""."""
Forward = Callable[[nn.Module, Mapping[str, Any]], object]


class ForwardTrace:
    """All operators that the forward of a model calls, on tensors without data."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[str, Any],
        found: Sequence[Layers],
        forward: Forward,
        beside: Collection[str] = (),
    ) -> None:
        """Run the model.

        `found`: its lists of layers. `forward` runs a copy of the model on a batch without data, and may note in
        `beside` what else there is to know of it.
        """
        self._model, self._tensors, self._found, self._forward = model, tensors, found, forward
        self._beside = beside
        self._mode = FakeTensorMode()
        for _, tensor in (*_tensors(model), *(("", leaf) for leaf in tree_leaves(tensors))):
            self._mode = getattr(tensor, "fake_mode", self._mode)
        self._results = KnownResults(self._mode)
        self._whole = self._noted(found)

    def kinds(self) -> list[Layers] | None:
        """Return which layers stand for all; None if hardly any can be left out, or the model without them differs."""
        own = [
            [layers for layers in (self._whole.kinds(one, with_last=last) for one in self._found) if layers is not None]
            for last in (False, True)
        ]
        ways = own[:1] if own[0] == own[1] else own
        return next((few for few in ways if few and self._is_covered_by(few)), None)

    def _is_covered_by(self, few: Sequence[Layers]) -> bool:
        """Return whether the model shortened to these layers runs, and as the whole one."""
        with suppress(Exception):  # whatever it is, the whole model has run
            return self._whole.are_as(self._noted(few), few)
        return False

    def digest(self) -> str | None:
        """Return a digest of the operators: where it is equal, so is the captured graph.

        None where that is not known: the forward changes state, or reads a large constant.
        """
        if any(self._whole.changed.values()) or self._whole.has_unknown:
            return None
        modules = [(name, type(module).__qualname__) for name, module in self._model.named_modules()]
        parameters = [name for name, _ in self._model.named_parameters(remove_duplicate=False)]
        tensors = [(k, *_type(x)) for k, x in flat_batch(self._tensors).items() if isinstance(x, Tensor)]  # read or not
        facts = modules, parameters, self._whole.all(), tensors, list(self._beside)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def _noted(self, found: Sequence[Layers]) -> _Notes:
        """Run the model, shortened to the exported ones of these layers."""
        copied = {id(t): self._fake(t) for _, t in _tensors(self._model)}
        batch = tree_map_only(Tensor, self._fake, dict(self._tensors))
        copy = deepcopy(self._model, copied)  # the Python state of the copy may change
        quiet = mock.patch.object(logging.getLogger(FakeTensor.__module__), "disabled", new=True)  # no log of failures
        beside = mock.patch.object(self._mode, "allow_non_fake_inputs", new=True)  # parameters and buffers
        with quiet, beside, put_back(copy), shortened(copy, found), captured_hooks(copy):
            return _Notes(copy, batch, found, self._mode, self._forward, self._results)

    def _fake(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return self._mode.from_tensor(tensor)
        own = isinstance(tensor, nn.Parameter)  # otherwise changes in place would reach the model's tensor
        return tensor if own else tensor.detach().requires_grad_(tensor.requires_grad)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers and other tensor attributes, by name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        yield from ((f"{path}.{name}", value) for name, value in vars(module).items() if isinstance(value, Tensor))


class _Notes(TorchDispatchMode):
    """The operators that a model calls, layer by layer."""

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        found: Sequence[Layers],
        mode: FakeTensorMode,
        forward: Forward,
        results: KnownResults,
    ) -> None:
        super().__init__()
        self._results = results
        self.calls: dict[_Place, list[Hashable]] = {}
        self._made: dict[int, tuple[_Place, int, int]] = {}  # by storage: place, call, result (below 0: written by it)
        self._in: _Place | None = None
        self._prefixes = tuple(f"{layers.path}." for layers in found)
        self._before: dict[_Place, _Place] = {}  # by layer, the one that has run right before it
        self._slots: dict[_Place, dict[Hashable, int]] = {}  # by layer, what it reads of that one, in order
        self._read_from_far: set[_Place] = set()  # the layers that others read, but those right after them
        self._read_last: dict[_Place, dict[Hashable, int]] = {}  # by layer that was the last then, what others read
        self._follows = set[int]()  # the storages whose values follow from weights of layers, or from draws
        self.has_unknown = False  # whether a constant was read whose values are not noted
        self._is_chain = True  # whether each layer runs once, not inside another one, and in the order of their list
        given = ((f"batch {number}", t) for number, t in enumerate(tree_iter(batch)) if isinstance(t, Tensor))
        leaves = [*_tensors(model), *given]
        self._leaves = {_storage(tensor): name for name, tensor in reversed(leaves)}
        self._given = {id(tensor): tensor for _, tensor in leaves}
        self._stays = [tensor.untyped_storage() for _, tensor in leaves]  # otherwise another storage may get its number
        hooks = [hook for layers in found for hook in self._watched(model, layers)]
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

    def _watched(self, model: nn.Module, layers: Layers) -> list[Any]:
        hooks = list[Any]()
        for number in layers.kept:
            layer, place = model.get_submodule(layers.block(number)), (layers.path, number)
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
            last = self._last(place[0])
            if self._in is not None or place in self.calls or (last is not None and last[1] > place[1]):
                self._is_chain = False
                return
            if last is not None:
                self._before[place] = last
            self.calls[place], self._slots[place] = [], {}
        self._in = place

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # which torch asks for at every operator
        result = self._results.of(func, args, kwargs or {})
        if func.namespace == "prim":  # a question about a tensor
            return result
        if name := self._cast(func, args):
            self._leaves[_storage(result)] = name
            self._stays.append(result.untyped_storage())
            return result
        place = self._in or self._outside()
        calls = self.calls.setdefault(place, [])
        read = self._said((args, kwargs), place)
        written = [_storage(tensor) for tensor in written_by(func, args, kwargs or {})]
        if self._follows_from_layers(func, args, kwargs):
            self._follows.update(written, (_storage(x) for x in tree_iter(result) if isinstance(x, Tensor)))
        for number, storage in enumerate(written, 1):  # what is read from now on is a value of this call
            self._leaves.pop(storage, None)
            self._made[storage] = (place, len(calls), -number)
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

    def all(self) -> Hashable:
        """Return all calls, and what is needed to tell which values they read."""
        read = [(place, tuple(slots)) for reads in (self._slots, self._read_last) for place, slots in reads.items()]
        return tuple(self.calls.items()), tuple(read), tuple(self._before.items()), self.result

    @property
    def calls_outside(self) -> list[list[Hashable]]:
        return [calls for (path, _), calls in self.calls.items() if not path]

    def _said(self, value: object, at: _Place = ("", -1)) -> Hashable:
        if isinstance(value, Tensor):
            return self._named(value, at)
        if isinstance(value, (list, tuple)):
            return tuple(self._said(x, at) for x in value)
        if isinstance(value, dict):
            return tuple((name, self._said(x, at)) for name, x in value.items())
        return repr(value)  # True is 1, and -0.0 is 0.0

    def _named(self, tensor: Tensor, at: _Place) -> Hashable:
        """Return the origin of a tensor, as seen from a place, and its shape, dtype, strides and the like.

        What a layer hands on is named by the layer itself if it follows from nothing in layers: capture computes equal
        ones of such values once, so a graph does not say who reads whose.
        """
        storage, (path, number) = _storage(tensor), at
        gradient = tensor.requires_grad, self._is_followed(tensor)
        kind = *_type(tensor), tensor.stride(), tensor.storage_offset(), gradient
        if storage in self._leaves:
            name, own = self._leaves[storage], f"{path}.{number}."
            return ("own", name.removeprefix(own), kind) if path and name.startswith(own) else ("leaf", name, kind)
        if storage not in self._made:
            value = _value(tensor)
            self.has_unknown |= not isinstance(value, str)
            return ("constant", value, kind)
        (home, layer), *place = self._made[storage]
        if (home, layer) == at:
            return ("own", *place, kind)
        if home and (home, layer) == self._before.get(at) and storage in self._follows:
            slots = self._slots[at]
            return ("before", slots.setdefault((*place, kind), len(slots)), kind)
        if home and home != path and (home, layer) == self._last(home) and storage in self._follows:
            slots = self._read_last.setdefault((home, layer), {})
            return ("last", home, slots.setdefault((*place, kind), len(slots)), kind)
        if home:
            self._read_from_far.add((home, layer))
        return (home, layer, *place, kind)

    def _last(self, path: str) -> _Place | None:
        """Return the layer of a list that ran last."""
        return next((place for place in reversed(self.calls) if place[0] == path), None)

    def _follows_from_layers(self, func: torch._ops.OpOverload, *args: object) -> bool:
        """Return whether results follow from values in layers, beyond their shapes, or are drawn in a layer."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._in is not None
        return (
            not func._opname.startswith("new_")
            and not func._opname.endswith("_like")
            and any(
                _storage(x) in self._follows or self._leaves.get(_storage(x), "").startswith(self._prefixes)
                for x in tree_iter(args)
                if isinstance(x, Tensor)
            )
        )

    def _is_followed(self, tensor: Tensor) -> bool:
        """Return whether autograd goes on from a tensor, as it does not from `x.detach().requires_grad_()`."""
        base = tensor if tensor._base is None else tensor._base
        return all(grad_fn(x) is not None or id(x) in self._given for x in (tensor, base))

    def _of(self, layers: Layers, number: int) -> tuple[Hashable, Hashable]:
        """Return what a layer calls and which state it changes, and what is read of it by the layer after it.

        Of the last one, what is read of it outside of the list.
        """
        place, after = (layers.path, number), {before: after for after, before in self._before.items()}
        calls = tuple(self.calls[place]), frozenset(self.changed.get(place, ()))
        return calls, tuple(self._slots[after[place]] if place in after else self._read_last.get(place, ()))

    def kinds(self, layers: Layers, *, with_last: bool) -> Layers | None:
        """Return the layers with those that stand for all of their kind; None if they do not run, or hardly repeat.

        `with_last`: the last layer stands for itself, whatever its kind.
        """
        numbers = [*layers.stands_for]
        if not self._is_chain or any((layers.path, number) not in self.calls for number in numbers):
            return None
        calls, kind, firsts = dict[int, int](), dict[int, int](), dict[Hashable, int]()
        for number in numbers:
            made, read = self._of(layers, number)
            calls[number] = firsts.setdefault(made, number)
            kind[number] = firsts.setdefault((calls[number], read), number)
        last = (layers.path, numbers[-1])
        far = self._read_from_far | (self._read_last.keys() - {last}) | ({last} if with_last else set())
        apart = {number for path, number in far if path == layers.path}
        several = {number for number in layers.before if len(self._slots[layers.path, number]) > 1}
        return chosen(layers.path, calls, kind, apart, several)

    def are_as(self, short: _Notes, found: Sequence[Layers]) -> bool:
        """Return whether the notes of the model shortened to some of these layers cover everything in these notes."""
        if not short._is_chain or self.result != short.result or self.calls_outside != short.calls_outside:
            return False
        if self.changed.get(("", 0)) != short.changed.get(("", 0)) or _order(self) != _order(short):
            return False
        return all(
            (layers.path, n) in short.calls and self._of(layers, n) == short._of(layers, n)
            for layers in found
            for n in layers.kept
        )


def _order(notes: _Notes) -> list[str]:
    """Return the lists, and the stretches outside of them, in the order in which they run."""
    found = list[str]()
    for path, _ in notes.calls:
        if not path or not found or found[-1] != path:
            found.append(path)
    return found


def _type(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _value(tensor: Tensor) -> Hashable:
    """Return the value of a tensor that forward makes of numbers; for others, an object equal to nothing else."""
    if isinstance(tensor, FakeTensor) or tensor.numel() > _MOST_NUMBERS:
        return object()
    with unset_fake_temporarily():
        return repr(tensor.detach().tolist())
