"""What autograd keeps of a step: values, or handles from which backward makes them again.

A program runs a function as a *region* where what backward needs of it is to be made again. Autograd then keeps a
handle of each value that is made inside, and the region keeps its operands. The first handle that backward opens runs
the function again, up to the last value that is needed, where `torch.utils.checkpoint` stops too; every value is let go
of as its reader has it. Unlike there, what a region gives can be made again for its readers outside as well, operands
may be handles themselves (of gathered parameters, of other regions), and parameters are not taken for activations.

Only autograd keeps a region, by its handles; neither its results nor its hooks do. A thread of gloo that has sent a
tensor holds that, and the hooks that were there, until it comes to let go of them, at another time on each rank. But
with a region go its handles of gathered parameters, and these all ranks have to free, and gather again, alike.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright.lowering import private
from shardwright.lowering.runtime.apart import Apart, PutOff
from shardwright.lowering.runtime.blocks import Blocks

Results = Any
"""A tensor, or a tuple of them."""
Run = Callable[..., Results]


class Handle(Protocol):
    """What is kept of a tensor that is made again."""

    def tensor(self) -> Tensor: ...


class Saved:
    """What autograd keeps of the programs of one module."""

    def __init__(self, blocks: Blocks, stored: Iterable[Tensor], device: torch.device) -> None:
        """`stored`: parameters and buffers, which are always there."""
        self.blocks, self.device = blocks, device
        self.stored = {private.storage_key(tensor) for tensor in stored}
        self.given: dict[int, _Result] = {}  # what is made again for its readers, by address
        self.put_off: list[Apart] = []  # gradients of weights, for the second part of backward

    @contextmanager
    def hooks(self) -> Generator[None]:
        """Under this, autograd keeps handles of what is gathered or made again."""
        with self.giving(), saved_tensors_hooks(self.pack, unpack):
            yield

    @contextmanager
    def giving(self) -> Generator[None]:
        """A program runs: only now are its regions' results known as such."""
        try:
            yield
        finally:
            self.given.clear()

    def pack(self, tensor: Tensor) -> Tensor | Handle:
        """A tensor as it is kept outside of the region that made it."""
        packed = self.blocks.pack(tensor)
        if packed is not tensor or not self.given:
            return packed
        found = self.given.get(private.storage_key(tensor))
        return tensor if found is None else found.region.handle(found.number, tensor)

    def is_there(self, tensor: Tensor, known: set[int]) -> bool:
        """Whether it is one of the known ones, by address, or what is always there."""
        return (where := private.storage_key(tensor)) in known or where in self.stored

    # ---- called by the program ----

    def checkpoint(self, function: Run, *operands: Any, random: bool = False, **options: Any) -> Results:
        """The function's results, which are kept. `random`: it draws from the generator."""
        return self._run(function, operands, options, random=random)[1]

    def remade(self, function: Run, *operands: Any, random: bool = False, **options: Any) -> Results:
        """The function's results, which are made again for who reads them, as everything inside is."""
        region, results = self._run(function, operands, options, random=random)
        if region is not None:
            for number, result in enumerate(results if isinstance(results, tuple) else (results,)):
                if isinstance(result, Tensor) and result.numel() and private.storage_key(result) not in region.known:
                    self.given[private.storage_key(result)] = _Result(private.weakly(result), region, number)
        return results

    def apart(self, function: Run, operands: tuple[Any, ...], weights: tuple[Tensor, ...]) -> Tensor:
        """The function's result, whose backward puts off the gradients of weights."""
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in operands):
            return function(*operands, *weights)
        return PutOff.apply(self.put_off, function, weights, *operands)

    def _run(
        self, function: Run, operands: tuple[Any, ...], options: Mapping[str, Any], *, random: bool
    ) -> tuple[_Region | None, Results]:
        if not torch.is_grad_enabled():
            return None, function(*operands, **options)
        generator = private.default_generator(self.device) if random else None
        region = _Region(self, function, operands, options, generator)
        with saved_tensors_hooks(_weakly(region.pack), unpack):
            return region, function(*operands, **options)


class _Operand(NamedTuple):
    kept: Tensor | Handle
    requires_grad: bool

    def tensor(self) -> Tensor:
        return unpack(self.kept).detach().requires_grad_(self.requires_grad)


class _Inside(NamedTuple):
    """Handle of a value that a region makes."""

    region: _Region
    number: int

    def tensor(self) -> Tensor:
        return self.region.value(self.number)


class _Result(NamedTuple):
    """What a region gave, whoever sees its memory: views, and what a change of layout passes on.

    `memory` keeps the address, which no other tensor has while this is there, but not what lies in it.
    """

    memory: private.StorageWeakRef
    region: _Region
    number: int


class _Given(NamedTuple):
    """Handle of a view of a region's result."""

    region: _Region
    number: int
    place: tuple[Any, Any, Any]

    def tensor(self) -> Tensor:
        return self.region.result(self.number).as_strided(*self.place)


class _Enough(Exception):  # noqa: N818
    """All that backward needs is there."""


class _Region:
    """One run of a function that backward may run again."""

    def __init__(
        self,
        saved: Saved,
        function: Run,
        operands: Iterable[Any],
        options: Mapping[str, Any],
        generator: torch.Generator | None,
    ) -> None:
        self.saved, self.function, self.options = saved, function, options
        self.known = _addresses(operands)
        self.operands = [_Operand(saved.pack(x), x.requires_grad) if isinstance(x, Tensor) else x for x in operands]
        self.generator, self.state = generator, generator.get_state() if generator is not None else None
        self.num_inside = 0
        self.handles = Counter[int]()  # of results
        self.values: dict[int, Tensor] = {}
        self.results: dict[int, Tensor] = {}
        self.left = Counter[int]()  # handles of results that backward has not opened yet

    # ---- forward ----

    def pack(self, tensor: Tensor) -> Tensor | Handle:
        kept = self.saved.pack(tensor)
        if kept is not tensor or self.saved.is_there(tensor, self.known):
            return kept
        self.num_inside += 1
        return _Inside(self, self.num_inside - 1)

    def handle(self, number: int, part: Tensor) -> _Given:
        """Of a view of the result of this number."""
        self.handles[number] += 1
        return _Given(self, number, (part.size(), part.stride(), part.storage_offset()))

    # ---- backward ----

    def value(self, number: int) -> Tensor:
        if number not in self.values:
            self._run_again()
        return self.values.pop(number)

    def result(self, number: int) -> Tensor:
        if number not in self.results:
            self._run_again()
        self.left[number] -= 1
        return self.results[number] if self.left[number] > 0 else self.results.pop(number)

    def _run_again(self) -> None:
        operands = [x.tensor() if isinstance(x, _Operand) else x for x in self.operands]
        saved, known, found = self.saved, _addresses(operands), list[Tensor]()
        enough = 0 if self.handles else self.num_inside

        def collect(tensor: Tensor) -> None:
            if saved.pack(tensor) is tensor and not saved.is_there(tensor, known):
                found.append(tensor.detach())
                if len(found) == enough:
                    raise _Enough

        results: Results = ()
        hooks = saved_tensors_hooks(collect, _nothing)
        with torch.enable_grad(), saved.blocks.again(), saved.giving(), self._drawing(), hooks, suppress(_Enough):
            results = self.function(*operands, **self.options)
        self.values = dict(enumerate(found))
        found.clear()  # which the values' own history still refers to, by the hook
        given = results if isinstance(results, tuple) else (results,)
        self.left = self.handles.copy()
        self.results = {number: given[number].detach() for number in self.handles}

    def _drawing(self) -> AbstractContextManager[None]:
        """With the generator as it was."""
        return nullcontext() if self.generator is None else _drawing(self.generator, self.state)


@contextmanager
def _drawing(generator: torch.Generator, state: Tensor | None) -> Generator[None]:
    assert state is not None
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


def _weakly(pack: Callable[[Tensor], Tensor | Handle]) -> Callable[[Tensor], Tensor | Handle]:
    """The same as a hook that does not keep its region."""
    method = weakref.WeakMethod(pack)

    def weak(tensor: Tensor) -> Tensor | Handle:
        bound = method()
        assert bound is not None
        return bound(tensor)

    return weak


def unpack(kept: Tensor | Handle) -> Tensor:
    """What a handle stands for; a tensor stands for itself."""
    return kept if isinstance(kept, Tensor) else kept.tensor()


def _nothing(kept: None) -> Tensor:
    raise AssertionError("what runs again has no backward")


def _addresses(operands: Iterable[Any]) -> set[int]:
    """Of tensors, also of those in mappings."""
    found = set[int]()
    for x in operands:
        tensors = x.values() if isinstance(x, dict) else (x,)
        found.update(private.storage_key(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    return found
