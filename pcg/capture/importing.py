"""Import of an exported program as a serial graph: every ATen node becomes rows of the op table.

Tied weights are one leaf; buffers that the model mutates are outputs of the graph.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten_with_path

from shardwright.pcg.aten import IGNORED, Pair, Ref, Value, dtype_name, lift
from shardwright.pcg.aten.pairs import packed, unpacked
from shardwright.pcg.builder import GraphBuilder
from shardwright.pcg.capture.exporting import is_library, line_of
from shardwright.pcg.capture.regions import Regions
from shardwright.pcg.capture.routing import per_token
from shardwright.pcg.errors import CaptureError, GraphError
from shardwright.pcg.foreign import parsed
from shardwright.pcg.graph import OPAQUE, Graph, Source
from shardwright.pcg.node import FOREIGN
from shardwright.pcg.rows.declared import ROW_BY_ROW
from shardwright.pcg.types import COMPLEX

LOSS = "loss"


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return every parameter's qualified names, keyed by the first of them."""
    return names_by_first(dict(model.named_parameters(remove_duplicate=False)))


def names_by_first(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """Return all names of every tensor, keyed by the first of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: tuple(group) for group in names.values()}


_KEEPING = {torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}


def _constant_name(target: str, value: torch.Tensor) -> str:
    """Return the name of a constant.

    A tensor that forward makes is named by its elements, as export only numbers it.
    """
    if re.fullmatch(r"lifted_tensor_\d+", target) is None or isinstance(value, FakeTensor):
        return target
    digest = hashlib.sha256(f"{value.dtype}{list(value.shape)}".encode())
    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"constant_{digest.hexdigest()[:16]}"


def _source(node: torch.fx.Node) -> Source:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = stack[-1][0].removeprefix("L['self']").lstrip(".").removeprefix("model").lstrip(".") if stack else ""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [
        (f, n) for f, n in frames if not (is_library(f) or f.startswith("<") or Path(f).parent == Path(__file__).parent)
    ]
    return Source(module, f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else "")


def flat_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a batch by key, those inside a nest too: `pixels`, `boxes.0`."""
    leaves = tree_flatten_with_path(dict(batch))[0]
    return {".".join(str(getattr(p, "key", getattr(p, "idx", p))) for p in path): value for path, value in leaves}


class Importer:
    """Walks an exported program once and appends rows to a builder."""

    def __init__(
        self,
        model: nn.Module,
        exported: torch.export.ExportedProgram,
        tensors: Mapping[str, Any],
        num_microbatches: int,
        is_cut: Callable[[str], bool],
        carried: Sequence[str] = (),
        results: Sequence[str] = (LOSS,),
    ) -> None:
        """Prepare an import.

        `carried`: the paths of the wrapper's buffers; `results`: the keys of the wrapper's results.
        """
        self._results = iter(results)
        self._carried = {f"carried.at{number}": path for number, path in enumerate(carried)}
        self.model, self.exported = model, exported
        self.keys = list(flat_batch(tensors))
        self.regions = Regions(exported.graph)
        self.builder = GraphBuilder(dtype_name(torch.get_default_dtype()), num_microbatches, is_cut)
        self.values: dict[torch.fx.Node, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}

    def run(self) -> tuple[Graph, dict[str, torch.Tensor]]:
        self._placeholders()
        outputs: list[tuple[str, str]] = []
        for node in self.exported.graph.nodes:
            if node.op == "call_function" and not self.regions.passes(node):
                self.builder.low = self.regions.low
                self._call(node)
            elif node.op == "output":
                outputs = list(self._outputs(node))
        graph = per_token(self.builder.graph(outputs))
        used = {str(n.attr("target")) for n in graph.leaves("constant")}
        return graph, {k: v for k, v in self.constants.items() if k in used}

    def _placeholders(self) -> None:
        signature = self.exported.graph_signature
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        first = {id(parameters[names[0]]): names[0] for names in tied_names(self.model).values()}
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        keys = iter(self.keys)
        made, pairs = dict[tuple[str, str], str](), dict[tuple[str, str], Pair]()
        kinds = {spec.arg.name: spec for spec in signature.input_specs}
        for node in self.exported.graph.nodes:
            if node.op != "placeholder":
                continue
            self._refuse_unseen(node, kinds[node.name].kind)
            target = self._target(kinds[node.name].target)
            value, grad = node.meta["val"], False
            if not isinstance(value, torch.Tensor):  # beside tensors in a nest: baked in
                self.values[node] = value
                next(keys)
                continue
            if target in parameters:
                kind, target, grad = "parameter", first[id(parameters[target])], parameters[target].requires_grad
            elif target in buffers or target in self._carried.values():
                kind = "buffer"
            elif kinds[node.name].kind is torch.export.graph_signature.InputKind.USER_INPUT:
                kind, target = "input", next(keys)
            else:
                kind, constant = "constant", self.exported.constants[kinds[node.name].target or ""]
                if not isinstance(constant, torch.Tensor):
                    raise CaptureError(
                        f"{self._where(next(iter(node.users), node))}: the model reads {target!r}, a "
                        f"{type(constant).__name__}; expected tensors"
                    )
                target = _constant_name(target, constant)
                self.constants[target] = constant
            if value.is_complex():
                if (kind, target) not in pairs:
                    pairs[kind, target] = self._complex_leaf(node, kind, target, grad=grad)
                self.values[node] = pairs[kind, target]
                continue
            if (kind, target) not in made:
                name = re.sub(r"\W", "_", target)
                made[kind, target] = self.builder.leaf(
                    name, kind, tuple(value.shape), dtype_name(value.dtype), target, grad
                )
            self.values[node] = made[kind, target]

    def _complex_leaf(self, node: torch.fx.Node, kind: str, target: str, *, grad: bool) -> Pair:
        """Return a leaf of complex numbers: a constant as two of real ones, others as one of pairs of real ones."""
        value = node.meta["val"]
        numbers, where = dtype_name(value.dtype), self._where(next(iter(node.users), node))
        if kind == "input":
            what = f"input {target!r} is of complex numbers"
            remedy = "pass torch.view_as_real of it in the batch, and take torch.view_as_complex of it in forward"
            raise CaptureError(f"{where}: {what}; {remedy}").inside(where.module, what)
        if numbers not in COMPLEX:
            what = f"{kind} {target!r} is {numbers}; expected {' or '.join(COMPLEX)}: widen it by .to(torch.complex64)"
            raise CaptureError(f"{where}: {what}").inside(where.module, what)
        if kind != "constant":
            name = re.sub(r"\W", "_", target)
            pairs = self.builder.leaf(name, kind, (*value.shape, 2), COMPLEX[numbers], target, grad, numbers)
            return unpacked(self.builder, pairs)
        whole, parts = torch.view_as_real(self.constants.pop(target)), list[str]()
        for part, name in enumerate(("real", "imag")):
            own = f"{target}.{name}"
            self.constants[own] = whole[..., part].contiguous()
            shape, dtype = tuple(whole.shape[:-1]), dtype_name(whole.dtype)
            parts.append(self.builder.leaf(re.sub(r"\W", "_", own), "constant", shape, dtype, own))
        return Pair(*parts)

    def _target(self, target: str | None) -> str:
        """Return the model's own name of a tensor, from its name in the wrapper."""
        return self._carried.get(target or "", (target or "").removeprefix("model."))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            if value not in self.values:
                self._lift(value, self.builder.source)
            lifted = self.values[value]
            return Ref(lifted) if isinstance(lifted, str) else lifted
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(v) for v in value)
        return value

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            whole, index = node.args
            self.values[node] = self.values[whole][index]  # type: ignore[index]
        elif node.users and _operator_name(node) not in IGNORED and not self._casts_parameter(node):
            self._lift(node, self._source(node))

    def _source(self, node: torch.fx.Node) -> Source:
        """Return the source of a node. A change to a buffer's new value after forward has the source of that value."""
        source, operand = _source(node), node.args[0] if node.args else None
        if source == Source() and node.target in _KEEPING and isinstance(operand, torch.fx.Node):
            made = self.builder.nodes.get(str(self.values.get(operand)))
            return source if made is None or made.is_leaf else made.source
        return source

    def _casts_parameter(self, node: torch.fx.Node) -> bool:
        """Return whether a node is a cast of `pcg.capture.casting`; its first reader lifts it."""
        operand = node.args[0] if node.args else None
        lifted = self.values.get(operand) if isinstance(operand, torch.fx.Node) else None
        is_parameter = isinstance(lifted, str) and self.builder.nodes[lifted].op == "parameter"
        return is_parameter and node.target is torch.ops.aten._to_copy.default and _source(node) == Source()

    def _lift(self, node: torch.fx.Node, source: Source) -> None:
        value = node.meta.get("val")
        several = isinstance(value, (tuple, list))
        read = {int(str(user.args[1])) for user in node.users} if several else {0}
        self.builder.at(node.name, source)
        try:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise GraphError("operators that run graphs of their own have no rows; use torch.where for torch.cond")
            args = [self._argument(a) for a in node.args]
            kwargs = {k: self._argument(v) for k, v in node.kwargs.items()}
            self.builder.at(node.name, source)  # operands may have been lifted here
            types = [_result_type(v) for v in (value if several else [value])]
            order = _order_of_draws(node)
            if order is not None:
                args[0] = Ref(self.builder.op("permute", args[0], dims=order))
                types = [kind and (tuple(kind[0][d] for d in order), kind[1]) for kind in types]
            target = str(node.target)
            if target == f"{FOREIGN}.default":
                names = self._foreign(*args)
            else:
                names = lift(self.builder, target, args, kwargs, types, read)
            if order is not None:
                back = tuple(order.index(d) for d in range(len(order)))
                names = tuple(name and self.builder.op("permute", str(name), dims=back) for name in names)
        except GraphError as error:
            where = self._where(node)
            why = f"{where.line}: {node.target}: {str(error).partition(';')[0]}"
            failure = CaptureError(f"{where}: {node.target} could not be lifted: {error}")
            raise failure.inside(where.module, why) from error
        self.values[node] = names if several else names[0]

    def _foreign(self, operands: Sequence[Ref | Pair], call: str) -> tuple[Value | None, ...]:
        """Append a call of a foreign part (`pcg.capture.foreign`): one node for each result."""
        b, made = self.builder, parsed(call)
        given = [self._real(x) for x in operands]
        op, one = ROW_BY_ROW, dict[str, Any](call=call, batched=made.batched)
        if made.way == "whole":
            op, one = OPAQUE, dict[str, Any](call=call, target=FOREIGN, args=(), kwargs=())
        if made.draws:
            one["seed"] = b.number_of_draw(op)
        results = list[Value]()
        for number, result in enumerate(made.results):
            shape, dtype = result.held
            node = b.op(op, *given, **one, result=number, shape=shape, dtype=dtype)
            results.append(unpacked(b, node) if dtype != result.dtype else node)
        return tuple(results)

    def _outputs(self, node: torch.fx.Node) -> Iterator[tuple[str, str]]:
        specs = self.exported.graph_signature.output_specs
        kinds = torch.export.graph_signature.OutputKind
        for spec, value in zip(specs, node.args[0], strict=True):  # type: ignore[arg-type]
            if spec.kind is kinds.USER_OUTPUT:
                yield next(self._results), self._real(self._argument(value))
            elif spec.kind is kinds.BUFFER_MUTATION:
                yield self._target(spec.target), self._real(self._argument(value))
            else:
                target = self._target(spec.target)
                where = self._where(value) if isinstance(value, torch.fx.Node) else type(self.model).__name__
                raise CaptureError(f"{where}: {self._written(target, spec.kind is kinds.PARAMETER_MUTATION)}")

    def _real(self, value: Any) -> Any:
        """Return a value as a leaf holds it: complex numbers as pairs of real ones."""
        return packed(self.builder, value) if isinstance(value, Pair) else value

    def _written(self, target: str, is_parameter: bool) -> str:
        """Return the error message for a write in place that no program does."""
        if not is_parameter:
            return f"the model mutates its input {target!r} in place; clone it first"
        remedy = "write into a clone, or change the parameter after the step"
        if not self.model.get_parameter(target).requires_grad:
            remedy = "make it a buffer (register_buffer), which steps may change, or change it after the step"
        return f"the model mutates its parameter {target!r} in place, and only optimizers change parameters; {remedy}"

    def _refuse_unseen(self, node: torch.fx.Node, kind: torch.export.graph_signature.InputKind) -> None:
        """Raise for an input that is no tensor: a generator, another object, or the order of side effects."""
        kinds = torch.export.graph_signature.InputKind
        if kind not in (kinds.CUSTOM_OBJ, kinds.TOKEN):
            return
        reader = next(iter(node.users), node)
        where, name = self._where(reader), _operator_name(reader)
        if kind is kinds.TOKEN:
            effect = next((a for a in reader.args if isinstance(a, torch._ops.OpOverload)), name)
            what = f"{effect} has a side effect, and capture keeps only what is computed"
            raise CaptureError(f"{where}: {what}; do it outside of forward").inside(where.module, what)
        given = str(getattr(node.meta["val"], "class_fqn", type(node.meta["val"]).__name__)).removeprefix("torch._C.")
        remedy = (
            "ranks would not draw from it alike; draw from torch's own generator, which torch.manual_seed seeds, or "
            "draw outside of forward and pass the tensor in the batch"
            if given == "Generator"
            else "pass tensors instead"
        )
        what = f"{name} reads a {given}, which capture cannot keep"
        raise CaptureError(f"{where}: {what}: {remedy}").inside(where.module, f"{where.line}: {what}")

    def _where(self, node: torch.fx.Node) -> Source:
        """Return the source of a node, for errors; if torch has no line of it, where its module's forward begins."""
        source = _source(node)
        return (
            source
            if source.line
            else Source(source.module, line_of(type(self.model.get_submodule(source.module)).forward))
        )


def _order_of_draws(node: torch.fx.Node) -> tuple[int, ...] | None:
    """Return the dimensions in the order of memory, in which masks are drawn; None if that is their own order.

    A graph does not say how tensors are stored, so there masks are drawn in the order of the dimensions.
    """
    if _operator_name(node) not in ("native_dropout", "bernoulli") or not isinstance(node.args[0], torch.fx.Node):
        return None
    order = memory_order(torch.empty_like(node.args[0].meta["val"], device="meta").stride())
    return None if order == tuple(range(len(order))) else order


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a tensor as they lie in memory, outermost first."""
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def _result_type(value: Any) -> tuple[tuple[int, ...], str] | None:
    """Return the shape and dtype of one result; None for a result that the operator leaves out."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise GraphError(
            f"it gives the number {value}, which depends on data; keep it a tensor (x.index_select(0, i.reshape(1)) "
            "instead of x[i] for a tensor i of no dimensions)"
        )
    if value.layout is not torch.strided:
        raise GraphError(f"it gives a tensor of layout {value.layout}; compute with dense ones (torch.strided)")
    if any(not isinstance(size, int) for size in value.shape):
        raise GraphError(
            "it gives a tensor whose shape depends on data; choose elements with torch.where, which keeps the shape"
        )
    return tuple(value.shape), dtype_name(value.dtype)


def _operator_name(node: torch.fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[-1] if schema is not None else getattr(node.target, "__name__", str(node.target))
