"""From a parallel graph to the Python source of one rank's forward function.

Each node is a line that ends in a comment: where it comes from in the user's model, its layout on each mesh axis, and
the shape of this rank's part. `emit` only writes text; `program.py` compiles it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from shardwright.lowering.batch import find_inputs
from shardwright.lowering.expressions import attribute, identifiers, indexed, literal, opaque_call
from shardwright.lowering.fusions import FUSIONS, Context, Fused, at
from shardwright.lowering.late import LOSS
from shardwright.lowering.parameters import find_paths
from shardwright.lowering.schedule import Line, Outside, constants, find_loss_sums, schedule
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.layout import format_layouts, shard_order
from shardwright.pcg.optable import ROWS, LocalShapes
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE
from shardwright.pcg.types import TensorType, is_float

HEADER = '''"""One rank's program on the mesh {mesh}, written by Shardwright.

`leaf` holds this rank's parts of parameters and buffers, `batch` those of the inputs, `constant` what `constants` made;
`blocks` gather sharded parameters; {axes}: the mesh axes. Every rank runs the same text.
Comments: where it comes from in the model, layout on each axis, local type.
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
    start_sum,
)
'''

_RESERVED = frozenset({
    "torch", "F", "rt", "leaf", "batch", "constant", "constants", "blocks", "device", "forward", "float",
    "all_to_all", "combine", "gather_copy", "partition", "reduce", "reduce_copy", "reduce_scatter", "replicate",
    "start_sum",
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


def find_outside(graph: Graph) -> Outside:
    """What the runtime does around the program of a graph."""
    return find_loss_sums(graph, find_paths(graph), find_inputs(graph)[1])


def emit(graph: Graph, outside: Outside | None = None) -> str:
    """The source of two functions.

    `forward(leaf, batch, constant, blocks, device, *axes)` returns the graph's outputs by name, the loss as this rank's
    summand; `constants(device, *axes)` returns what is computed only once. `outside` says what the runtime does.
    """
    return _Emitter(graph, outside or find_outside(graph)).source()


class _Emitter:
    def __init__(self, graph: Graph, outside: Outside) -> None:
        self.graph, self.outside, self.aliases = graph, outside, outside.aliases
        self.held = {base: name for name, base in outside.aliases.items() if graph.by_name[base].op != "parameter"}
        self.context = Context(graph)
        self.names = identifiers([n.name for n in graph.nodes], {*_RESERVED, *graph.mesh.names})
        self.fused: dict[str, Fused] = {}
        gathered = [m.result for block in outside.paths.blocks for m in block.members]
        self.skipped: set[str] = {*self.aliases, *gathered, *outside.loss_sums}
        self._fuse()
        self.literals = self._literals()
        self.constant = constants(graph)
        self.results = {key: self._result(key, name) for key, name in graph.outputs}
        self.shared: Counter[str] = Counter()
        self.made: dict[str, str] = {}

    def source(self) -> str:
        nodes = [n for n in self.graph.nodes if n.name not in self.skipped and n.name not in self.literals]
        reads = {node.name: self._reads(node) for node in nodes}
        for node in nodes:
            if not node.is_leaf:
                prefix, _ = indexed(self._expression(node))
                self.shared[prefix] += 1
        once = [n for n in nodes if n.name in self.constant]
        lines = schedule(self.graph, nodes, reads, self.constant, self.outside.paths, list(self.results.values()))
        kept = sorted({str(line.name) for line in lines if line.kind == "constant"}, key=[n.name for n in once].index)
        axes = ", ".join(self.graph.mesh.names)
        return "".join(
            (
                HEADER.format(mesh=self.graph.mesh, axes=axes or "no axes"),
                f"\n\ndef forward({', '.join(['leaf, batch, constant, blocks, device', *self.graph.mesh.names])}):\n",
                *self._body(lines, reads, self.results),
                f"\n\ndef constants({', '.join(['device', *self.graph.mesh.names])}):\n",
                *self._body([Line("node", n.name) for n in once], reads, {name: name for name in kept}),
            )
        )

    def _body(
        self, lines: Sequence[Line], reads: Mapping[str, tuple[str, ...]], results: Mapping[str, str]
    ) -> Iterator[str]:
        dead = self._dead_after(lines, reads, set(results.values()))
        for number, line in enumerate(lines):
            for text in self._line(line):
                yield f"    {text}\n"
            if names := dead.get(number):
                yield f"    del {', '.join(names)}\n"
        pairs = ", ".join(f"{key!r}: {self._operand(name)}" for key, name in results.items())
        yield f"    return {{{pairs}}}\n"

    def _result(self, key: str, name: str) -> str:
        name = self.outside.loss if key == LOSS and self.outside.loss else name
        return self.aliases.get(name, name)

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

    def _reads(self, node: Node) -> tuple[str, ...]:
        return tuple(name for name in self._inputs(node) if name not in self.literals)

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

    def _dead_after(
        self, lines: Sequence[Line], reads: Mapping[str, tuple[str, ...]], results: Collection[str]
    ) -> dict[int, list[str]]:
        """For each line, the tensors that nothing reads after it."""
        last: dict[str, int] = {}
        for number, line in enumerate(lines):
            if line.kind in ("node", "start"):
                last.update(dict.fromkeys(reads[str(line.name)], number))
        dead: dict[int, list[str]] = {}
        for name, number in last.items():
            if not self.graph.by_name[name].is_leaf and name not in results:
                dead.setdefault(number, []).append(self.names[name])
        return dead

    # ---- one line ----

    def _line(self, line: Line) -> Iterator[str]:
        if line.kind == "gather":
            yield from self._gather(int(line.name))
            return
        if line.kind == "free":
            yield f"blocks[{line.name}].free()"
            return
        node = self.graph.by_name[str(line.name)]
        name, comment = self.names[node.name], self._comment(node)
        if line.kind == "constant":
            yield f"{name} = constant[{node.name!r}]  # {comment}"
        elif line.kind == "wait":
            yield f"{name} = {name}.wait()  # {comment}"
        elif line.kind == "start":
            yield f"{name} = start_sum({self._operand(node.inputs[0])}, {node.attr('axis')})"
        else:
            yield from self._define(node, name, comment)

    def _define(self, node: Node, name: str, comment: str) -> Iterator[str]:
        text = self._expression(node)
        prefix, index = indexed(text)
        if index is not None and self.shared[prefix] > 1:
            if prefix not in self.made:
                self.made[prefix] = f"{name}_all"
                yield f"{self.made[prefix]} = {prefix}"
            text = f"{self.made[prefix]}[{index}]"
        yield f"{name} = {text}  # {comment}"

    def _gather(self, number: int) -> Iterator[str]:
        block = self.outside.paths.blocks[number]
        yield "("
        for member in block.members:
            yield f"    {self.names[member.result]},  # {self._comment(self.graph.by_name[member.result])}"
        yield f") = blocks[{number}].gather()  # {block.module or 'model'}"

    def _comment(self, node: Node) -> str:
        kind = self._type(node.name)
        parts = [str(node.source)] if node.source.module or node.source.line else []
        if self.graph.mesh.names:
            parts.append(format_layouts(kind.layouts, self.graph.mesh))
        parts.append(f"{kind.dtype}{list(kind.local_shape(self.graph.mesh))}")
        return " | ".join(parts)

    def _type(self, name: str) -> TensorType:
        """The type of what a name holds: of inputs after the partitions of the batch, of parameters as gathered."""
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
