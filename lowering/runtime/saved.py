"""The values that autograd saves in a step, or handles from which backward recomputes or fetches them.

A program runs a function as a *region* if backward is to recompute the values that it needs. Autograd then keeps a
handle of each value made inside, and the region keeps its operands. The first handle that backward opens runs the
function again, up to the last value that is needed, as `torch.utils.checkpoint` does. Every value is released when its
reader has it. In contrast to `torch.utils.checkpoint`, a region's results can also be recomputed for readers outside,
operands may be handles themselves (of gathered parameters, of other regions), and parameters are not taken for
activations.

Only autograd keeps a region alive, through its handles; neither results nor hooks do. A thread of gloo that has sent a
tensor holds the tensor and its hooks until some later time, which differs between ranks. If hooks kept the region, its
handles of gathered parameters would be released at different times, but all ranks must free and gather blocks alike.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwright.lowering import private
from shardwright.lowering.random.drawing import in_state
from shardwright.lowering.runtime.apart import Apart, PutOff
from shardwright.lowering.runtime.blocks import Blocks
from shardwright.lowering.runtime.foreign import Once, calls_foreign
from shardwright.lowering.runtime.host import Trip
from shardwright.lowering.runtime.views import View

Results = Any
"""A tensor, or a tuple of tensors."""
Run = Callable[..., Results]


class Handle(Protocol):
    """The stand-in for a saved tensor that is gathered, recomputed or fetched from the host."""

    def tensor(self) -> Tensor: ...


class Saved:
    """The values that autograd saves for one program."""

    def __init__(
        self, blocks: Blocks, stored: Iterable[Tensor], device: torch.device, trips: Callable[[], Trip] | None = None
    ) -> None:
        """Start without saved values.

        `stored`: parameters and buffers, which always exist. `trips`: makes the values of a run that wait on the host.
        """
        self.blocks, self.device, self.trips = blocks, device, trips
        self.trip: Trip | None = None  # of the run whose forward is going on
        self.stored = {private.storage_key(tensor) for tensor in stored}
        self.given: dict[int, _Result] = {}  # results that are recomputed for their readers, by address
        self.put_off: list[Apart] = []  # gradients of weights, for the second part of backward

    @contextmanager
    def hooks(self) -> Generator[None]:
        """Let autograd keep handles of tensors that are gathered, recomputed or on the host."""
        self.trip = self.trips() if self.trips is not None and torch.is_grad_enabled() else None
        with self.giving(), saved_tensors_hooks(self._pack, unpack):
            try:
                yield
            finally:
                if self.trip is not None:
                    self.trip.end()
                self.trip = None

    @contextmanager
    def giving(self) -> Generator[None]:
        """Surround a run of the program, during which results of its regions are recognized."""
        try:
            yield
        finally:
            self.given.clear()

    def pack(self, tensor: Tensor) -> Tensor | Handle:
        """Return the object that autograd keeps of a tensor outside the region that made it."""
        packed = self.blocks.pack(tensor)
        if packed is tensor and self.trip is not None:
            packed = self.trip.pack(tensor)
        if packed is not tensor or not self.given:
            return packed
        found = self.given.get(private.storage_key(tensor))
        return tensor if found is None else found.region.handle(found.number, tensor)

    def _pack(self, tensor: Tensor) -> Tensor | Handle:
        """Return the same outside of regions, where a tensor may leave for the host after it has been kept."""
        packed = self.pack(tensor)
        return self.trip.perhaps(tensor) if packed is tensor and self.trip is not None else packed

    def is_there(self, tensor: Tensor, known: set[int]) -> bool:
        """Return whether a tensor is known, by address, or is stored permanently."""
        return (where := private.storage_key(tensor)) in known or where in self.stored

    # ---- called by the program ----

    def checkpoint(self, function: Run, *operands: Any, random: bool = False, **options: Any) -> Results:
        """Run a function as a region whose results are kept. `random`: it draws from the generator."""
        return self._run(function, operands, options, random=random)[1]

    def remade(self, function: Run, *operands: Any, random: bool = False, **options: Any) -> Results:
        """Run a function as a region whose results, too, are recomputed for their readers."""
        region, results = self._run(function, operands, options, random=random)
        if region is not None:
            for number, result in enumerate(results if isinstance(results, tuple) else (results,)):
                if isinstance(result, Tensor) and result.numel() and private.storage_key(result) not in region.known:
                    self.given[private.storage_key(result)] = _Result(private.weakly(result), region, number)
        return results

    def offload(self, tensor: Tensor) -> None:
        """Let a value wait for backward on the host."""
        if self.trip is not None:
            self.trip.offload(tensor)

    def release(self) -> None:
        """Give back the memory of values that have left for the host."""
        if self.trip is not None:
            self.trip.release()

    def before(self, tensor: Tensor) -> None:
        """Let values return from the host before backward goes through this one."""
        if self.trip is not None:
            self.trip.before(tensor)

    def apart(self, function: Run, operands: tuple[Any, ...], weights: tuple[Tensor, ...]) -> Tensor:
        """Run a function whose backward defers the gradients of weights."""
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in operands):
            return function(*operands, *weights)
        return PutOff.apply(self.put_off, function, weights, *operands)

    def _run(
        self, function: Run, operands: tuple[Any, ...], options: Mapping[str, Any], *, random: bool
    ) -> tuple[_Region | None, Results]:
        if not torch.is_grad_enabled():
            return None, function(*operands, **options)
        generator = private.default_generator(self.device) if random else None
        operands = tuple(Once(x, self.pack, unpack, generator) if calls_foreign(x) else x for x in operands)
        region = _Region(self, function, operands, options, generator)
        with saved_tensors_hooks(_weakly(region.pack), unpack):
            return region, function(*operands, **options)


class _Operand(NamedTuple):
    kept: Tensor | Handle
    requires_grad: bool

    def tensor(self) -> Tensor:
        return unpack(self.kept).detach().requires_grad_(self.requires_grad)


def _again(operand: object) -> object:
    """Return an operand for a function that runs again."""
    if isinstance(operand, Once):
        return operand.again()
    return operand.tensor() if isinstance(operand, _Operand) else operand


class _Inside(NamedTuple):
    """The handle of a value that a region makes."""

    region: _Region
    number: int

    def tensor(self) -> Tensor:
        return self.region.value(self.number)


class _Result(NamedTuple):
    """A result of a region, recognized by its memory, also through views and changes of layout.

    `memory` reserves the address, so that no other tensor gets it meanwhile, but does not keep the data.
    """

    memory: private.StorageWeakRef
    region: _Region
    number: int


class _Given(NamedTuple):
    """The handle of a view of a region's result."""

    region: _Region
    number: int
    view: View

    def tensor(self) -> Tensor:
        return self.view.on(self.region.result(self.number))


class _Enough(Exception):  # noqa: N818
    """The signal that a recomputation has made all values that backward needs."""


class _Region:
    """A run of a function that backward may run again."""

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
        """Return a handle of `part`, a view of the result with this number."""
        self.handles[number] += 1
        return _Given(self, number, View.of(part))

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
        operands = [_again(x) for x in self.operands]
        saved, known, found = self.saved, _addresses(operands), list[Tensor]()
        enough = 0 if self.handles else self.num_inside

        def collect(tensor: Tensor) -> None:
            if saved.pack(tensor) is tensor and not saved.is_there(tensor, known):
                found.append(tensor.detach())
                if len(found) == enough:
                    raise _Enough

        results: Results = ()
        hooks = saved_tensors_hooks(collect, _nothing)
        drawing = in_state(self.generator, self.state)
        with torch.enable_grad(), saved.blocks.again(), saved.giving(), drawing, hooks, suppress(_Enough):
            results = self.function(*operands, **self.options)
        self.values = dict(enumerate(found))
        found.clear()  # the hook, to which the values' own history refers, still has this list
        given = results if isinstance(results, tuple) else (results,)
        self.left = self.handles.copy()
        self.results = {number: given[number].detach() for number in self.handles}


def _weakly(pack: Callable[[Tensor], Tensor | Handle]) -> Callable[[Tensor], Tensor | Handle]:
    """Return a hook that calls `pack` but does not keep its region alive."""
    method = weakref.WeakMethod(pack)

    def weak(tensor: Tensor) -> Tensor | Handle:
        bound = method()
        assert bound is not None
        return bound(tensor)

    return weak


def unpack(kept: Tensor | Handle) -> Tensor:
    """Return the tensor of a handle; a tensor stands for itself."""
    return kept if isinstance(kept, Tensor) else kept.tensor()


def _nothing(kept: None) -> Tensor:
    raise AssertionError("what runs again has no backward")


def _addresses(operands: Iterable[Any]) -> set[int]:
    """Return the addresses of the tensors among operands, including those in mappings."""
    found = set[int]()
    for x in operands:
        tensors = x.values() if isinstance(x, dict) else (x,)
        found.update(private.storage_key(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    return found
