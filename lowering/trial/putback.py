"""The state that a step of a user's own model may change, and that is put back afterwards.

    attributes of modules   by `pcg.capture.places`
    tensors                 values, memory, `grad`, `requires_grad`, of parameters, buffers and attributes
    globals                 data in the files that define the model's classes, except in libraries
    generators              torch's, Python's, NumPy's, those that modules hold, `seed_exactly`

The state is put back into the same objects, so an optimizer that holds one sees no change.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.lowering.private import FakeTensor
from shardwright.lowering.random.exact import current_random
from shardwright.pcg.capture.places import CONTAINERS, PLAIN, Snapshot

_LIBRARIES = frozenset({"site-packages", "dist-packages", "builtins"})
_NOTHING = object()
"""A stand-in for the value of a missing name."""


class Before:
    """The state of a model and of all generators when this object was made.

    `parameters`, `buffers`: their values then, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        places = Snapshot(model)
        held = [place.value for place in places.places.values()]
        tensors_of_model = (*model.parameters(), *model.buffers())
        tensors = {id(x): _Values.of(x) for x in (*tensors_of_model, *held) if isinstance(x, Tensor)}
        homes = [partial(_put_names, home, _data(home), _insides(_data(home).values())) for home in _homes(model)]
        values = [each.put_back for each in tensors.values()]
        self._undo: list[Callable[[], object]] = [places.put_back, *homes, *values, *_generators(held)]
        self.parameters = {name: tensors[id(p)].values for name, p in model.named_parameters()}
        self.buffers = {name: tensors[id(b)].values for name, b in model.named_buffers()}

    def put_back(self) -> None:
        """Restore the state. This may be called several times."""
        for undo in self._undo:
            undo()


@dataclass(frozen=True, eq=False)
class _Values:
    """A tensor, its memory then, and a copy of the values there."""

    tensor: Tensor
    memory: Tensor
    values: Tensor
    requires_grad: bool
    grad: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Values:
        with torch.no_grad():
            memory = tensor.detach()
            is_plain = tensor.layout is torch.strided and not isinstance(tensor, FakeTensor) and not tensor.is_meta
            values = memory.clone() if is_plain else memory
        return cls(tensor, memory, values, tensor.requires_grad, tensor.grad if tensor.is_leaf else None)

    def put_back(self) -> None:
        tensor = self.tensor
        if self.values is self.memory:
            return
        with torch.no_grad():
            if tensor.grad_fn is not None and not self.requires_grad:
                tensor.detach_()
            if (tensor.data_ptr(), tensor.shape, tensor.dtype) != (
                self.memory.data_ptr(),
                self.memory.shape,
                self.memory.dtype,
            ):
                tensor.data = self.memory
            if not torch.equal(self.memory, self.values):
                self.memory.copy_(self.values)
        if tensor.is_leaf:
            tensor.requires_grad_(self.requires_grad)
            tensor.grad = self.grad


# ---- globals ----


def _homes(model: nn.Module) -> Iterator[object]:
    """Yield the Python modules that define the model's classes, except libraries."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    for name in dict.fromkeys(kind.__module__ for kind in kinds):
        file = getattr(sys.modules.get(name), "__file__", None) or ("" if name == "__main__" else "builtins")
        if _LIBRARIES.isdisjoint(Path(file).parts):
            yield sys.modules[name]


def _data(home: object) -> dict[str, Any]:
    return {name: value for name, value in vars(home).items() if _is_data(name, value)}


def _is_data(name: str, value: object) -> bool:
    return isinstance(value, (*PLAIN, *CONTAINERS, Tensor)) and not name.startswith("__")


def _insides(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the lists, dictionaries and sets among some values, each with a copy."""
    return [(value, value.copy()) for value in values if isinstance(value, (list, dict, set))]


def _put_names(home: Any, data: dict[str, Any], insides: list[tuple[Any, Any]]) -> None:  # noqa: ANN401
    for value, inside in insides:
        if value != inside:
            value.clear()
            value.extend(inside) if isinstance(value, list) else value.update(inside)
    now = dict(vars(home))
    for name in {**now, **data}:
        if name in data and now.get(name, _NOTHING) is not data[name]:
            setattr(home, name, data[name])
        elif name not in data and _is_data(name, now[name]):
            delattr(home, name)


# ---- generators ----


def _generators(held: Iterable[object]) -> Iterator[Callable[[], object]]:
    yield partial(torch.set_rng_state, torch.get_rng_state())
    yield partial(random.setstate, random.getstate())
    yield partial(np.random.set_state, np.random.get_state())
    if torch.cuda.is_initialized():
        yield partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    if (exact := current_random()) is not None:
        yield partial(exact.load_state_dict, exact.state_dict())
    for value in held:
        if isinstance(value, random.Random):
            yield partial(value.setstate, value.getstate())
        elif isinstance(value, (np.random.RandomState, torch.Generator)):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, np.random.Generator):
            yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)


def random_states() -> dict[str, str]:
    """Return, by the generator's name, a digest of the state of each generator that a forward may draw from."""
    exact = current_random()
    states: dict[str, object] = {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "NumPy's random": pickle.dumps(np.random.get_state()),
        "seed_exactly": exact and exact.state_dict(),
    }
    if torch.cuda.is_initialized():
        states["CUDA's generators"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return {name: hashlib.sha256(repr(state).encode()).hexdigest() for name, state in states.items()}
