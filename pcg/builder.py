"""A builder of serial graphs, node by node: it decides about scalars, no-op removal and common subexpressions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from shardwright.pcg.analysis import following
from shardwright.pcg.factors import Shape
from shardwright.pcg.graph import OPAQUE, Graph, Node, Source, infer, leaf, make_attrs
from shardwright.pcg.layout import Layout, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.node import FOREIGN
from shardwright.pcg.optable import ROWS, Attr
from shardwright.pcg.precision import HALVES, operand_dtypes
from shardwright.pcg.types import TensorType, is_float

Operand = str | int | float | bool
_WHOLE_VIEWS = ("reshape", "permute", "expand")


class GraphBuilder:
    """A serial graph under construction, to which nodes are appended. Operands are node names or Python scalars.

    `default_float` is the dtype of real numbers without a tensor beside them. `low` is the 16-bit format in which the
    next operators run if their rows say so (`pcg.precision`), "" for none, where products take the widest of their
    operands; None: operands have the dtypes that the operator was captured with. `is_cut`: whether the statistics of a
    module are taken of each of `num_microbatches`.
    """

    def __init__(
        self,
        default_float: str = "float32",
        num_microbatches: int = 1,
        is_cut: Callable[[str], bool] = lambda module: False,
    ) -> None:
        self.num_microbatches, self.is_cut = num_microbatches, is_cut
        self._batch: dict[str, Layout] = {}  # the layout of the batch in values
        self.default_float = default_float
        self.low: str | None = None
        self.nodes: dict[str, Node] = {}
        self.types: dict[str, TensorType] = {}
        self.source = Source()
        self._hint = "t"
        self._seen: dict[str, str] = {}
        self._num_draws = Counter[str]()

    def at(self, name: str, source: Source) -> None:
        """Give the next nodes this source; `name` is the name that the last of them should have."""
        self._hint, self.source = name, source

    def leaf(self, name: str, op: str, shape: Shape, dtype: str, target: str, grad: bool = False,
             pairs: str = "") -> str:  # fmt: skip
        source = Source(target)
        return self._append(leaf(self._fresh(name), op, shape, dtype, target, grad=grad, source=source, pairs=pairs))

    def shape(self, name: str) -> Shape:
        return self.types[name].shape

    def scalar(self, value: float, dtype: str) -> str:
        """Append a zero-dimensional constant."""
        kind = float if is_float(dtype) else bool if dtype == "bool" else int
        return self.op("full", shape=(), value=kind(value), dtype=dtype)

    def op(self, op: str, *operands: Operand, **attrs: Attr) -> str:
        """Append one operator, or return the node that already computes the same."""
        inputs = self.operands(*self._at_precision(op, operands, attrs.get("target")))
        if (same := self._no_op(op, inputs, attrs)) is not None:
            return same
        if op == "dropout" and attrs["p"] == 1:
            return self.op("mul", inputs[0], 0.0)  # like torch, which draws nothing then
        if op == "reshape" and self.nodes[inputs[0]].op == "reshape":
            return self.op(op, self.nodes[inputs[0]].inputs[0], **attrs)
        if op == "cast" and self.low and self._is_number(inputs[0]):
            return self.op("full", **{**dict(self.nodes[inputs[0]].attrs), **attrs})
        if op == "cast" and self._is_view_of_parameter(inputs[0]):
            view = self.nodes[inputs[0]]  # the parameter is cast, so that its slices can be, before they are gathered
            return self.op(view.op, self.op(op, *view.inputs, **attrs), **dict(view.attrs))
        if op in ROWS and ROWS[op].random:
            attrs["seed"] = self.number_of_draw(op)
        key = repr((op, inputs, make_attrs(**attrs)))  # text, because True == 1 == 1.0
        if op != OPAQUE and (seen := self._seen.get(key)) is not None:  # an opaque operator may be random
            return seen
        node = Node(self._fresh(self._hint), op, inputs, make_attrs(**attrs), (), self.source)
        self._seen[key] = node.name
        return self._append(node)

    def number_of_draw(self, op: str) -> int:
        """Return the number of the next draw of these operators."""
        self._num_draws[op] += 1
        return self._num_draws[op] - 1

    def copied(self, node: Node, inputs: Sequence[str]) -> str:
        """Append a node of another graph, which reads `inputs` here; its draws are the same as there."""
        if not (node.is_leaf or node.is_random or node.op == OPAQUE):
            return self.op(node.op, *inputs, **dict(node.attrs))
        return self._append(replace(node, name=self._fresh(node.name), inputs=tuple(inputs)))

    def operands(self, *operands: Operand) -> tuple[str, ...]:
        """Return names for all: scalars take the dtype of tensors beside them, or `default_float` among integers."""
        dtypes = [self.types[o].dtype for o in operands if isinstance(o, str)]
        dtype = next((d for d in dtypes if is_float(d)), None) or next((d for d in dtypes if d != "bool"), "int64")

        def name(operand: Operand) -> str:
            if isinstance(operand, str):
                return operand
            if isinstance(operand, bool):
                return self.scalar(operand, "bool" if dtypes and all(d == "bool" for d in dtypes) else dtype)
            real = isinstance(operand, float) and not is_float(dtype)
            return self.scalar(operand, self.default_float if real else dtype)

        return tuple(map(name, operands))

    def num_samples(self, x: str, dims: Collection[int]) -> int:
        """Return the number of samples into which statistics along `dims` divide the elements of x.

        It is 1, except where statistics of the batch are taken of each microbatch by itself.
        """
        carried = self._batch.get(x)
        return self.num_microbatches if carried and carried.dim in dims and self.is_cut(self.source.module) else 1

    def wide(self, x: str) -> str:
        """Return x as read by operators that run in at least fp32, where others run in 16 bits."""
        return self.op("cast", x, dtype="float32") if self.low and self.types[x].dtype in HALVES else x

    def _at_precision(self, op: str, operands: Sequence[Operand], target: object) -> Sequence[Operand]:
        """Return the operands in the dtypes that the operator computes in.

        An opaque operator runs as it was captured, a foreign call in the region of autocast around it.
        """
        if self.low is None or op == "cast":
            return operands
        tensors = [o for o in operands if isinstance(o, str)]
        if op == OPAQUE:
            return [self.wide(x) for x in tensors] if target != FOREIGN else tensors
        dtypes = operand_dtypes(ROWS[op], [self.types[x] for x in tensors], self.low)
        casts = iter([self.op("cast", x, dtype=dtype) for x, dtype in zip(tensors, dtypes, strict=True)])
        return [next(casts) if isinstance(o, str) else o for o in operands]

    def _is_number(self, name: str) -> bool:
        return self.nodes[name].op == "full" and self.types[name].shape == ()

    def _is_view_of_parameter(self, name: str) -> bool:
        """Return whether a value is a parameter in another shape or order; a part of a parameter is no such view."""
        node = view = self.nodes[name]
        while node.op in _WHOLE_VIEWS:
            node = self.nodes[node.inputs[0]]
        return node.op == "parameter" and node is not view

    def _no_op(self, op: str, inputs: tuple[str, ...], attrs: dict[str, Attr]) -> str | None:
        """Return the operand itself if the operator would change nothing, else None."""
        if not inputs:
            return None
        first = self.types[inputs[0]]
        if op == "contiguous" or (op == "dropout" and attrs["p"] == 0) or (op == "detach" and not first.grad):
            return inputs[0]
        if op in ("reshape", "expand") and attrs["shape"] == first.shape:
            return inputs[0]
        if op == "permute" and attrs["dims"] == tuple(range(len(first.shape))):
            return inputs[0]
        if op == "cast" and attrs["dtype"] == first.dtype:
            return inputs[0]
        if op == "slice" and attrs["start"] == 0 and attrs["step"] == 1 and attrs["stop"] == first.shape[attrs["dim"]]:  # type: ignore[index]
            return inputs[0]
        return None

    def _fresh(self, hint: str) -> str:
        name, count = hint, 1
        while name in self.nodes:
            name, count = f"{hint}_{count}x", count + 1
        return name

    def _append(self, node: Node) -> str:
        self.types[node.name] = infer(node, [self.types[i] for i in node.inputs], Mesh())
        self.nodes[node.name] = node
        if self.num_microbatches > 1:
            self._follow_batch(node)
        return node.name

    def _follow_batch(self, node: Node) -> None:
        if node.op == "input" and self.types[node.name].shape:
            self._batch[node.name] = S(0)
        if (row := node.row) is None:
            return
        way = following(node, row.signature([self.shape(i) for i in node.inputs], dict(node.attrs)), self._batch, row)
        if way is not None and way[1].is_shard:
            self._batch[node.name] = way[1]

    def graph(self, outputs: Sequence[tuple[str, str]]) -> Graph:
        """Return the finished graph, without nodes that no output needs."""
        return Graph(tuple(self.nodes.values()), tuple(outputs)).without_dead_nodes().validate()
