"""Import from PyTorch: `torch.export` captures a model with its loss, and each ATen node becomes rows of the op table.

    model, batch ──torch.export──▶ ATen graph ──aten.HANDLERS──▶ serial Graph

Tied weights are one leaf; train mode, shapes and dtypes are baked in; the loss is found in what the model returns;
buffers that the model mutates are outputs of the graph. Models on fake tensors are captured without any data.
"""

from __future__ import annotations

import inspect
import operator
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten_with_path

from shardwright.pcg.aten import HANDLERS, IGNORED, NotCovered, Ref, dtype_name, opaque
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.errors import CaptureError, GraphError, UnsupportedOperatorError
from shardwright.pcg.graph import OPAQUE, Graph, Source

LOSS = "loss"


@dataclass(frozen=True)
class Captured:
    """A model's serial graph and what it takes to bind it again.

    aliases     the qualified names of each parameter leaf, the leaf's own first (several where weights are tied)
    constants   tensors that the graph reads and that are neither parameters nor buffers
    options     keyword arguments that are not tensors, baked into the graph
    """

    graph: Graph
    aliases: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, torch.Tensor]
    options: Mapping[str, Any]


def find_loss(result: Any) -> torch.Tensor | None:
    """The scalar loss in what a model returns: a scalar, a tuple that holds one, a dict or ModelOutput with `loss`."""
    if isinstance(result, torch.Tensor):
        return result if result.dim() == 0 else None
    if isinstance(result, Mapping):
        return find_loss(result.get(LOSS))
    if hasattr(result, LOSS):
        return find_loss(getattr(result, LOSS))
    if isinstance(result, (tuple, list)):
        return next((loss for loss in map(find_loss, result) if loss is not None), None)
    return None


class _LossOnly(nn.Module):
    """The model, returning its loss alone."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.options = model, options

    def forward(self, **batch: Any) -> torch.Tensor:
        result = self.model(**batch, **self.options)
        loss = find_loss(result)
        if loss is None:
            raise CaptureError(
                f"{type(self.model).__name__} returns {_describe(result)}, in which there is no scalar loss; return the loss as a "
                "scalar, first in a tuple, or as `loss` in a dict (transformers models: pass `labels` in the batch)"
            )
        return loss


def _describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {list(result.shape)}"
    if isinstance(result, Mapping):
        return f"{type(result).__name__} with keys {list(result)}"
    return f"{type(result).__name__}"


def bind_arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Positional arguments by the names of the model's `forward`; a `CaptureError` where they do not fit."""
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


def capture(model: nn.Module, batch: Mapping[str, Any], args: Sequence[Any] = (), *, strict: bool = False) -> Captured:
    """Capture `model(*args, **batch)` with its loss as a serial graph.

    `batch` maps argument names to global tensors (or nests of them); other values are baked in as options. With
    `strict`, an operator without a row in the op table is an `UnsupportedOperatorError` instead of running replicated.
    Raises `CaptureError` naming the module and source line where tracing failed.
    """
    bound = bind_arguments(model, args, batch)
    options = {
        k: v for k, v in bound.items() if not any(isinstance(x, torch.Tensor) for _, x in tree_flatten_with_path(v)[0])
    }
    tensors = {k: v for k, v in bound.items() if k not in options}
    if not tensors:
        raise CaptureError(
            f"{type(model).__name__}: the batch holds no tensor; pass example inputs, e.g. kwargs=dict(input_ids=...)"
        )
    mode = _fake_mode(model)
    if mode is not None:
        tensors = {
            k: torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: _fake(mode, t), v) for k, v in tensors.items()
        }
    exported = _export(_LossOnly(model, options), tensors, mode)
    graph, constants = _Importer(model, exported, tensors).run()
    if strict:
        _refuse_opaque(graph)
    return Captured(graph, tied_names(model), constants, options)


def _fake_mode(model: nn.Module) -> FakeTensorMode | None:
    return next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every parameter's qualified names, keyed by the first of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: tuple(group) for group in names.values()}


def _export(model: _LossOnly, tensors: Mapping[str, Any], mode: FakeTensorMode | None) -> torch.export.ExportedProgram:
    if any(p.device.type == "meta" for p in model.parameters()):
        raise CaptureError(
            f"{type(model.model).__name__} is on device 'meta', where gradients can get lost silently; build it under "
            "torch._subclasses.FakeTensorMode() on device 'cpu' instead"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(model, (), dict(tensors), strict=False)
            if mode is None:
                return exported.run_decompositions({})
            with mode:
                return exported.run_decompositions({})
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_explain(model.model, error)) from error


def _explain(model: nn.Module, error: BaseException) -> str:
    """Where in the user's model tracing failed, why, and what usually helps."""
    names = {id(m): name for name, m in model.named_modules()}
    module, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names and frame.f_code.co_name != "_call_impl":
            module = names[id(owner)] or type(owner).__name__
            if not _is_library(frame.f_code.co_filename):
                line = f"{Path(frame.f_code.co_filename).name}:{number}"
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return (
        f"{type(model).__name__} could not be captured: in module {module or type(model).__name__!r}"
        + (f" ({line})" if line else "")
        + f": {type(error).__name__}: {reason}. {_remedy(error)}"
    )


def _remedy(error: BaseException) -> str:
    if "DataDependent" in type(error).__name__ or "data-dependent" in str(error):
        return (
            "Capture needs a forward without data-dependent control flow: use torch.where or torch.cond instead of `if` on "
            "tensor values"
        )
    if "pytree" in str(error) or "Cache" in str(error):
        return "Capture needs plain tensors going in and out (transformers models: pass use_cache=False)"
    return "Check that the model runs on this batch outside Shardwright"


def _is_library(filename: str) -> bool:
    return str(Path(torch.__file__).parent) in filename


def _refuse_opaque(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op == OPAQUE:
            raise UnsupportedOperatorError(
                f"{node.source}: operator {node.attr('target')} has no row in the op table, and strict=True; "
                "add a row in pcg/rows and a handler in pcg/aten.py, or drop strict to run it replicated"
            )


_MODULE_PATH = re.compile(r"L\['self'\]\.?|\['?([^'\]]*)'?\]")


def _source(node: torch.fx.Node) -> Source:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = stack[-1][0].removeprefix("L['self']").lstrip(".").removeprefix("model").lstrip(".") if stack else ""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(f, n) for f, n in frames if not _is_library(f) and f != __file__]
    return Source(module, f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else "")


def _key(path: Sequence[Any]) -> str:
    """A batch key for one tensor inside a nest: `pixels`, `boxes.0`."""
    return ".".join(str(getattr(p, "key", getattr(p, "idx", p))) for p in path)


class _Importer:
    """Walks an exported program once and appends rows to a builder."""

    def __init__(self, model: nn.Module, exported: torch.export.ExportedProgram, tensors: Mapping[str, Any]) -> None:
        self.model, self.exported = model, exported
        self.keys = [_key(path) for path, _ in tree_flatten_with_path(dict(tensors))[0]]
        self.builder = GraphBuilder()
        self.values: dict[torch.fx.Node, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}

    def run(self) -> tuple[Graph, dict[str, torch.Tensor]]:
        self._placeholders()
        outputs: list[tuple[str, str]] = []
        for node in self.exported.graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                outputs = list(self._outputs(node))
        graph = self.builder.graph(outputs)
        used = {str(n.attr("target")) for n in graph.leaves("constant")}
        return graph, {k: v for k, v in self.constants.items() if k in used}

    def _placeholders(self) -> None:
        signature = self.exported.graph_signature
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        first = {id(parameters[names[0]]): names[0] for names in tied_names(self.model).values()}
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        keys = iter(self.keys)
        made: dict[tuple[str, str], str] = {}
        kinds = {spec.arg.name: spec for spec in signature.input_specs}
        for node in self.exported.graph.nodes:
            if node.op != "placeholder":
                continue
            target = (kinds[node.name].target or "").removeprefix("model.")
            value, grad = node.meta["val"], False
            if target in parameters:
                kind, target, grad = "parameter", first[id(parameters[target])], parameters[target].requires_grad
            elif target in buffers:
                kind = "buffer"
            elif kinds[node.name].kind is torch.export.graph_signature.InputKind.USER_INPUT:
                kind, target = "input", next(keys)
            else:
                kind = "constant"
                self.constants[target] = self.exported.constants[kinds[node.name].target or ""]
            if (kind, target) not in made:
                name = re.sub(r"\W", "_", target) if kind != "input" else re.sub(r"\W", "_", f"{target}")
                made[kind, target] = self.builder.leaf(
                    name, kind, tuple(value.shape), dtype_name(value.dtype), target, grad
                )
            self.values[node] = made[kind, target]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            found = self.values[value]
            return Ref(found) if isinstance(found, str) else found
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(v) for v in value)
        return value

    def _call(self, node: torch.fx.Node) -> None:
        name = _operator_name(node)
        if name in IGNORED:
            return
        args = [self._argument(a) for a in node.args]
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items()}
        if node.target is operator.getitem:
            self.values[node] = args[0][args[1]]
            return
        source = _source(node)
        self.builder.at(node.name, source)
        try:
            self.values[node] = self._checked(node, self._row(name, node, args, kwargs))
        except GraphError as error:
            raise CaptureError(f"{source}: {node.target} could not be lifted: {error}") from error

    def _row(self, name: str, node: torch.fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        handler = HANDLERS.get(name)
        if handler is not None:
            options = {
                k: v
                for k, v in kwargs.items()
                if k not in ("device", "layout", "pin_memory", "memory_format", "non_blocking")
            }
            try:
                return handler(self.builder, *args, **options)
            except (NotCovered, TypeError):
                pass
        results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
        shapes = [(tuple(v.shape), dtype_name(v.dtype)) for v in results]
        return opaque(self.builder, str(node.target), args, kwargs, shapes)

    def _checked(self, node: torch.fx.Node, result: Any) -> Any:
        """The result has the shape that torch says; its dtype is made to be the one that torch says."""
        value = node.meta.get("val")
        if not isinstance(result, str) or not isinstance(value, torch.Tensor):
            return result
        if self.builder.shape(result) != tuple(value.shape):
            raise GraphError(
                f"expected shape {list(value.shape)}, the op table gives {list(self.builder.shape(result))}"
            )
        return self.builder.op("cast", result, dtype=dtype_name(value.dtype))

    def _outputs(self, node: torch.fx.Node) -> Iterator[tuple[str, str]]:
        specs = self.exported.graph_signature.output_specs
        kinds = torch.export.graph_signature.OutputKind
        for spec, value in zip(specs, node.args[0], strict=True):  # type: ignore[arg-type]
            if spec.kind is kinds.USER_OUTPUT:
                yield LOSS, self._argument(value)
            elif spec.kind is kinds.BUFFER_MUTATION:
                yield (spec.target or "").removeprefix("model."), self._argument(value)
            else:
                raise CaptureError(f"the model mutates its input {spec.target!r} in place; clone it first")


def _operator_name(node: torch.fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[-1] if schema is not None else getattr(node.target, "__name__", str(node.target))
