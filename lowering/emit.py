"""From a parallel graph to the Python source of one rank's forward function.

Each node is a line that ends in a comment: where it comes from in the user's model, its layout on each mesh axis, and
the shape of this rank's part. `emit` only writes text; `program.py` compiles it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from shardwright.lowering.expressions import Expressions, draw_name, mask_name
from shardwright.lowering.late import LOSS
from shardwright.lowering.outside import Outside, find_outside
from shardwright.lowering.pieces import indexed
from shardwright.lowering.statements import Statement, drawn_ahead, statements
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import format_layouts
from shardwright.pcg.moves import MOVES
from shardwright.pcg.types import TensorType

HEADER = '''"""One rank's program on the mesh {mesh}, written by Shardwright.

`leaf` holds this rank's parts of parameters and buffers, `batch` those of the inputs, `constant` what `constants` made;
`blocks` gather sharded parameters; {axes}: the mesh axes; `draw` is the first of the step's dropout masks.
Every rank runs the same text.
Comments: where it comes from in the model, layout on each axis, local type.
"""

import torch
from torch.nn import functional as F

from shardwright.lowering import kernels as rt
from shardwright.lowering.collectives import (
    {functions},
)
'''
_FUNCTIONS = sorted({"start_sum", "finish_sum", *(kind.function for kind in MOVES.values())})

_RESERVED = frozenset({
    "torch", "F", "rt", "leaf", "batch", "constant", "constants", "blocks", "device", "draw", "forward",
    "float", *_FUNCTIONS,
})  # fmt: skip


def emit(graph: Graph, outside: Outside | None = None) -> str:
    """The source of two functions.

    `forward(leaf, batch, constant, blocks, device, *axes, draw)` returns the graph's outputs by name, the loss as this
    rank's summand; `constants(device, *axes)` returns what is computed only once. `draw` is the first draw of the step.
    `outside` says what the runtime does.
    """
    return _Emitter(graph, outside or find_outside(graph)).source()


class _Emitter:
    def __init__(self, graph: Graph, outside: Outside) -> None:
        self.graph, self.outside = graph, outside
        self.held = {base: name for name, base in outside.aliases.items() if graph.by_name[base].op != "parameter"}
        gathered = [p.result for p in outside.operations.parameters.values() if p.slices is not None]
        self.code = Expressions(graph, outside.aliases, [*gathered, *outside.loss_sums], _RESERVED)
        self.names = self.code.names
        self.results = {key: self._result(key, name) for key, name in graph.outputs}
        self.uses: Counter[str] = Counter()
        self.made: dict[str, str] = {}

    def source(self) -> str:
        nodes = self.code.written
        reads = {node.name: self.code.reads(node) for node in nodes}
        lines = statements(self.graph, self.code, self.outside, list(self.results.values()))
        self.code.drawn.update(drawn_ahead(self.graph, lines))
        self.uses.update(indexed(self.code.of(node))[0] for node in nodes if not node.is_leaf)
        once = [Statement("node", n.name) for n in nodes if n.name in self.outside.operations.once]
        kept = {str(line.name) for line in lines if line.kind == "constant"}
        mesh, axes = self.graph.mesh, self.graph.mesh.names
        return "".join(
            (
                HEADER.format(mesh=mesh, axes=", ".join(axes) or "no axes", functions=",\n    ".join(_FUNCTIONS)),
                f"\n\ndef forward({', '.join(['leaf, batch, constant, blocks, device', *axes, 'draw=rt.Draw()'])}):\n",
                *self._body(lines, reads, self.results),
                f"\n\ndef constants({', '.join(['device', *axes])}):\n",
                *self._body(once, reads, {str(n.name): str(n.name) for n in once if n.name in kept}),
            )
        )

    def _body(
        self, lines: Sequence[Statement], reads: Mapping[str, tuple[str, ...]], results: Mapping[str, str]
    ) -> Iterator[str]:
        dead = self._dead_after(lines, reads, set(results.values()))
        for number, line in enumerate(lines):
            for text in self._line(line):
                yield f"    {text}\n"
            if names := dead.get(number):
                yield f"    del {', '.join(names)}\n"
        pairs = ", ".join(f"{key!r}: {self.code.operand(name)}" for key, name in results.items())
        yield f"    return {{{pairs}}}\n"

    def _result(self, key: str, name: str) -> str:
        name = self.outside.loss if key == LOSS and self.outside.loss else name
        return self.outside.aliases.get(name, name)

    def _dead_after(
        self, lines: Sequence[Statement], reads: Mapping[str, tuple[str, ...]], results: Collection[str]
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

    def _line(self, line: Statement) -> Iterator[str]:
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
        elif line.kind == "draw":
            kind = self.graph.types[node.name]
            what = f"{kind.shape}, {node.attr('p')}, {draw_name(node)}, torch.{kind.dtype}, device"
            yield f"{mask_name(node)} = rt.ahead({what})"
        elif line.kind == "wait":
            yield f"{name} = finish_sum({name})  # {comment}"
        elif line.kind == "start":
            yield f"{name} = start_sum({self.code.operand(node.inputs[0])}, {node.attr('axis')})"
        else:
            yield from self._define(node, name, comment)

    def _define(self, node: Node, name: str, comment: str) -> Iterator[str]:
        text = self.code.of(node)
        whole, index = indexed(text)
        if index is None or (self.uses[whole] < 2 and whole not in self.made):
            yield f"{name} = {text}  # {comment}"
            return
        if whole not in self.made:
            self.made[whole] = f"{name}_all"
            yield f"{self.made[whole]} = {whole}"
        self.uses[whole] -= 1
        yield f"{name} = {self.made[whole]}[{index}]  # {comment}"
        if not self.uses[whole]:
            yield f"del {self.made[whole]}"

    def _gather(self, number: int) -> Iterator[str]:
        parameters = self.outside.chunk.blocks[number].parameters
        yield "("
        for p in parameters:
            yield f"    {self.names[p.result]},  # {self._comment(self.graph.by_name[p.result])}"
        yield f") = blocks[{number}].gather()  # {parameters[0].module or 'model'}"

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
