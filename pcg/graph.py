"""Graphs: values made of frozen nodes, and the one inference that gives every node its type.

A graph is a tuple of nodes in topological order; a node has one result and is referred to by name. Leaves carry their
type as attributes. In a *serial* graph the mesh is empty. In a *parallel* one every operator node says along which
factor each mesh axis splits it (`split`), the four parallel operators are nodes of their own, and `infer` checks that
each operand has exactly the layout that the split asks for.

Invariants, checked by `Graph.validate`:
* names are unique and defined before use; every operator is known;
* shapes fit the operator's factor string; layouts fit its split;
* results that are read from outside are `R` on every axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwright.pcg.errors import GraphError, LayoutError
from shardwright.pcg.factors import Shape, Signature
from shardwright.pcg.layout import C, Layout, Layouts, P, R, S, check_layouts, format_layouts
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.optable import ROWS, Attr, Row
from shardwright.pcg.parallel import PARALLEL_OPS, applicable, step
from shardwright.pcg.types import ITEM_BYTES, TensorType, is_float

LEAVES = ("input", "parameter", "buffer", "constant")
OPAQUE = "opaque"
NOT_DIFFERENTIABLE = frozenset({"detach", "floor", "ceil", "sign", "full", "arange"})


@dataclass(frozen=True, slots=True)
class Source:
    """Where a node came from: the user's module path and source line."""

    module: str = ""
    line: str = ""

    def __str__(self) -> str:
        return f"{self.module or 'model'}" + (f" ({self.line})" if self.line else "")


@dataclass(frozen=True, slots=True)
class Node:
    """One operator application.

    `split` has one entry per mesh axis: a factor name to split; "R" (all operands and the result R); "C" (all C);
    or "P0", "P0,1": those operands and the result are P, the others C. Leaves and parallel operators have none.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Attr], ...] = ()
    split: tuple[str, ...] = ()
    source: Source = field(default=Source(), compare=False)

    def attr(self, name: str) -> Attr:
        for key, value in self.attrs:
            if key == name:
                return value
        raise GraphError(f"{self}: no attribute {name!r}; it has {[k for k, _ in self.attrs]}")

    @property
    def is_leaf(self) -> bool:
        return self.op in LEAVES

    @property
    def is_parallel(self) -> bool:
        return self.op in PARALLEL_OPS

    def __str__(self) -> str:
        return f"%{self.name} = {self.op}({', '.join(self.inputs)})" + (f" at {self.source}" if self.source.module else "")


def make_attrs(**attrs: Attr) -> tuple[tuple[str, Attr], ...]:
    return tuple(sorted(attrs.items()))


def leaf(name: str, op: str, shape: Shape, dtype: str, target: str, *, grad: bool = False, layouts: Layouts = (),
         source: Source = Source()) -> Node:  # fmt: skip
    """A leaf node. `target` is the batch key of an input, the qualified name of a parameter, buffer or constant."""
    text = tuple(str(x) for x in layouts)
    return Node(name, op, (), make_attrs(shape=tuple(shape), dtype=dtype, target=target, grad=grad, layouts=text), (), source)


def required_layouts(signature: Signature, choice: str, num_operands: int, row: Row, where: str) -> tuple[Layouts, Layout]:
    """The operand layouts that a split choice asks for along one axis, and the result's layout."""
    if choice in ("R", "C"):
        layout = R if choice == "R" else C
        return (layout,) * num_operands, layout
    if choice[0] == "P" and choice[1:].replace(",", "").isdigit():
        partial = tuple(int(i) for i in choice[1:].split(","))
        if partial not in row.linear_in:
            raise LayoutError(f"{where}: {row.name} is not jointly linear in operands {partial}; choose {row.linear_in}")
        return tuple(P if i in partial else C for i in range(num_operands)), P
    factor = signature.index(choice)
    if factor is None or signature.factors[factor].role == "fixed":
        splittable = [f.name for f in signature.factors if f.role != "fixed"]
        raise LayoutError(f"{where}: {row.name} cannot be split along {choice!r}; choose R, C or one of {splittable}")
    return signature.split_layouts(factor)


@dataclass(frozen=True)
class Graph:
    """An immutable graph. `outputs` maps "loss" and the names of mutated buffers to the nodes that give them."""

    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    mesh: Mesh = Mesh()

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def types(self) -> Mapping[str, TensorType]:
        """The type of every node's result, inferred once. Raises `GraphError` or `LayoutError` at the first bad node."""
        types: dict[str, TensorType] = {}
        for node in self.nodes:
            if node.name in types:
                raise GraphError(f"{node}: a node of this name exists already; names are unique")
            missing = [name for name in node.inputs if name not in types]
            if missing:
                raise GraphError(f"{node}: operand %{missing[0]} is not defined before it; order nodes topologically")
            types[node.name] = infer(node, [types[name] for name in node.inputs], self.mesh)
        return types

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """The nodes that read each node's result, in order, once per use."""
        users: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in node.inputs:
                users[name].append(node.name)
        return {name: tuple(names) for name, names in users.items()}

    def leaves(self, op: str) -> Iterator[Node]:
        return (node for node in self.nodes if node.op == op)

    def signature(self, node: Node) -> Signature:
        """The node's resolved factor string, over the logical shapes."""
        return ROWS[node.op].signature([self.types[name].shape for name in node.inputs], dict(node.attrs))

    def validate(self) -> Graph:
        """Check every invariant; returns the graph itself, so that passes can end with it."""
        types = self.types
        for key, name in self.outputs:
            if name not in types:
                raise GraphError(f"output {key!r} names %{name}, which no node defines")
            wrong = [a for a, x in zip(self.mesh.names, types[name].layouts, strict=True) if x.kind != "R"]
            if wrong:
                raise LayoutError(f"output {key!r} (%{name}) is {types[name]}; results are R on every axis, reduce or combine {wrong}")
        return self

    def without_dead_nodes(self) -> Graph:
        """Nodes that no output needs are dropped, leaves included; inputs stay, they are the batch's contract."""
        live = {name for _, name in self.outputs}
        for node in reversed(self.nodes):
            if node.name in live:
                live.update(node.inputs)
        return replace(self, nodes=tuple(n for n in self.nodes if n.name in live or n.op == "input"))

    def erased(self) -> Graph:
        """The serial graph that this graph denotes: parallel operators and layouts dropped."""
        alias: dict[str, str] = {}
        nodes: list[Node] = []
        for node in self.nodes:
            if node.is_parallel:
                alias[node.name] = alias.get(node.inputs[0], node.inputs[0])
                continue
            attrs = tuple((k, () if node.is_leaf and k == "layouts" else v) for k, v in node.attrs)
            nodes.append(replace(node, inputs=tuple(alias.get(i, i) for i in node.inputs), attrs=attrs, split=()))
        return Graph(tuple(nodes), tuple((k, alias.get(v, v)) for k, v in self.outputs))


def infer(node: Node, operands: list[TensorType], mesh: Mesh) -> TensorType:
    """The type of a node's result from its operands' types: the only place where types are decided."""
    where = str(node)
    if node.is_leaf:
        return _leaf_type(node, mesh)
    if node.is_parallel:
        return _parallel_type(node, operands[0], mesh)
    if node.op == OPAQUE:
        return _opaque_type(node, operands, mesh)
    row, attrs = ROWS[node.op], dict(node.attrs)
    try:
        signature = row.signature([t.shape for t in operands], attrs)
    except (GraphError, KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise GraphError(f"{where}: {error}") from error
    dtype = row.result_dtype([t.dtype for t in operands], attrs)
    grad = is_float(dtype) and node.op not in NOT_DIFFERENTIABLE and any(t.grad for t in operands)
    if len(node.split) != len(mesh):
        raise LayoutError(f"{where}: {len(node.split)} split choices for the {len(mesh)} axes of {mesh}")
    layouts: list[Layout] = []
    for axis, choice in enumerate(node.split):
        required, result = required_layouts(signature, choice, len(operands), row, where)
        for position, (need, operand) in enumerate(zip(required, operands, strict=True)):
            if not fits(operand, axis, need):
                raise LayoutError(
                    f"{where}: split {choice!r} on axis {mesh.names[axis]!r} needs operand {position} "
                    f"(%{node.inputs[position]}) as {need}, got {operand.layouts[axis]}; insert the parallel operator that leads there"
                )
        layouts.append(result)
    check_layouts(signature.result_shape, tuple(layouts), mesh, where)
    return TensorType(signature.result_shape, dtype, tuple(layouts), grad)


def fits(operand: TensorType, axis: int, need: Layout) -> bool:
    """Whether an operand may be read as `need`. Without a gradient, R and C are the same thing."""
    have = operand.layouts[axis]
    return have == need or (not operand.grad and {have.kind, need.kind} == {"R", "C"})


def _leaf_type(node: Node, mesh: Mesh) -> TensorType:
    shape, dtype = tuple(node.attr("shape")), str(node.attr("dtype"))  # type: ignore[arg-type]
    if dtype not in ITEM_BYTES:
        raise GraphError(f"{node}: dtype {dtype!r} is not one of {sorted(ITEM_BYTES)}")
    stored = tuple(Layout.parse(text) for text in node.attr("layouts"))  # type: ignore[union-attr,arg-type]
    layouts = stored or (R,) * len(mesh)
    check_layouts(shape, layouts, mesh, str(node))
    if any(x.kind not in "RS" for x in layouts):
        raise LayoutError(f"{node}: a leaf is stored R or S, got ({format_layouts(layouts, mesh)})")
    return TensorType(shape, dtype, layouts, bool(node.attr("grad")))


def _parallel_type(node: Node, operand: TensorType, mesh: Mesh) -> TensorType:
    attrs = dict(node.attrs)
    axis = mesh.index(str(attrs["axis"]))
    try:
        move = step(node.op, axis, operand.layouts[axis], int(attrs.get("dim", -1)), int(attrs.get("blocks", 1)))  # type: ignore[arg-type]
    except LayoutError as error:
        raise LayoutError(f"{node}: {error}") from None
    after = (*operand.layouts[:axis], move.after, *operand.layouts[axis + 1 :])
    check_layouts(operand.shape, after, mesh, str(node))
    if not applicable(operand.shape, operand.layouts, mesh.sizes, move):
        raise LayoutError(f"{node}: another axis shards dimension {move.after.dim if move.after.is_shard else move.before.dim} "
                          f"inside this one ({format_layouts(operand.layouts, mesh)}); move the innermost axis first")  # fmt: skip
    return replace(operand, layouts=after)


def _opaque_type(node: Node, operands: list[TensorType], mesh: Mesh) -> TensorType:
    """An operator without a row runs on whole tensors; its result type was recorded at capture."""
    attrs = dict(node.attrs)
    for position, operand in enumerate(operands):
        if any(x.kind != "R" for x in operand.layouts):
            raise LayoutError(f"{node}: {attrs['target']} has no row in the op table, so operand {position} must be R, got {operand}")
    dtype = str(attrs["dtype"])
    grad = is_float(dtype) and any(t.grad for t in operands)
    return TensorType(tuple(attrs["shape"]), dtype, (R,) * len(mesh), grad)  # type: ignore[arg-type]


def topological(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """The nodes in an order that defines before use, stable where the given order already does; `GraphError` on a cycle."""
    pending = {node.name: node for node in nodes}
    done: dict[str, Node] = {}
    for start in list(pending):
        stack = [start]
        path: set[str] = set()
        while stack:
            name = stack[-1]
            if name in done:
                stack.pop()
                continue
            path.add(name)
            missing = [i for i in pending[name].inputs if i not in done and i in pending]
            if not missing:
                done[name] = pending[name]
                path.discard(name)
                stack.pop()
            elif missing[0] in path:
                raise GraphError(f"{pending[name]}: the graph has a cycle through %{missing[0]}")
            else:
                stack.append(missing[0])
    return tuple(done.values())


__all__ = ["LEAVES", "OPAQUE", "Graph", "Node", "Source", "fits", "infer", "leaf", "make_attrs", "required_layouts", "topological", "S"]
