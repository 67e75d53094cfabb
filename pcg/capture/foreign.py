"""Foreign parts: what capture cannot see through is run once, and then stands in the graph as one call.

    parts ──record──▶ the model run once, each call noted ──called──▶ a trace in which each call is one operator

A part is a module, an `autograd.Function` or a function of torch. Its results have the types that the run gave; what
happens inside is left to Python and to autograd, in every step.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function, _SingleLevelFunction
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from shardwright.pcg.aten import dtype_name
from shardwright.pcg.capture.exporting import own_id, site_of
from shardwright.pcg.capture.functions import REMEDY, CallsTaken, function_named
from shardwright.pcg.capture.places import is_same, put_back
from shardwright.pcg.errors import CaptureError, PlanError, ShardwrightError
from shardwright.pcg.foreign import Call, Result, Way, packed, parsed
from shardwright.pcg.types import COMPLEX, ITEM_BYTES

Run = Callable[..., Any]
Thing = nn.Module | type[Function] | Run
_Called = Callable[["Part", int, Run, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Part:
    """A part that is called as it is: a module by its path; an `autograd.Function` or function of torch by its name.

    `way`: whether it runs whole on every device, or along the batch. `why`: the reason, if the user does not name it.
    """

    name: str
    thing: Thing
    way: Way = "whole"
    why: str = ""

    def state(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        """Return each parameter and buffer of a module once, with all of its names."""
        by_id: dict[int, tuple[Tensor, list[str]]] = {}
        if isinstance(self.thing, nn.Module):
            named = *self.thing.named_parameters(remove_duplicate=False), *self.buffers().items()
            for name, tensor in named:
                by_id.setdefault(id(tensor), (tensor, []))[1].append(name)
        return [(tensor, tuple(names)) for tensor, names in by_id.values()]

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.thing.named_buffers(remove_duplicate=False)) if isinstance(self.thing, nn.Module) else {}


@dataclass(frozen=True)
class _Record:
    """A recorded call. `is_tensor`: which leaves of its result are tensors; the others are None."""

    call: Call
    is_tensor: tuple[bool, ...]
    spec: TreeSpec


class _NoTracker(nullcontext[None]):
    """It stands for the tracker of modules, whose hooks fail where a part takes derivatives itself."""

    parents = frozenset({"Global"})


class _Arguments:
    """The arguments of a call: its tensors, and all of it as data."""

    def __init__(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._all, self.tensors = (args, kwargs), list[Tensor]()
        try:
            self.data = packed(self._all, self._number)
        except TypeError as error:
            raise _unfit(part, f"it is given {error}; expected tensors and plain values") from None

    def _number(self, value: object) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1

    def run(self, run: Run, tensors: Iterable[Tensor]) -> Any:  # noqa: ANN401
        """Run a call with other tensors."""
        given = iter(tensors)
        args, kwargs = tree_map_only(Tensor, lambda _: next(given), self._all)
        return run(*args, **kwargs)


class Parts:
    """The foreign parts of a model, by name. `known`: the calls of a plan, with what they cost."""

    def __init__(self, model: nn.Module, parts: Iterable[Part] = (), known: Iterable[Call] = ()) -> None:
        self.model = model
        self.by_name = {part.name: part for part in parts}
        self._known = {(call.name, call.number): call for call in known}
        self._records: dict[tuple[str, int], _Record] = {}

    def having(self, parts: Iterable[Part]) -> Parts:
        """Return other parts of the same model."""
        return Parts(self.model, parts, self._known.values())

    # ---- the run that is recorded ----

    def record(self, forward: Callable[[], object]) -> None:
        """Run the model once and note what each part is given and returns; nothing that it changes stays.

        Raises `CaptureError` for a part that cannot be called from a graph, `PlanError` for one that is not called.
        """
        self._records.clear()
        try:
            with restored(self.model), torch.enable_grad(), self._intercepted(self._recorded):
                forward()
        except ShardwrightError:
            raise
        except Exception as error:
            unreal = any(isinstance(x, FakeTensor) for x in self.model.parameters())
            hint = "; build it with real values, outside of shardwright.fake()" if unreal else ""
            raise CaptureError(
                f"{type(self.model).__name__} does not run on this batch, and the types of its foreign parts "
                f"({', '.join(self.by_name)}) come from a run: {type(error).__name__}: {error}{hint}"
            ) from error
        for name, part in list(self.by_name.items()):
            if (name, 0) not in self._records and part.why:  # now inside of a larger one
                del self.by_name[name]
            elif (name, 0) not in self._records:
                raise PlanError(f"foreign: {name!r} is not called by the forward of {type(self.model).__name__}")

    def _recorded(self, part: Part, number: int, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        given, state = _Arguments(part, args, kwargs), part.state()
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in given.tensors]
        passed = [x.clone() if x.requires_grad else x for x in leaves]  # autograd lets nothing write into a leaf
        device = next((x.device.type for x in (*leaves, *(x for x, _ in state))), "cpu")
        before = [None if isinstance(x, FakeTensor) else x.detach().clone() for x in (*leaves, *(x for x, _ in state))]
        drawn = _generator(device).get_state()
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _NoTracker()  # pyright: ignore[reportAttributeAccessIssue]
        with counter:
            result = given.run(run, passed)
        flat, spec = tree_flatten(result)
        if other := next((x for x in flat if not isinstance(x, Tensor) and x is not None), None):
            raise _unfit(part, f"it returns a {type(other).__name__}; expected tensors alone")
        returned, buffers = [x for x in flat if isinstance(x, Tensor)], part.buffers() if part.way == "whole" else {}
        left = *(("returns a tensor", x) for x in returned), *(("has a buffer", x) for x in buffers.values())
        for what, x in left:
            kind = dtype_name(x.dtype) if x.layout is torch.strided else str(x.layout)
            if kind not in ITEM_BYTES and kind not in COMPLEX:
                raise _unfit(part, f"it {what} of {kind}; expected dense ones of {', '.join((*ITEM_BYTES, *COMPLEX))}")
        drew = not torch.equal(drawn, _generator(device).get_state())
        if not isinstance(part.thing, (nn.Module, type)):
            _refuse_effects(part, passed, kwargs, returned, drew=drew)
        _refuse_writes(part, passed, state, before)
        batched = tuple[int, ...]()
        if part.way == "batch":
            if drew:
                raise _unfit(part, "it draws random numbers, and devices would draw the same for other rows", _BY_ROW)
            batched = _row_by_row(part, returned, lambda tensors: given.run(run, tensors), leaves)
        call = Call(
            part.name,
            number,
            given.data,
            len(leaves),
            tuple(names for _, names in state),
            tuple(Result(tuple(x.shape), dtype_name(x.dtype), x.requires_grad) for x in (*returned, *buffers.values())),
            tuple(buffers),
            torch.is_grad_enabled(),
            drew,
            dtype_name(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "",
            batched,
            part.way,
            part.why,
            pairs=tuple(i for i, x in enumerate((*leaves, *(x for x, _ in state))) if x.is_complex()),
        )
        if (known := self._known.get((part.name, number))) is not None:
            call = replace(call, why=known.why, flops=known.flops, seconds=known.seconds, device=known.device)
        else:
            seconds = _seconds(lambda: given.run(run, leaves), device)
            call = replace(call, flops=float(counter.get_total_flops()), seconds=seconds, device=device)
        if part.why and _varies(returned, lambda tensors: given.run(run, tensors), leaves):
            raise _unfit(part, "the shape of what it returns depends on values")
        self._records[part.name, number] = _Record(call, tuple(isinstance(x, Tensor) for x in flat), spec)
        return result

    # ---- the trace ----

    @contextmanager
    def called(self) -> Generator[None]:
        """Let every call of a part be one operator, in the trace inside."""
        with self._intercepted(self._traced):
            yield

    def _traced(self, part: Part, number: int, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        record, given = self._records.get((part.name, number)), _Arguments(part, args, kwargs)
        if record is None or given.data != record.call.inputs:
            what = "the run that gave its types calls it in another way than the trace"
            raise _unfit(part, f"{what}; name a module around it")
        call = record.call
        made = _operator()([*given.tensors, *(x for x, _ in part.state())], call.to_text())
        made = [x if result.grad else x.detach() for x, result in zip(made, call.results, strict=True)]
        buffers = part.buffers()
        with torch.no_grad():
            for name, value in zip(call.written, made[call.num_returned :], strict=True):
                buffers[name].copy_(value)
        own = iter(made)
        return tree_unflatten([next(own) if is_tensor else None for is_tensor in record.is_tensor], record.spec)

    # ---- calls ----

    @contextmanager
    def _intercepted(self, called: _Called) -> Generator[None]:
        """Let `called` take the calls of parts, but of those inside others. It gets their number and what runs them."""
        counts, inside = Counter[str](), list[str]()

        def taken(part: Part, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            if inside:
                return run(*args, **kwargs)
            counts[part.name] += 1
            inside.append(part.name)
            try:
                return called(part, counts[part.name] - 1, run, args, kwargs)
            except CaptureError as error:
                if not isinstance(part.thing, nn.Module):  # a function fails where it is called
                    error.where = self._calling_module()
                raise
            finally:
                inside.pop()

        things = [(part.thing, partial(taken, part)) for part in self.by_name.values()]
        functions = {thing: taker for thing, taker in things if isinstance(thing, type)}
        of_torch = {thing: taker for thing, taker in things if not isinstance(thing, (nn.Module, type))}

        def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            run = super(_SingleLevelFunction, cls).apply  # pyright: ignore[reportAttributeAccessIssue]
            return functions[cls](run, args, kwargs) if cls in functions else run(*args, **kwargs)

        with ExitStack() as stack:
            for thing, taker in things:
                if isinstance(thing, nn.Module):
                    stack.enter_context(_forward_replaced(thing, taker))
            if functions:  # every `apply` comes by here, under whatever name it is called
                stack.enter_context(mock.patch.object(_SingleLevelFunction, "apply", classmethod(apply), create=True))
            if of_torch:
                stack.enter_context(CallsTaken(of_torch))
            yield

    def _calling_module(self) -> str | None:
        """Return the path of the module whose code runs."""
        paths = {own_id(module): path for path, module in self.model.named_modules()}
        site = site_of(traceback.walk_stack(sys._getframe(1)), paths)
        return None if site is None else paths[own_id(site.module)]


def part_of(model: nn.Module, name: str, way: Way = "whole", why: str = "") -> Part:
    """Return the part of this name. Raises `PlanError` if there is none, or it is a function with effects."""
    modules = {path: module for path, module in model.named_modules() if path}
    things = {f"{function.__module__}.{function.__qualname__}": function for function in _functions(Function)} | modules
    if name in things:
        return Part(name, things[name], way, why)
    if (of_torch := function_named(name)) is not None:
        return Part(*of_torch, way, why)
    near = get_close_matches(name, things, 3) or [*modules][:3]
    raise PlanError(
        f"foreign: {name!r} names no module inside {type(model).__name__}, no autograd.Function and no function of "
        f"torch; there are {', '.join(map(repr, near)) or 'none'}"
    )


def _functions(kind: type[Function]) -> Iterator[type[Function]]:
    for function in kind.__subclasses__():
        yield function
        yield from _functions(function)


_BY_ROW = "run along the batch"


def _unfit(part: Part, why: str, what: str = "be foreign") -> CaptureError:
    return CaptureError(f"{part.name} cannot {what}: {why}").inside(part.name, why)


# ---- calls ----


@contextmanager
def _forward_replaced(module: nn.Module, taker: Run) -> Generator[None]:
    run, own = module.forward, vars(module)
    before = {"forward": own["forward"]} if "forward" in own else {}
    own["forward"] = lambda *args, **kwargs: taker(run, args, kwargs)
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)


# ---- what a run shows ----


def _refuse_effects(
    part: Part, given: Sequence[Tensor], kwargs: Mapping[str, Any], returned: Sequence[Tensor], *, drew: bool
) -> None:
    """Raise if a function of torch has done more than to compute new tensors from those that it was given."""
    memory = {x.untyped_storage().data_ptr() for x in given if x.numel() and not isinstance(x, FakeTensor)}
    if kwargs.get("out") is not None:
        why = "it writes into the tensor that is given as out="
    elif not returned:
        why = "it returns no tensor, so that it is called for what else it does"
    elif drew:
        why = "it draws random numbers"
    elif any(x.untyped_storage().data_ptr() in memory for x in returned):
        why = "it returns memory that it is given, and later writes would change both"
    else:
        return
    raise _unfit(part, f"{why}; {REMEDY}")


def _refuse_writes(
    part: Part,
    given: Sequence[Tensor],
    state: Sequence[tuple[Tensor, tuple[str, ...]]],
    before: Sequence[Tensor | None],
) -> None:
    """Raise if a call has written into its arguments or parameters, or given a buffer another shape."""
    for tensor, value in zip(given, before, strict=False):
        if value is not None and not is_same(tensor, value):
            raise _unfit(part, "it writes into a tensor that it is given; clone it first")
    buffers = part.buffers()
    for (tensor, names), value in zip(state, before[len(given) :], strict=True):
        if names[0] in buffers:
            if buffers[names[0]].shape != tensor.shape:
                raise _unfit(part, f"its buffer {names[0]!r} changes its shape, and programs have fixed shapes")
            if part.way == "batch" and value is not None and not is_same(buffers[names[0]], value):
                raise _unfit(part, f"it writes its buffer {names[0]!r}, which devices would do for other rows", _BY_ROW)
        elif value is not None and not is_same(tensor, value):
            with torch.no_grad():
                tensor.copy_(value)
            raise CaptureError(
                f"{part.name} is foreign and changes its parameter {names[0]!r} in place, and only optimizers change "
                "parameters; make it a buffer (register_buffer), or change it after the step"
            )


def _row_by_row(
    part: Part, returned: Sequence[Tensor], run: Callable[[list[Tensor]], Any], given: Sequence[Tensor]
) -> tuple[int, ...]:
    """Return the operands that have the batch; raise if two halves of it do not give what the whole gives."""
    rows = next((x.shape[0] for x in given if x.dim()), 0)
    batched = tuple(number for number, x in enumerate(given) if x.dim() and x.shape[0] == rows)
    if rows < 2 or any(not x.dim() or x.shape[0] != rows for x in returned):
        shapes = ", ".join(str(list(x.shape)) for x in returned)
        raise _unfit(part, f"it gives {shapes} for {rows} rows; expected a row of each result for each row", _BY_ROW)
    halves = [
        [x for x in tree_flatten(run([x[own] if n in batched else x for n, x in enumerate(given)]))[0] if x is not None]
        for own in (slice(rows // 2), slice(rows // 2, None))
    ]
    for number, whole in enumerate(returned):
        both = torch.cat([half[number] for half in halves])
        if whole.shape != both.shape or not _close(both, whole):
            what = f"two halves of the batch do not give what the whole does (result {number})"
            raise _unfit(part, what, _BY_ROW)
    return batched


def _close(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, tolerance, tolerance * float(other.detach().abs().max()), equal_nan=True)


def _varies(returned: Sequence[Tensor], run: Callable[[list[Tensor]], Any], given: Sequence[Tensor]) -> bool:
    """Return whether results of other values have other shapes, as far as a few runs show it."""
    generator = torch.Generator().manual_seed(0)

    def other(x: Tensor) -> Tensor:
        """Return elements of x, drawn anew; of ones and zeros, half of each."""
        flags = x.dtype is torch.bool or (not x.is_floating_point() and bool(((x == 0) | (x == 1)).all()))
        high = 2 if flags else max(x.numel(), 1)
        at = torch.randint(high, (x.numel(),), generator=generator).to(x.device)
        return (at.to(x.dtype) if flags else x.detach().flatten()[at]).view(x.shape).requires_grad_(x.requires_grad)

    if any(isinstance(x, FakeTensor) for x in given):
        return False
    try:
        others = [x for x in tree_flatten(run([other(x) for x in given]))[0] if isinstance(x, Tensor)]
    except Exception:  # noqa: BLE001  values that the part does not take show nothing
        return False
    return [x.shape for x in others] != [x.shape for x in returned]


def _generator(device: str) -> torch.Generator:
    if device == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


def _seconds(run: Callable[[], object], device: str) -> float:
    """Return the seconds of a run."""

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start = now()
    run()
    return now() - start


@contextmanager
def restored(model: nn.Module) -> Generator[None]:
    """Undo what a run of the model inside changes: buffers, Python state, generators."""
    buffers = [(x, x.detach().clone()) for x in model.buffers()]
    devices = {x.device for x in model.parameters() if x.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)), put_back(model):
        yield
    with torch.no_grad():
        for tensor, value in buffers:
            if isinstance(tensor, FakeTensor) or not is_same(tensor, value):
                tensor.copy_(value)


# ---- the operator of the trace ----


@cache
def _operator() -> Callable[[Sequence[Tensor], str], list[Tensor]]:
    """Return the operator that stands for a foreign call in a trace: it has types, and computes nothing."""

    @torch.library.custom_op("shardwright::foreign", mutates_args=())
    def foreign(operands: Sequence[Tensor], call: str) -> list[Tensor]:
        raise NotImplementedError("programs call foreign parts themselves (lowering.store.foreign)")

    @foreign.register_fake
    def of_types(operands: Sequence[Tensor], call: str) -> list[Tensor]:
        device = next((x.device for x in operands), torch.device("cpu"))
        return [torch.empty(x.shape, dtype=getattr(torch, x.dtype), device=device) for x in parsed(call).results]

    def no_backward(ctx: object, *gradients: object) -> tuple[None, None]:
        raise NotImplementedError("a trace has no backward")

    foreign.register_autograd(no_backward)
    return foreign
