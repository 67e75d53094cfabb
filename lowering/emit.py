"""From a parallel graph to the Python source of one rank's forward function.

Each node is a line that ends in a comment: where it comes from in the user's model, its layout on each mesh axis, and
the shape of this rank's part. `emit` only writes text; `program.py` compiles it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.lowering.expressions import attribute, identifiers, indexed, literal, opaque_call
from shardwright.lowering.fusions import FUSIONS, Context, Fused, at
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.layout import format_layouts, shard_order
from shardwright.pcg.optable import ROWS, LocalShapes
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE
from shardwright.pcg.types import TensorType, is_float

HEADER = '''"""One rank's program on the mesh {mesh}, written by Shardwright.

`leaf` holds this rank's parts of parameters, buffers and constants, `batch` those of the inputs; {axes} the mesh axes.
Every rank runs the same text. Comments: source, layout on each axis, local type.
"""

import torch
from torch.nn import functional as F

from shardwright.lowering import kernels as rt
from shardwright.lowering.collectives import (
    all_to_all,
    combine,
    gather_copy,
    partition,
    reduce,
    reduce_copy,
    reduce_scatter,
    replicate,
)


def forward(leaf, batch, device{parameters}):
'''

_RESERVED = frozenset({
    "torch", "F", "rt", "leaf", "batch", "device", "forward", "all_to_all", "combine", "gather_copy", "partition",
    "reduce", "reduce_copy", "reduce_scatter", "replicate", "float",
})  # fmt: skip
# Binary operators whose torch expression takes a Python number in place of a zero-dimensional tensor.
_TAKES_NUMBER = frozenset({
    "add", "sub", "mul", "div", "pow", "floor_divide", "remainder", "eq", "ne", "lt", "le", "gt", "ge", "where",
})  # fmt: skip
_CLAMPS = {"maximum": "clamp_min", "minimum": "clamp_max"}
# Operators whose result is fresh memory that their backward does not read: it may be summed in place.
_FRESH = frozenset({"linear", "matmul", "conv2d", "grouped_mm", "embedding", "cross_entropy_sum", "add", "sub", "mul"})
# Operators whose gradient for any operand is fresh memory.
_FRESH_GRADIENT = frozenset({"linear", "matmul", "conv2d", "layer_norm", "rms_norm", "grouped_mm", "gelu", "silu"})


def emit(graph: Graph, aliases: Mapping[str, str] | None = None) -> str:
    """The source of `forward(leaf, batch, device, *axes)`, which returns the graph's outputs by name.

    `aliases` maps parallel operators that the runtime performs outside (partitions of inputs, replications whose
    gradients are summed after the backward) to the leaf that stands for them.
    """
    return _Emitter(graph, aliases or {}).source()


class _Emitter:
    def __init__(self, graph: Graph, aliases: Mapping[str, str]) -> None:
        self.graph, self.aliases = graph, aliases
        self.held = {base: name for name, base in aliases.items() if graph.by_name[base].op == "input"}
        self.context = Context(graph)
        self.names = identifiers([n.name for n in graph.nodes], {*_RESERVED, *graph.mesh.names})
        self.fused: dict[str, Fused] = {}
        self.skipped: set[str] = set(aliases)
        self._fuse()
        self.literals = self._literals()
        self.shared: Counter[str] = Counter()
        self.made: dict[str, str] = {}

    def source(self) -> str:
        nodes = [n for n in self.graph.nodes if n.name not in self.skipped and n.name not in self.literals]
        for node in nodes:
            prefix, _ = indexed(self._expression(node))
            self.shared[prefix] += 1
        body: list[str] = []
        last = self._last_reads(nodes)
        for node in nodes:
            body += self._lines(node)
            if dead := [self.names[name] for name in last.get(node.name, ())]:
                body.append(f"    del {', '.join(dead)}")
        results = ", ".join(f"{key!r}: {self._operand(name)}" for key, name in self.graph.outputs)
        axes = ", ".join(self.graph.mesh.names)
        header = HEADER.format(mesh=self.graph.mesh, axes=axes or "no axes", parameters=f", {axes}" if axes else "")
        return header + "\n".join([*body, f"    return {{{results}}}", ""])

    # ---- what is written at all ----

    def _fuse(self) -> None:
        for node in reversed(self.graph.nodes):
            if node.name in self.skipped:
                continue
            found = next((f for fusion in FUSIONS if (f := fusion(self.context, node))), None)
            if found is not None and not self.skipped.intersection(found.absorbed):
                self.fused[node.name] = found
                self.skipped.update(found.absorbed)

    def _inputs(self, node: Node) -> tuple[str, ...]:
        found = self.fused.get(node.name)
        names = found.inputs if found else node.inputs
        return tuple(self.aliases.get(name, name) for name in names)

    def _literals(self) -> dict[str, str]:
        """Zero-dimensional constants that every reader can take as a Python number."""
        found: dict[str, str] = {}
        for node in self.graph.nodes:
            if node.op == "full" and node.attr("shape") == () and node.name not in self.context.results:
                readers = [self.graph.by_name[name] for name in self.graph.users[node.name]]
                if readers and all(self._takes_number(reader, node.name, found) for reader in readers):
                    found[node.name] = literal(node.attr("value"))
        return found

    def _takes_number(self, reader: Node, number: str, literals: Mapping[str, str]) -> bool:
        if reader.name in self.fused or reader.op not in _TAKES_NUMBER | set(_CLAMPS):
            return False
        others = [name for name in reader.inputs if name != number]
        if reader.op == "where":
            others = [name for name in others if name != reader.inputs[0]]
        if reader.op == "where" and reader.inputs[0] == number:
            return False
        own, types = self.graph.types[number].dtype, self.graph.types
        result = own if types[reader.name].dtype == "bool" else types[reader.name].dtype
        return bool(others) and all(
            name not in literals
            and (types[name].dtype == own or (is_float(types[name].dtype) and types[name].dtype == result))
            for name in others
        )

    def _last_reads(self, nodes: list[Node]) -> dict[str, list[str]]:
        """For each node, the tensors that nothing reads after it."""
        last: dict[str, str] = {}
        for node in nodes:
            for name in self._inputs(node):
                last[name] = node.name
        kept = {self.aliases.get(name, name) for name in self.context.results}
        dead: dict[str, list[str]] = {}
        for name, reader in last.items():
            if not self.graph.by_name[name].is_leaf and name not in kept and name not in self.literals:
                dead.setdefault(reader, []).append(name)
        return dead

    # ---- one line ----

    def _lines(self, node: Node) -> Iterator[str]:
        text = self._expression(node)
        prefix, index = indexed(text)
        if index is not None and self.shared[prefix] > 1:
            if prefix not in self.made:
                self.made[prefix] = f"{self.names[node.name]}_all"
                yield f"    {self.made[prefix]} = {prefix}"
            text = f"{self.made[prefix]}[{index}]"
        yield f"    {self.names[node.name]} = {text}  # {self._comment(node)}"

    def _comment(self, node: Node) -> str:
        kind = self._type(node.name)
        parts = [str(node.source)] if node.source.module or node.source.line else []
        if self.graph.mesh.names:
            parts.append(format_layouts(kind.layouts, self.graph.mesh))
        parts.append(f"{kind.dtype}{list(kind.local_shape(self.graph.mesh))}")
        return " | ".join(parts)

    def _type(self, name: str) -> TensorType:
        """The type of what a name holds at run time: for inputs, after the partitions of the batch."""
        return self.graph.types[self.held.get(name, name)]

    def _operand(self, name: str) -> str:
        name = self.aliases.get(name, name)
        return self.literals.get(name) or self.names[name]

    def _expression(self, node: Node) -> str:
        found = self.fused.get(node.name)
        operands = [self._operand(name) for name in self._inputs(node)]
        if found is not None:
            return found.text.format(*operands)
        if node.is_leaf:
            return f"{'batch' if node.op == 'input' else 'leaf'}[{node.attr('target')!r}]"
        if node.is_parallel:
            return self._parallel(node, operands[0])
        if node.op == OPAQUE:
            return opaque_call(node, operands)
        if node.op in _CLAMPS and len(self.literals.keys() & set(node.inputs)) == 1:
            number, tensor = sorted(operands, key=lambda o: o not in self.literals.values())
            return f"{tensor}.{_CLAMPS[node.op]}({number})"
        return self._row(node, operands)

    def _parallel(self, node: Node, operand: str) -> str:
        axis = node.attr("axis")
        if node.op in (PARTITION, COMBINE):
            return f"{node.op}({operand}, {axis}, {at(self.context.place(node))})"
        fresh = self._sum_in_place(node) if node.op == REDUCE else self._gradient_in_place(node)
        return f"{node.op}({operand}, {axis}{', inplace=True' if fresh else ''})"

    def _sum_in_place(self, node: Node) -> bool:
        producer = self.graph.by_name[node.inputs[0]]
        return self.graph.users[producer.name] == (node.name,) and producer.op in _FRESH

    def _gradient_in_place(self, node: Node) -> bool:
        return all(self.graph.by_name[name].op in _FRESH_GRADIENT for name in self.graph.users[node.name])

    def _row(self, node: Node, operands: list[str]) -> str:
        row, mesh, types = ROWS[node.op], self.graph.mesh, self.graph.types
        shapes = LocalShapes(
            tuple(types[name].shape for name in node.inputs),
            types[node.name].shape,
            tuple(types[name].local_shape(mesh) for name in node.inputs),
            types[node.name].local_shape(mesh),
        )
        attrs: dict[str, Any] = {k: attribute(v) for k, v in row.localize(dict(node.attrs), shapes).items()}
        if row.offset is not None:
            attrs["offset"] = self._offset(node, row.offset)
        if row.random:
            attrs["shard"] = self._shard(types[node.name])
        attrs["*"] = ", ".join(operands)
        attrs["*1"] = ", ".join(operands[1:])
        if len(operands) == 2 and operands[0].startswith("-") and operands[0] in self.literals.values():
            operands = [f"({operands[0]})", operands[1]]
        return row.torch.replace("rt.device()", "device").format(*operands, **attrs)

    def _offset(self, node: Node, factor: str) -> str:
        """Where this rank's rows of the table begin, or None where it holds the whole table."""
        mesh = self.graph.mesh
        axes = [a for a, choice in enumerate(node.split) if choice == factor and mesh.sizes[a] > 1]
        if not axes:
            return "None"
        position = ""
        for a in axes:
            rank = f"{mesh.names[a]}.rank"
            position = f"({position} * {mesh.sizes[a]} + {rank})" if position else rank
        return f"{position} * {self.graph.types[node.inputs[0]].local_shape(mesh)[0]}"

    def _shard(self, kind: TensorType) -> str:
        steps = shard_order(kind.shape, kind.layouts, self.graph.mesh.sizes)
        if not steps:
            return "None"
        places = ", ".join(f"({self.graph.mesh.names[a]}, {dim}, {blocks})" for a, dim, blocks in steps)  # type: ignore[misc]
        return f"rt.Shard({kind.shape}, {places})"
