"""The parts of a model that its program calls as they are: modules, `autograd.Function`s and functions of torch.

    graph, model ──▶ a copy of each foreign module without parameters ──call──▶ what it returns, with its own backward

A call lends the module this rank's tensors, gathered as the plan says, and takes them away again. So parameters lie as
those of any other operator do.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from shardwright.lowering import private
from shardwright.lowering.private import AutogradContext
from shardwright.lowering.ranks.agreement import gathered
from shardwright.lowering.ranks.ranks import Ranks
from shardwright.lowering.store.deferred import is_unreal
from shardwright.lowering.store.lent import lent
from shardwright.lowering.store.storage import as_complex
from shardwright.pcg.capture.foreign import Thing, part_of
from shardwright.pcg.errors import ForeignError, PlanError
from shardwright.pcg.foreign import Call, calls, unpacked
from shardwright.pcg.graph import Graph

_Type = tuple[tuple[int, ...], str]


class ForeignParts:
    """The foreign parts of a model; programs share them, with the Python state that they keep."""

    def __init__(self) -> None:
        self.by_name: dict[str, Thing] = {}
        self.training = True  # the mode in which they were copied

    def take(self, graph: Graph, model: nn.Module | None = None) -> None:
        """Copy the parts that a graph calls.

        Raises `PlanError` if the model has no such part, or it cannot be copied.
        """
        for name in dict.fromkeys(call.name for call in calls(graph)):
            if name not in self.by_name:
                if model is None:
                    raise PlanError(f"{name} is foreign, and the model that has it is gone; compile it again")
                self.by_name[name], self.training = _without_tensors(model, name), model.training


class ForeignCalls:
    """The foreign calls of one graph, in the mode that it was captured in. A dry run has no parts to call."""

    def __init__(self, parts: ForeignParts, graph: Graph, *, training: bool = True) -> None:
        self.parts, self.training = parts, training
        self._calls = {(call.name, call.number): call for call in calls(graph)}
        self._seen: dict[tuple[str, int], list[float]] | None = None

    def __bool__(self) -> bool:
        return bool(self._calls)

    def given(self, graph: Graph) -> dict[str, ForeignCalls]:
        """Return the arguments by which the program of a part of the graph gets the calls: none if it makes none."""
        return {"foreign": self} if calls(graph) else {}

    # ---- what ranks compare ----

    @contextmanager
    def compared(self, ranks: Ranks) -> Generator[None]:
        """Compare what calls inside the context give on all ranks. Every rank comes here, whichever calls it makes.

        Raises `ForeignError` on all ranks if a part that every rank runs whole gives other values on one of them.
        """
        self._seen = {}
        try:
            yield
            keys = sorted(key for key, call in self._calls.items() if call.way == "whole")
            row = [self._seen.get(key, [0.0] * _NUM_SEEN) for key in keys]
        finally:
            self._seen = None
        rows = gathered(torch.tensor(row, dtype=torch.float64, device=ranks.device).view(-1), ranks)
        for place, (name, _) in enumerate(keys):
            given = [own[_NUM_SEEN * place :][:_NUM_SEEN] for own in rows]
            by_rank = {rank: own for rank, own in enumerate(given) if own[0]}
            first = next(iter(by_rank.values()), [])
            other = next((rank for rank, own in by_rank.items() if not _alike(own, first)), None)
            if other is not None:
                raise ForeignError(
                    f"{name} is foreign, and gives other values on rank {other} than on rank {next(iter(by_rank))}. "
                    "Every rank runs it whole, so that it has to compute the same everywhere: seed what it draws from "
                    "alike on all ranks (Python, NumPy), and let nothing in it depend on the rank or on time"
                )

    def call(self, name: str, number: int, *operands: Tensor) -> tuple[Tensor, ...]:
        """Call a part, and return its results and the new values of the buffers that it writes.

        Raises `ForeignError` if it does other things than in capture.
        """
        call = self._calls[name, number]
        if any(isinstance(x, private.FakeTensor) for x in operands):
            return _DryCall.apply(call, *operands)
        numbers = [as_complex(x) if i in call.pairs else x for i, x in enumerate(operands)]
        given, state = numbers[: call.num_inputs], numbers[call.num_inputs :]
        part = self.parts.by_name[name]
        args, kwargs = unpacked(call.inputs, given.__getitem__)
        versions = [_version(x) for x in given]
        device = operands[0].device if operands else torch.device("cpu")
        with _as_captured(call, device):
            if isinstance(part, nn.Module):
                same = self.training == self.parts.training
                with (
                    nullcontext() if same else _in_mode(part, training=self.training),
                    lent(part, call, state) as written,
                ):
                    returned = private.tree_leaves(part.forward(*args, **kwargs))
                    results = _checked(call, given, (*returned, *written()))
            else:
                run = part.apply if isinstance(part, type) else part
                results = _checked(call, given, private.tree_leaves(run(*args, **kwargs)))
        if versions != [_version(x) for x in given]:
            raise ForeignError(
                f"{name} is foreign and writes into a tensor that it is given, which went unseen when it was captured; "
                "let it write into a clone"
            )
        results = tuple(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in results)
        if self._seen is not None:
            self._seen[name, number] = _summary(results)
        return results


def _version(x: Tensor) -> int:
    """Return how often a tensor has been written into; 0 for tensors of `torch.inference_mode`, which do not count."""
    return 0 if x.is_inference() else x._version


def _without_tensors(model: nn.Module, name: str) -> Thing:
    """Return a part of the model; of a module, a copy without the data of parameters and buffers."""
    part = part_of(model, name).thing
    if not isinstance(part, nn.Module):
        return part
    empty: dict[int, Any] = {}
    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    empty |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    for value in private.tree_iter([dict(vars(module)) for module in part.modules()]):
        if isinstance(value, Tensor) and id(value) not in empty and is_unreal(value):
            raise PlanError(
                f"{name} is foreign, and has a tensor {list(value.shape)} without values that is no parameter and no "
                "buffer; make it a buffer (register_buffer(persistent=False)), or build the model with real values"
            )
        if isinstance(value, Tensor) and not value.is_leaf:  # which an earlier forward has left; it is not deepcopied
            empty[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(part, empty)
    except Exception as error:
        raise PlanError(
            f"{name} is foreign, and cannot be copied for training ({type(error).__name__}: {error}); give it a "
            "__deepcopy__, or make a part of it foreign that can"
        ) from error


_TOLERANCE = 1e-3
_NUM_SEEN = 4
"""The numbers that sum up what a call gives: 1, the logarithm of its norm, two random sums as shares of the norm."""


def _summary(results: Sequence[Tensor]) -> list[float]:
    """Return numbers that differ between ranks if results differ by more than rounding."""
    flat = torch.cat([x.detach().double().flatten() for x in results]).nan_to_num(nan=3.0, posinf=5.0, neginf=-7.0)
    generator = torch.Generator(flat.device).manual_seed(0)
    drawn = torch.rand(2, flat.numel(), generator=generator, device=flat.device, dtype=flat.dtype)
    norm = flat.norm().clamp(min=1e-300)
    return [1.0, float(norm.log()), *((drawn - 0.5) @ flat / norm).tolist()]


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) < _TOLERANCE for a, b in zip(one, other, strict=True))


# ---- a call ----


@contextmanager
def _in_mode(module: nn.Module, *, training: bool) -> Generator[None]:
    """Run a part in this mode, of a model that was copied in the other one."""
    flags = [(inner, inner.training) for inner in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for inner, flag in flags:
            inner.training = flag


def _checked(call: Call, given: Sequence[Tensor], returned: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the tensors among results; raise `ForeignError` unless they have the types that they had in capture."""
    results = tuple(x for x in returned if isinstance(x, Tensor))
    kinds = [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in results]
    expected = _types(call, given, [(result.shape, result.dtype) for result in call.results])
    if kinds != expected:
        raise ForeignError(
            f"{call.name} is foreign and gives {_told(kinds)}; when it was captured, it gave {_told(expected)}, and a "
            "program has fixed shapes: make a module around it foreign whose results have them, or pad what it gives"
        )
    for place, (tensor, result) in enumerate(zip(results, call.results, strict=True)):
        if tensor.requires_grad and not result.grad:
            raise ForeignError(
                f"{call.name} is foreign, and its result {place} has a gradient; when it was captured, it had none, so "
                "the program would drop it: let every branch in the part give gradients alike"
            )
    return results


def _types(call: Call, given: Sequence[Tensor], types: Iterable[_Type]) -> list[_Type]:
    """Return the types of results in capture; along the batch they have as many rows as the operands here."""
    rows = given[call.batched[0]].shape[:1] if call.batched else ()
    return [((*rows, *shape[len(rows) :]), dtype) for shape, dtype in types]


def _told(types: Sequence[_Type]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types) or "nothing"


@contextmanager
def _as_captured(call: Call, device: torch.device) -> Generator[None]:
    """Surround a call with what was around it in capture, and show it no process group: it runs as in one process."""
    low = getattr(torch, call.autocast) if call.autocast else None
    refusal = ForeignError(_COLLECTIVE.format(call.name))
    with (
        private.no_process_group(refusal) if dist.is_initialized() else nullcontext(),
        torch.set_grad_enabled(call.grad and torch.is_grad_enabled()),
        torch.autocast(device.type, low) if low is not None else nullcontext(),
    ):
        generator = private.default_generator(device)
        before = None if call.draws else generator.get_state()
        try:
            yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                raise ForeignError(_DERIVATIVES.format(call.name)) from error
            raise
    if before is not None and not torch.equal(before, generator.get_state()):
        raise ForeignError(
            f"{call.name} is foreign and draws random numbers, and it drew none when it was captured; let it draw in "
            "every step, or in none"
        )


_DERIVATIVES = (
    "{} is foreign and takes derivatives by torch.func, which torch does not do where what autograd saves is gathered "
    "again (ZeRO-3), recomputed or offloaded; plan without these (roles='data'), or take the derivatives by "
    "torch.autograd.grad(..., create_graph=True)"
)
_COLLECTIVE = (
    "{} is foreign and calls a collective of its own. A foreign part runs on every rank as in one process, so take the "
    "collective out: a program computes what one process does"
)


class _DryCall(Function):
    """A call in a dry run: results without data, whose gradients reach all operands."""

    @staticmethod
    def forward(ctx: AutogradContext, call: Call, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*operands)
        types = _types(call, operands, (result.held for result in call.results))
        return tuple(operands[0].new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in types)

    @staticmethod
    def backward(ctx: AutogradContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.empty_like(x) if x.is_floating_point() else None for x in ctx.saved_tensors)
