"""The places where a model holds Python state: in its modules' attributes, lists, dictionaries and objects in these.

Classes count too, and so do the global variables, closures and defaults that methods name, and those of functions that
methods call. The state of libraries does not, but for results that are kept: by `functools.cache`, by distributions.

    model ──Snapshot──▶ every place by its path, every holder with its parts ──put_back──▶ the model as it was

A holder has parts that can change: a dictionary (that of a module's attributes too), a list, a set, a class.
"""

from __future__ import annotations

import random
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution, Transform

PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (list, tuple, deque, dict, set, frozenset)
_NAMED = ("_parameters", "_buffers", "_modules")
"""The dictionaries of every module whose parts are addressed like attributes."""
_KEEPING = (Distribution, Transform)
"""Objects of torch that keep what they have computed."""
_PLAIN_TYPES = frozenset(PLAIN)
_WITHOUT_PARTS = (*PLAIN, type, Tensor)
_Cached = type(cache(int))
"""The type of functions that keep their results."""
_DEEPEST = 8
_LARGEST = 10_000
"""The largest number of parts of a container that is looked into."""
Parts = dict[Hashable, Any]
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_STANDARD = sysconfig.get_path("stdlib")


class Origin(NamedTuple):
    """The attribute from which a place is reached, of the module at path `owner` or of its class; "": all of them.

    `is_shared`: whether it belongs to no single module.
    """

    owner: str
    attribute: str = ""
    is_shared: bool = False


class Place(NamedTuple):
    """The place of a value: at `key` of a holder. `kind`: "_buffers" and so on for those of a module, else "".

    `around`: the place of the holder, if that is a tuple.
    """

    origin: Origin
    holder: Any
    key: Hashable
    value: Any
    kind: str = ""
    around: Place | None = None

    def put(self, value: object) -> None:
        """Put another value there. In a tuple, that puts another tuple in its place."""
        if not isinstance(self.holder, tuple) or self.around is None:
            _write(self.holder, {**_read(self.holder), self.key: value})
            return
        parts = {**_read(self.around.now()), self.key: value}
        make = getattr(self.holder, "_make", type(self.holder))
        self.around.put(make(parts.values()))

    def now(self) -> Any:  # noqa: ANN401
        """Return the value that is there now."""
        return _read(self.holder if self.around is None else self.around.now())[self.key]


class Names(NamedTuple):
    """The global variables that a function names, or would make."""

    namespace: dict[str, Any]
    names: frozenset[str]


class Holder(NamedTuple):
    """An object that has parts that can change, and these parts."""

    origin: Origin
    object: Any
    parts: Parts

    def write(self, parts: Parts) -> None:
        """Give it these parts and no others."""
        now = _read(self.object)
        if (now or parts) and (list(now) != list(parts) or any(now[key] is not value for key, value in parts.items())):
            _write(self.object, parts)


class Snapshot:
    """The state that a model holds at some time. `places`: by path, such as "blocks.0.step" or "history[3]".

    `caches`: functions that keep their results, with the number of results so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: dict[str, Place] = {}
        self.holders: list[Holder] = []
        self.caches: list[tuple[Any, int]] = []
        self._seen: dict[int, object] = {id(module): module for module in model.modules()}
        for owner, module in model.named_modules():
            self._module(Origin(owner), module)

    def put_back(self) -> None:
        """Give every holder the parts that it had; functions forget all results if they have kept new ones."""
        for holder in self.holders:
            holder.write(holder.parts)
        for function, results in self.caches:
            if function.cache_info().misses != results:
                function.cache_clear()

    def put(self, origins: Collection[Origin], swap: Callable[[object], object]) -> None:
        """Give back only parts reached from some attributes, with values put through `swap`."""
        for holder in self.holders:
            origin, parts = holder.origin, holder.parts
            if not origin.attribute:
                own = {key for key in {*parts, *_read(holder.object)} if origin._replace(attribute=str(key)) in origins}
                now = {key: value for key, value in _read(holder.object).items() if key not in own}
                holder.write({**now, **{key: swap(parts[key]) for key in parts if key in own}})
            elif origin in origins:
                holder.write({key: swap(value) for key, value in parts.items()})

    def _module(self, origin: Origin, module: nn.Module) -> None:
        prefix = f"{origin.owner}." if origin.owner else ""
        self.holders.append(Holder(origin, vars(module), attributes := _read(vars(module))))
        for name, value in attributes.items():
            own = Origin(origin.owner, str(name), origin.is_shared)
            if name not in _NAMED:
                self._place(f"{prefix}{name}", Place(own, vars(module), name, value), 0)
                continue
            self.holders.append(Holder(origin, value, _read(value)))
            for key, part in value.items():
                own = Origin(origin.owner, key, origin.is_shared)
                self.places[f"{prefix}{key}"] = Place(own, value, key, part, str(name))
        self._classes(type(module), origin._replace(is_shared=True))

    def _classes(self, of: type, shared: Origin) -> None:
        for kind in of.__mro__:
            if id(kind) not in self._seen and not _is_torchs(kind):
                self._seen[id(kind)] = kind
                self._parts(kind.__name__, Place(shared, None, "", kind), 0)
                for value in vars(kind).values():
                    self._function(value, shared)

    def _function(self, value: object, shared: Origin) -> None:
        """Note what a user's function names: globals, variables of outer functions, defaults, and functions."""
        function = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
        if isinstance(function, _Cached):
            self._caching([function])
            function = function.__wrapped__
        if not isinstance(function, FunctionType) or id(function) in self._seen:
            return
        self._seen[id(function)] = function
        if is_installed(function):
            self._caching(function.__globals__.get(name) for name in _names_in(function.__code__))
            return
        own = vars(function), dict(enumerate(function.__defaults__ or ())), function.__kwdefaults__ or {}
        named = Names(function.__globals__, frozenset(_names_in(function.__code__)))
        for name, holder in ((function.__module__, named), *((function.__qualname__, each) for each in own)):
            self._parts(name, Place(shared, None, "", holder), 0, "{}.{}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = Place(shared._replace(attribute=name), None, "", cell)
            self._parts(f"{function.__qualname__}.{name}", place, 0, "{}")

    def _caching(self, named: Iterable[object]) -> None:
        """Note those functions that keep their results."""
        self.caches += [(each, each.cache_info().misses) for each in named if isinstance(each, _Cached)]

    def _place(self, path: str, place: Place, depth: int) -> None:
        """Note a place, and the places that its value holds; a shared value is looked at once."""
        value = place.value
        if isinstance(value, weakref.ref):  # keeps nothing alive
            return
        self.places[path] = place
        if type(value) in _PLAIN_TYPES or id(value) in self._seen or depth == _DEEPEST:
            return
        is_container = isinstance(value, CONTAINERS)
        if not is_container and isinstance(value, _WITHOUT_PARTS):
            return
        self._seen[id(value)] = value
        if is_container:
            self._parts(path, place, depth)
        elif callable(value) and not isinstance(value, _KEEPING):
            del self._seen[id(value)]
            self._function(value, place.origin._replace(attribute="", is_shared=True))
        elif isinstance(value, _KEEPING) or _is_looked_into(place):
            self._parts(path, place._replace(value=vars(value)), depth, "{}.{}")
            if not is_installed(type(value)):
                self._classes(type(value), place.origin._replace(attribute="", is_shared=True))

    def _parts(self, path: str, place: Place, depth: int, called: str = "{}[{!r}]") -> None:
        """Note the places that the value of a place holds."""
        parts = _read(holder := place.value)
        if len(parts) > _LARGEST:
            return
        self.holders.append(Holder(place.origin, holder, parts))
        called = "{}.{}" if isinstance(holder, type) else called
        around = place if isinstance(holder, tuple) else None
        for key, part in parts.items():
            own = (
                place.origin if place.origin.attribute else Origin(place.origin.owner, str(key), place.origin.is_shared)
            )
            self._place(called.format(path, key), Place(own, holder, key, part, around=around), depth + 1)


@contextmanager
def put_back(model: nn.Module) -> Generator[None]:
    """Restore the model and all generators after the context, whatever changed inside and whether it failed."""
    before, held = Snapshot(model), generators(model)
    states = [get() for get, _ in held]
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    values = (place.value for place in before.places.values() if id(place.value) not in own)
    tensors = [(x, x.detach().clone()) for x in values if isinstance(x, Tensor) and not _is_unreal(x)]
    try:
        yield
    finally:
        before.put_back()
        for (_, restore), state in zip(held, states, strict=True):
            restore(state)
        for tensor, value in tensors:
            if not is_same(tensor, value):
                with torch.no_grad():
                    tensor.copy_(value)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit: of any dtype, and NaN equals itself."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _is_unreal(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.layout is not torch.strided


def generators(model: nn.Module) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return how to read and set the state of each generator: torch's, Python's, NumPy's, those of modules."""
    accessors: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
    ]
    values = (value for module in model.modules() for value in vars(module).values())
    others = (value for value in values if type(value) not in _PLAIN_TYPES and not isinstance(value, CONTAINERS))
    for held in (torch.default_generator, *others):
        if isinstance(held, random.Random):
            accessors.append((held.getstate, held.setstate))
        elif isinstance(held, np.random.Generator):
            bits = held.bit_generator
            accessors.append((partial(getattr, bits, "state"), partial(setattr, bits, "state")))
        elif isinstance(held, (torch.Generator, np.random.RandomState)):
            accessors.append((held.get_state, held.set_state))
    return accessors


def is_installed(thing: Any) -> bool:  # noqa: ANN401
    """Return whether a function or class is Python's, ours or a library's: these may have caches and counters."""
    module = sys.modules.get(thing.__module__ or "")
    file = getattr(module, "__file__", None) or ""
    return thing is not SimpleNamespace and (
        (not file and thing.__module__ != "__main__")
        or thing.__module__.split(".")[0] == __name__.split(".")[0]  # hooks of ours, while a model is captured
        or _is_library(file)
    )


@cache
def _is_library(file: str) -> bool:
    """Return whether a source file is Python's own or of an installed package."""
    return file.startswith(_STANDARD) or not _INSTALLED.isdisjoint(Path(file).parts)


def _is_looked_into(place: Place) -> bool:
    """Return whether an object is no library's that modules share: no logger, pool or lock."""
    kind = type(place.value)
    return hasattr(place.value, "__dict__") and not (
        _is_torchs(kind) or (place.origin.is_shared and is_installed(kind))
    )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("torch", "builtins")


def _read(holder: Any) -> Parts:  # noqa: ANN401
    """Return the parts of a holder by key; for a class, its attributes that are no part of its definition."""
    if isinstance(holder, dict):  # as nearly all are
        return dict(holder)
    if isinstance(holder, type):
        return {name: value for name, value in vars(holder).items() if _is_state(name, value)}
    if isinstance(holder, Names):
        named = {name: holder.namespace[name] for name in holder.names if name in holder.namespace}
        return {name: value for name, value in named.items() if not isinstance(value, (type, ModuleType))}
    if isinstance(holder, CellType):
        try:
            return {"cell_contents": holder.cell_contents}
        except ValueError:  # nothing is in it yet
            return {}
    return {part: part for part in holder} if isinstance(holder, (set, frozenset)) else dict(enumerate(holder))


def _is_state(name: str, value: object) -> bool:
    return not name.startswith("__") and isinstance(value, (*PLAIN, *CONTAINERS, Tensor))


def _write(holder: Any, parts: Parts) -> None:  # noqa: ANN401
    if isinstance(holder, type):
        for name in _read(holder).keys() - parts.keys():
            delattr(holder, str(name))
        for name in (name for name, value in parts.items() if vars(holder).get(str(name), holder) is not value):
            setattr(holder, str(name), parts[name])
    elif isinstance(holder, Names):
        for name in _read(holder).keys() - parts.keys():
            del holder.namespace[str(name)]
        holder.namespace.update({str(name): value for name, value in parts.items()})
    elif isinstance(holder, CellType) and parts:
        holder.cell_contents = parts["cell_contents"]
    elif isinstance(holder, list):
        holder[:] = parts.values()
    elif isinstance(holder, (dict, set)):
        holder.clear()
        holder.update(parts)
    elif isinstance(holder, deque):
        holder.clear()
        holder.extend(parts.values())
