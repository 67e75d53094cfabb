"""A record of how tensors without memory are made, from which `replay` makes them on real memory.

    with fake(): Model() ──every operator──▶ Record: steps on storages ──replay──▶ values

A tensor is a window on a version of a storage, so views need no steps. Every write makes a new version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, UntypedStorage
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.pcg.capture.draws import Draws

Version = tuple[int, int]
"""The number of a storage, and how often it had been written."""
FILLING = "trunc_normal_"
_OVERWRITING = {FILLING} | {
    f"aten::{name}_"
    for name in ("normal", "uniform", "zero", "fill", "copy", "exponential", "random", "bernoulli", "cauchy",
                 "log_normal", "geometric")
}  # fmt: skip
"""The operators that write a tensor without reading it."""
_EMPTY = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
_COPYING = {"aten::_to_copy", "aten::clone", "aten::copy_"}
_LIFT = "aten::lift_fresh"
"""The operator that gives `torch.tensor` its result, of which it is no view although torch says so."""


@dataclass(frozen=True, slots=True)
class Window:
    """A tensor as a step saw it: a part of a version of a storage. `whole`: whether it is all of the storage."""

    version: Version
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Unknown:
    """A fake tensor that was not made under the record."""

    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Real:
    """A real tensor that a step reads. `value`: a copy of it as the step saw it."""

    source: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """An operator that made or wrote storages. Windows stand for the fake tensors among its arguments.

    `draws`: whether it draws from a generator. `reads`: the versions whose values it needs. `made`: the results that
    are new storages, by their place among all results. `writes`: what it writes, and the version that this makes.
    `dtype`: torch's default dtype. `state`: the state of the generator: None where its last draw leaves it, a number
    where the draw of that step leaves it. `is_inside`: whether it was made inside of the block of `fake`.
    """

    func: Callable[..., object]
    name: str
    draws: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[Version, ...]
    made: Mapping[int, Window]
    writes: tuple[tuple[Window, Version], ...]
    dtype: torch.dtype
    is_inside: bool
    state: Tensor | int | None = None

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions that it makes."""
        return (*(window.version for window in self.made.values()), *(version for _, version in self.writes))

    @property
    def leaves(self) -> list[Any]:
        """Return its arguments, without nests."""
        return tree_leaves((self.args, dict(self.kwargs)))


class Record:
    """The steps by which fake tensors were made."""

    def __init__(self) -> None:
        self.steps = list[Step]()
        self._written, self._views = list[Tensor](), dict[int, Tensor]()  # real tensors; by the storages of their views
        self.num_bytes = list[int]()  # of each storage
        self._storages = dict[int, tuple[StorageWeakRef, int]]()  # a reference keeps the key from being used again
        self._num_writes = list[int]()  # of each storage
        self._copies = dict[int, tuple[UntypedStorage, UntypedStorage]]()  # of real storages
        self._draws, self._is_open = Draws(), True

    def note(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], made: object) -> None:
        """Note an operator, unless it has made nothing but views."""
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self._note(func, func._schema.name, draws, args, kwargs, made, written_by(func, args, kwargs))

    def note_filling(self, func: Callable[..., object], tensor: Tensor, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Note a function that fills a tensor by as many draws as their values ask for."""
        self._note(func, FILLING, True, (tensor, *args), kwargs, None, [tensor])

    def _note(
        self, func: Callable[..., object], name: str, draws: bool, args: Sequence[object], kwargs: Mapping[str, object],
        made: object, written: Iterable[Tensor],
    ) -> None:  # fmt: skip
        written = list(written)
        own_args, own_kwargs = tree_map(self._stand_in, (tuple(args), dict(kwargs)))
        reads = [x.version for x in tree_leaves((own_args, own_kwargs)) if isinstance(x, Window)]
        windows = [window for x in written if (window := self.window(x)) is not None]
        new = {i: self._new(x) for i, x in enumerate(tree_leaves(made)) if self._is_new(x)}
        if not new and not windows:
            return
        is_view = getattr(func, "is_view", False) and name != _LIFT
        self._look_at_real(written, windows, args, new if is_view else {})
        for window in windows:
            reads.remove(window.version)
        reads += [w.version for w in windows if not (name in _OVERWRITING and w.whole and w.version not in reads)]
        writes = tuple((window, self._next(window)) for window in windows)
        own_args, own_kwargs = tree_map(self._kept, (own_args, own_kwargs))
        default = torch.get_default_dtype()
        step = Step(func, name, draws, own_args, own_kwargs, tuple(reads), new, writes, default, self._is_open)
        state = self._draws.found(generator_of(step), len(self.steps)) if draws and self._is_open else None
        self.steps.append(replace(step, state=state))

    def close(self) -> None:
        """Put generators where they would be if nothing had been drawn; draws that follow cannot be replayed."""
        self._is_open = False
        self._draws.put_back()

    def window(self, tensor: Tensor) -> Window | None:
        """Return the window of a tensor as it is now, or None if it was not made under this record."""
        storage = tensor.untyped_storage()
        if not isinstance(tensor, FakeTensor) or storage._cdata not in self._storages:
            return None
        _, number = self._storages[storage._cdata]
        self.num_bytes[number] = storage.nbytes()
        whole = tensor.nbytes == storage.nbytes() and is_non_overlapping_and_dense_or_false(tensor)
        place = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return Window((number, self._num_writes[number]), tensor.dtype, *place, whole)

    def has_written(self, tensor: Tensor) -> bool:
        """Return whether the steps would have written a real tensor, which has its old values."""
        return any(tensor.untyped_storage()._cdata == own.untyped_storage()._cdata for own in self._written)

    @property
    def given(self) -> dict[str, Tensor]:
        """The states of generators that steps begin with, and the real tensors that steps read."""
        states = {f"the random state of step {i}": s.state for i, s in enumerate(self.steps)}
        reals = {
            f"tensor {k} of step {i}, {step.name}": _once(x.value)
            for i, step in enumerate(self.steps)
            for k, x in enumerate(step.leaves)
            if isinstance(x, Real)
        }
        return {name: x for name, x in states.items() if isinstance(x, Tensor)} | reals

    @property
    def digest(self) -> str:
        """A digest of the steps: equal if records differ in random states and the values of real tensors alone."""
        generators = dict[Generator, int]()

        def shown(value: object) -> object:
            match value:
                case Generator():
                    return "generator", generators.setdefault(value, len(generators))
                case Real() | Tensor():
                    own = value.value if isinstance(value, Real) else value
                    return "tensor", tuple(own.shape), own.dtype
                case _:
                    return value

        steps = [
            (s.name, tree_map(shown, (s.args, dict(s.kwargs))), s.reads, s.made, s.writes, s.dtype,
             "own" if isinstance(s.state, Tensor) else s.state)
            for s in self.steps
        ]  # fmt: skip
        return hashlib.blake2b(repr(steps).encode(), digest_size=8).hexdigest()

    # ---- what steps depend on ----

    def makers(self) -> dict[Version, int]:
        """Return the number of the step that makes each version."""
        return {version: i for i, step in enumerate(self.steps) for version in step.versions}

    def needed(self, wanted: Iterable[Version]) -> list[int]:
        """Return the steps that lead to versions, and all draws before theirs, in an order that holds little memory.

        Draws keep their order. Every other step follows the last draw that it depends on.
        """
        makers = self.makers()
        steps = self._ancestors(makers, wanted)
        last = max((i for i in steps if self.steps[i].draws), default=-1)
        skipped = [v for step in self.steps[: max(last, 0)] if step.draws for v in step.versions]
        steps |= self._ancestors(makers, skipped)
        after = dict[int, int]()
        for i in sorted(steps):
            step = self.steps[i]
            after[i] = i if step.draws else max((after[makers[v]] for v in step.reads), default=-1)
        return sorted(steps, key=lambda i: (after[i], i))

    def _ancestors(self, makers: Mapping[Version, int], wanted: Iterable[Version]) -> set[int]:
        ahead, ancestors = [makers[version] for version in wanted], set[int]()
        while ahead:
            if (i := ahead.pop()) not in ancestors:
                ancestors.add(i)
                ahead += [makers[version] for version in self.steps[i].reads]
        return ancestors

    def is_empty(self, window: Window, makers: Mapping[Version, int]) -> bool:
        """Return whether nothing has written a tensor: it is as `torch.empty` made it, or a copy of such a one."""
        step = self.steps[makers[window.version]]
        if step.name in _COPYING and step.reads:
            return any(
                self.is_empty(x, makers) for x in step.leaves if isinstance(x, Window) and x.version in step.reads
            )
        return step.name in _EMPTY

    # ---- while steps are noted ----

    def _stand_in(self, value: object) -> object:
        return (self.window(value) or Unknown(tuple(value.shape))) if isinstance(value, FakeTensor) else value

    def _kept(self, value: object) -> object:
        if isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta":
            return Real(value, self._copy(value))
        return value

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a real tensor, which may change; storages that have not changed share one."""
        with unset_fake_temporarily(), torch.no_grad():
            own = tensor.detach().resolve_conj().resolve_neg()
            storage = own.untyped_storage()
            before = self._copies.get(storage._cdata)
            if before is None or not torch.equal(_bytes(before[1]), _bytes(storage)):
                before = self._copies[storage._cdata] = storage, storage.clone()
            empty = torch.empty(0, dtype=own.dtype, device=own.device)
            return empty.set_(before[1], own.storage_offset(), own.size(), own.stride())

    def _look_at_real(
        self, written: Iterable[Tensor], windows: Iterable[Window], args: Sequence[object], new: Mapping[int, Window]
    ) -> None:
        """Note the real tensors that a step would have written, and which new storages may be views of real ones."""
        self._written += [x for x in written if not isinstance(x, FakeTensor)]
        self._written += [real for w in windows if (real := self._views.get(w.version[0])) is not None]
        for window in new.values():
            self._views.update((window.version[0], x) for x in args if isinstance(x, Tensor))

    def _is_new(self, result: object) -> bool:
        return isinstance(result, FakeTensor) and self.window(result) is None

    def _new(self, tensor: Tensor) -> Window:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage), len(self._num_writes)
        self._num_writes.append(0)
        self.num_bytes.append(storage.nbytes())
        window = self.window(tensor)
        assert window is not None
        return window

    def _next(self, window: Window) -> Version:
        number, _ = window.version
        self._num_writes[number] += 1
        return number, self._num_writes[number]


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _once(tensor: Tensor) -> Tensor:
    """Return a tensor without the repetitions that `expand` makes, in which it could not be written."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim])) if stride == 0 else tensor
    return tensor


def generator_of(step: Step) -> Generator:
    """Return the generator that a step draws from."""
    return next((x for x in step.leaves if isinstance(x, Generator)), torch.default_generator)


def written_by(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes. Schemas do not say that batch norm writes its running statistics."""
    arguments = func._schema.arguments
    given = {a.name: args[place] if place < len(args) else kwargs.get(a.name) for place, a in enumerate(arguments)}
    for argument in arguments:
        is_said = argument.alias_info is not None and argument.alias_info.is_write
        if is_said or (argument.name in _STATISTICS and given.get("training", True)):
            yield from (x for x in tree_leaves(given[argument.name]) if isinstance(x, Tensor))


_STATISTICS = ("running_mean", "running_var")
