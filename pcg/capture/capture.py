"""Import from PyTorch: `torch.export` captures a model with its loss, and each ATen node becomes rows of the op table.

    model, batch ──exporting──▶ functional ATen graph ──importing──▶ serial Graph

Train mode, shapes and dtypes are baked in; the loss is found in the model's result. Models on fake tensors are
captured without any data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.amp.autocast_mode import autocast
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.pcg.aten import dtype_name
from shardwright.pcg.capture.alike import Forward, ForwardTrace
from shardwright.pcg.capture.autograd import gradients_kept
from shardwright.pcg.capture.backwards import backwards_refused, check_backward
from shardwright.pcg.capture.deepening import deepened
from shardwright.pcg.capture.depth import Layers, lists_of_layers, shortened
from shardwright.pcg.capture.distributions import arguments_unchecked
from shardwright.pcg.capture.eagerly import as_in_eager
from shardwright.pcg.capture.exporting import export
from shardwright.pcg.capture.fake import unnoted
from shardwright.pcg.capture.finding import with_foreign
from shardwright.pcg.capture.foreign import Parts, part_of
from shardwright.pcg.capture.hooks import captured_hooks, guards_left_out, refuse_backward_hooks
from shardwright.pcg.capture.importing import LOSS, Importer, flat_batch, tied_names
from shardwright.pcg.capture.masks import masks_as_trained
from shardwright.pcg.capture.modules import in_own_precision
from shardwright.pcg.capture.places import put_back
from shardwright.pcg.capture.regions import Marker
from shardwright.pcg.capture.returned import Returned
from shardwright.pcg.capture.settling import Found, settled
from shardwright.pcg.capture.showing import with_shown
from shardwright.pcg.capture.state import LEFT, Carried, Kept
from shardwright.pcg.capture.unseen import unseen_refused
from shardwright.pcg.capture.writing import Shared
from shardwright.pcg.errors import CaptureError, PlanError, UnsupportedOperatorError
from shardwright.pcg.foreign import Call, Way, is_foreign
from shardwright.pcg.graph import OPAQUE, Graph
from shardwright.pcg.node import result_key
from shardwright.pcg.precision import check_precision, low_dtype
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.precisions import PrecisionMode, base_of


@dataclass(frozen=True)
class Captured:
    """A model's serial graph with the facts needed to bind it again.

    aliases     the qualified names of each parameter leaf, the leaf's own first (several where weights are tied)
    constants   the tensors that the graph reads and that are neither parameters nor buffers
    options     the batch's values other than tensors, which are baked into the graph (`baked_in`)
    precision   the precision of the capture (`pcg.precision`), or precisions by module as pairs
    per_microbatch  the modules whose statistics are taken of each microbatch
    beside      the model's results other than the loss, in words; none of them is in the graph
    """

    graph: Graph
    aliases: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, torch.Tensor]
    options: Mapping[str, Any]
    precision: PrecisionMode | None = None
    per_microbatch: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


def find_loss(result: Any) -> torch.Tensor | None:
    """Return the loss in a model's result: a scalar, in a tuple, or `loss` of a dict or ModelOutput; else None."""
    if isinstance(result, torch.Tensor):
        return result if result.dim() == 0 else None
    if isinstance(result, Mapping):
        return find_loss(result.get(LOSS))
    if hasattr(result, LOSS):
        return find_loss(getattr(result, LOSS))
    if isinstance(result, (tuple, list)):
        return next((loss for loss in map(find_loss, result) if loss is not None), None)
    return None


def _beside(result: Any, loss: torch.Tensor | None) -> dict[str, None]:
    """Return the tensors beside the loss in a tuple or dictionary, in words.

    Transformers' outputs are neither of these.
    """
    pairs = result.items() if type(result) is dict else enumerate(result) if type(result) in (tuple, list) else ()
    others = ((key, tree_leaves(value)) for key, value in pairs if value is not loss)
    held = {key: [x for x in leaves if isinstance(x, torch.Tensor) and x is not loss] for key, leaves in others}
    return {f"{key!r} {_describe(tensors[0])}": None for key, tensors in held.items() if tensors}


class _LossOnly(nn.Module):
    """The model, returning its loss alone, or all tensors that it returns.

    `low`: the 16-bit format of the `torch.autocast` around it. `beside`: receives the model's other results, in words.
    `returned`: receives the form of what it returns; all tensors in it are given then.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Mapping[str, Any],
        marker: Marker,
        low: str,
        kept: Kept,
        shared: Shared,
        beside: dict[str, None],
        foreign: Parts,
        returned: Returned | None = None,
    ) -> None:
        super().__init__()
        self.returned = [returned]
        self.beside, self.foreign = [beside], foreign  # no module looks into a list
        self.model, self.options, self.marker, self.low = model, options, marker, low
        self.kept, self.shared, self.carried = kept, shared, Carried(kept.carriers)

    def forward(self, **batch: Any) -> tuple[torch.Tensor, ...]:
        self.marker.tensor = next(x for x in tree_leaves(batch) if isinstance(x, torch.Tensor))
        low = _autocast(self.marker.device, self.low)
        with (
            self.shared.shown(),
            self.kept.watched(self.carried),
            unseen_refused(self.model),
            backwards_refused(self.model),
            gradients_kept(self.model) as watch,
            masks_as_trained(),
            arguments_unchecked(),
            self.foreign.called(),
            low,
        ):
            result = self.model(**batch, **self.options)
        (returned,) = self.returned
        if returned is not None:
            return *returned.taken(result), *(value.detach() for value in self.kept.left().values())
        loss = find_loss(result)
        if loss is None:
            raise CaptureError(
                f"{type(self.model).__name__} returns {_describe(result)}, in which there is no scalar loss; return the"
                " loss as a scalar, first in a tuple, or as `loss` in a dict (transformers models: pass `labels` in the"
                " batch), or give loss_fn="
            )
        if loss.is_complex():
            raise CaptureError(
                f"{type(self.model).__name__} returns a loss of complex numbers, which has no backward; return a real "
                "one, such as loss.real or loss.abs()"
            )
        check_backward(loss, watch.ungraded, written=watch.written)
        self.beside[0].update(_beside(result, loss))
        return loss, *(value.detach() for value in self.kept.left().values())


def _autocast(device: str, low: str) -> AbstractContextManager[object]:
    """Return a `torch.autocast` to this 16-bit format; "": none."""
    return autocast(device, getattr(torch, low)) if low else nullcontext()


def _describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {list(result.shape)}"
    if isinstance(result, Mapping):
        return f"{type(result).__name__} with keys {list(result)}"
    return f"{type(result).__name__}"


def bind_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of the model's `forward`; raise a `CaptureError` if they do not fit."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(f"{type(model).__name__}.forward cannot take this batch: {error}") from None
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = inspect.signature(model.forward).parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            flat.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL and value:
            raise CaptureError(f"{type(model).__name__}.forward takes *{name}; give the batch as keyword arguments")
        else:
            flat[name] = value
    return flat


def split_batch(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a batch by argument name into the arguments with tensors and the options, which are baked in."""
    bound = bind_arguments(model, args, kwargs)
    tensors = {k: v for k, v in bound.items() if any(isinstance(x, torch.Tensor) for x in tree_leaves(v))}
    if not tensors:
        raise CaptureError(
            f"{type(model).__name__}: the batch holds no tensor; pass example inputs, e.g. kwargs=dict(input_ids=...)"
        )
    return tensors, {k: v for k, v in bound.items() if k not in tensors}


def baked_in(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch's values other than tensors, also inside of nests, by key as in `flat_batch`."""
    leaves = flat_batch(bind_arguments(model, args, kwargs))
    return {key: value for key, value in leaves.items() if not isinstance(value, torch.Tensor)}


def capture(
    model: nn.Module,
    batch: Mapping[str, Any],
    args: Sequence[Any] = (),
    *,
    strict: bool = False,
    precision: PrecisionMode | None = None,
    num_microbatches: int = 1,
    per_microbatch: Sequence[str] = (),
    foreign: Mapping[str, Way] | None = None,
    find: bool = False,
    known: Sequence[Call] = (),
    returned: Returned | None = None,
    trace: ForwardTrace | None = None,
) -> Captured:
    """Capture `model(*args, **batch)` with its loss as a serial graph.

    `batch` maps argument names to global tensors (or nests of them); other values are baked in as options. With
    `strict`, an operator without a row in the op table is an `UnsupportedOperatorError` instead of running replicated.
    `precision`: the precision to compute in, in place of the model's own (`pcg.precision`), or a mapping that gives
    one by module (`pcg.capture.modules`). `per_microbatch`: the modules, by name or pattern, whose statistics over the
    batch are taken of each of `num_microbatches`.

    `foreign`: modules, and `autograd.Function`s by their full names, that the program calls as they are, and how each
    runs. `find`: where capture fails inside a module, such a part is made of it. `known`: the foreign calls of a plan,
    which say both. `returned`: receives the form of what the model returns; the graph gives all of it then, and no loss
    (`pcg.results`). `trace`: what `trace_of` has seen of the model on this batch.

    Raises `CaptureError` naming the module and source line where tracing failed, a hook that training would not call
    (`pcg.capture.hooks`), or state of Python objects that every step would change (`pcg.capture.state`), `PlanError`
    where the parameters are not of a dtype that the precision is for, or a pattern names no module.
    """
    trained, frozen = ({dtype_name(p.dtype) for p in model.parameters() if p.requires_grad is t} for t in (True, False))
    precision = check_precision(precision, trained, frozen)
    execution = _checked_modules(model, per_microbatch)
    tensors, options = split_batch(model, args, batch)
    tensors = _told_apart(tensors)
    mode = _fake_mode(model)
    if mode is not None:
        tensors = tree_map_only(torch.Tensor, partial(_fake, mode), tensors)
    device, low = next((p.device.type for p in model.parameters()), "cpu"), low_dtype(base_of(precision), "autocast")

    beside = dict[str, None]()
    ways: dict[str, Way] = {**(foreign or {}), **{call.name: call.way for call in known}}
    named = Parts(model, [part_of(model, name, way) for name, way in ways.items()], known)

    def once(parts: Parts, kept: Kept) -> Found:
        marker, shared = Marker(device), Shared(model)
        with put_back(model), captured_hooks(model), in_own_precision(model, precision, device), shared.hidden():
            wrapper = _LossOnly(model, options, marker, low, kept, shared, beside, parts, returned)
            exported = export(wrapper, model, tensors, mode, marker)
        results = [LOSS] if returned is None else [result_key(i) for i in range(returned.size)]
        keys = [*kept.carriers], [*results, *(LEFT + path for path in kept.left())]
        return Importer(model, exported, tensors, num_microbatches, execution.is_per_microbatch, *keys).run()

    forward = _forward_of(options, precision, device, low, {})
    traces = [] if trace is None else [trace]

    def seen(layers: Sequence[Layers]) -> ForwardTrace:
        """Return the given trace once: where the first capture fails, later ones have other answers or parts."""
        return traces.pop() if traces else ForwardTrace(model, tensors, layers, forward)

    def found(parts: Parts) -> Found:
        own = partial(once, parts)
        layers = [] if execution.per_microbatch or parts.by_name or returned is not None else lists_of_layers(model)
        few = _of_few(model, partial(seen, layers), own) if layers else None
        return few or settled(Kept(model), own)

    def run() -> None:
        with guards_left_out(model):
            forward(model, tensors)

    with unset_fake_temporarily(), put_back(model), unnoted(mode):  # the caller may be in the mode of the model yet
        (graph, constants), _ = with_foreign(named, lambda parts: as_in_eager(partial(found, parts)), run, find=find)
    graph = with_shown(graph, model, constants)
    if strict:
        _refuse_opaque(graph)
    given, cut = baked_in(model, args, batch), execution.per_microbatch
    return Captured(graph, tied_names(model), constants, given, precision, cut, tuple(beside))


def trace_of(model: nn.Module, batch: Mapping[str, Any], precision: PrecisionMode | None = None) -> ForwardTrace | None:
    """Return all that a forward of `capture` without foreign parts calls, at a fourth of its time.

    None where the forward fails on tensors without data.
    """
    tensors, options = split_batch(model, (), batch)
    device, low = next((p.device.type for p in model.parameters()), "cpu"), low_dtype(base_of(precision), "autocast")
    beside = dict[str, None]()
    forward = _forward_of(options, precision, device, low, beside)

    def traced() -> ForwardTrace | None:
        try:
            refuse_backward_hooks(model)
            return ForwardTrace(model, _told_apart(tensors), lists_of_layers(model), forward, beside)
        except Exception:  # noqa: BLE001  capture says what is wrong
            return None

    with unset_fake_temporarily(), unnoted(_fake_mode(model)):  # the trace itself puts back what it changes
        return as_in_eager(traced)


def captured_again(
    graph: Graph, model: nn.Module, batch: Mapping[str, Any], precision: PrecisionMode | None
) -> Captured:
    """Return what `capture` gives for a model whose graph is known, and reads no constants."""
    return Captured(graph, tied_names(model), {}, baked_in(model, (), batch), precision)


def _forward_of(
    options: Mapping[str, Any], precision: PrecisionMode | None, device: str, low: str, beside: dict[str, None]
) -> Forward:
    """Return a function that runs a copy of a model on a batch, gives the loss, and notes the other results."""

    def forward(copy: nn.Module, batch: Mapping[str, Any]) -> object:
        own = in_own_precision(copy, precision, device)
        with masks_as_trained(), arguments_unchecked(), own, _autocast(device, low):
            result = copy(**batch, **options)
            loss = find_loss(result)
            beside.update(_beside(result, loss))
            return loss

    return forward


def _of_few(model: nn.Module, seen: Callable[[], ForwardTrace], once: Callable[[Kept], Found]) -> Found | None:
    """Capture like `settled`, from a few of the layers of long lists; None if these are not seen to repeat."""
    try:
        refuse_backward_hooks(model)
        if (few := seen().kinds()) is None:
            return None
        with shortened(model, few):
            graph, constants = settled(Kept(model), once)
        whole = deepened(graph, few)
    except Exception:  # noqa: BLE001  whatever it is, it is said of the whole model
        return None
    return None if whole is None else (whole, constants)


def _checked_modules(model: nn.Module, per_microbatch: Sequence[str]) -> Execution:
    """Return an execution with the patterns of `per_microbatch`; raise if one of them names no module."""
    for pattern in per_microbatch:
        one = Execution(per_microbatch=(pattern,))
        if not any(one.is_per_microbatch(name) for name, _ in model.named_modules()):
            names = [name for name, child in model.named_modules() if name and not list(child.children())]
            raise PlanError(
                f"per_microbatch={pattern!r} names no module of {type(model).__name__}; give names or patterns of "
                f"modules, such as {', '.join(map(repr, names[:3])) or repr('*')}, or True for all"
            )
    return Execution(per_microbatch=tuple(per_microbatch))


def _told_apart(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy tensors that occur twice, as ids and labels may: export takes one object for one argument."""
    seen: set[int] = set()

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in seen:
            return tensor.clone()
        seen.add(id(tensor))
        return tensor

    return tree_map_only(torch.Tensor, fresh, tensors)


def _fake_mode(model: nn.Module) -> FakeTensorMode | None:
    return next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def _refuse_opaque(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op == OPAQUE and not is_foreign(node):  # which the user named
            raise UnsupportedOperatorError(
                f"{node.source}: operator {node.attr('target')} has no row in the op table, and strict=True; "
                "add a row in pcg/rows and a handler in pcg/aten, or drop strict to run it replicated"
            )
