"""What a step of a user's own model may change, put back afterwards: all that its modules lead to, and generators.

    tensors                               values, memory, `grad`, `requires_grad`; parameters and buffers among them
    lists, dictionaries, sets, objects    what is in them, as far as modules, their classes, closures and the globals of
                                          the files that define their classes lead to them
    generators                            torch's, Python's, NumPy's, those that are led to, `seed_exactly`

It is put back into the same objects, so that whoever holds one, as an optimizer may, sees no change.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.lowering.exact import current_random
from shardwright.lowering.private import FakeTensor

_MOST = 100_000
"""Objects that are looked at. Whoever keeps more, as a whole data set, has the rest left as it is."""
_DATA = (bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set, deque, Tensor)
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_LEADS_NOWHERE = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType)
_LIBRARIES = frozenset({"site-packages", "dist-packages", "builtins"})
_NOTHING = object()
"""In place of an attribute that there is not."""


class Before:
    """The state of a model and of all generators when this was made.

    `parameters`, `buffers`: their values then, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], object]] = []
        tensors: dict[int, _Values] = {}
        pending = deque[object](model.modules())
        for owner in _namespaces(model):
            data = {name: value for name, value in vars(owner).items() if _is_data(name, value)}
            self._undo.append(functools.partial(_put_names, owner, data))
            pending.extend(data.values())
        seen = dict[int, object]()  # which keeps what is made on the way, as else another object might get its number
        while pending and len(seen) < _MOST:
            value = pending.popleft()
            if isinstance(value, _LEADS_NOWHERE) or id(value) in seen:
                continue
            seen[id(value)] = value
            if isinstance(value, Tensor):
                tensors[id(value)] = _Values.of(value)
                continue
            if (undo := _undo(value)) is not None:
                self._undo.append(undo)
            pending.extend(_inside(value))
        self._undo += [values.put_back for values in tensors.values()]
        self._undo += _generators()
        self.parameters = {name: tensors[id(p)].values for name, p in model.named_parameters()}
        self.buffers = {name: tensors[id(b)].values for name, b in model.named_buffers()}

    def put_back(self) -> None:
        """Make it so. May be called several times."""
        for undo in self._undo:
            undo()


@dataclass(frozen=True, eq=False)
class _Values:
    """A tensor, the memory that it had, and what was there."""

    tensor: Tensor
    memory: Tensor
    values: Tensor
    requires_grad: bool
    grad: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Values:
        with torch.no_grad():
            memory = tensor.detach()
            is_plain = tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)
            values = memory.clone() if is_plain else memory
        return cls(tensor, memory, values, tensor.requires_grad, tensor.grad if tensor.is_leaf else None)

    def put_back(self) -> None:
        own = self.tensor
        if self.values is self.memory:
            return
        with torch.no_grad():
            if own.grad_fn is not None and self.memory.is_leaf:
                own.detach_()
            if (own.data_ptr(), own.shape, own.dtype) != (self.memory.data_ptr(), self.memory.shape, self.memory.dtype):
                own.data = self.memory
            if not torch.equal(self.memory, self.values):
                self.memory.copy_(self.values)
        if own.is_leaf:
            own.requires_grad_(self.requires_grad)
            own.grad = self.grad


def _undo(value: Any) -> Callable[[], object] | None:  # noqa: ANN401
    """What puts back what an object itself holds."""
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, (np.random.RandomState, torch.Generator)):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, types.CellType):
        return functools.partial(_put_cell, value, _content(value))
    if isinstance(value, dict):
        return functools.partial(_put_items, value, dict(value))
    if isinstance(value, (list, set, deque)):
        return functools.partial(_put_elements, value, list(value))
    return None


def _inside(value: Any) -> Iterator[object]:  # noqa: ANN401
    """What an object leads to."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif isinstance(value, types.CellType):
        yield _content(value)
    elif isinstance(value, types.FunctionType):
        yield from (*(value.__closure__ or ()), *(value.__defaults__ or ()))
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, nn.Module) or not type(value).__module__.startswith("torch."):
        yield getattr(value, "__dict__", None)


def _put_items(own: dict[Any, Any], items: dict[Any, Any]) -> None:
    if own.keys() != items.keys() or any(own[key] is not value for key, value in items.items()):
        own.clear()
        own.update(items)


def _put_elements(own: Any, elements: list[Any]) -> None:  # noqa: ANN401 - a list, a set or a deque
    if len(own) != len(elements) or any(a is not b for a, b in zip(own, elements, strict=True)):
        own.clear()
        (own.update if isinstance(own, set) else own.extend)(elements)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is assigned yet
        return _NOTHING


def _put_cell(cell: types.CellType, content: object) -> None:
    if content is not _NOTHING:
        cell.cell_contents = content
    elif _content(cell) is not _NOTHING:
        del cell.cell_contents


# ---- classes, and what is global where they are defined ----


def _namespaces(model: nn.Module) -> Iterator[object]:
    """Those of the model's own classes, not of libraries', and the Python modules that they are in."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    homes = {kind: sys.modules.get(kind.__module__) for kind in kinds}
    own = [kind for kind, home in homes.items() if _LIBRARIES.isdisjoint(Path(_file(home)).parts)]
    yield from own
    yield from dict.fromkeys(homes[kind] for kind in own)


def _file(home: object) -> str:
    return getattr(home, "__file__", None) or ("" if home is sys.modules.get("__main__") else "builtins")


def _is_data(name: str, value: object) -> bool:
    return isinstance(value, (*_DATA, *_GENERATORS)) and not name.startswith("__")


def _put_names(owner: Any, data: dict[str, Any]) -> None:  # noqa: ANN401 - a class or a Python module
    now = dict(vars(owner))
    for name in {**now, **data}:
        if name in data and now.get(name, _NOTHING) is not data[name]:
            setattr(owner, name, data[name])
        elif name not in data and _is_data(name, now[name]):
            delattr(owner, name)


def _generators() -> Iterator[Callable[[], object]]:
    """Those that belong to no object of the model."""
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    yield functools.partial(random.setstate, random.getstate())
    yield functools.partial(np.random.set_state, np.random.get_state())
    if torch.cuda.is_initialized():
        yield functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
    if (exact := current_random()) is not None:
        yield functools.partial(exact.load_state_dict, exact.state_dict())


def random_states() -> dict[str, str]:
    """A digest of the state of each generator that a forward may draw from, by what it is."""
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
