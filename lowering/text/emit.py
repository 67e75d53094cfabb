"""The emitter: it writes a parallel graph as the Python source of one rank's forward function.

Each node is a line that ends in a comment: where it comes from in the user's model, its layout on each mesh axis, and
the shape of this rank's part. Each block of the model becomes a function, and equal blocks share one. A region that
backward recomputes becomes a function, too. `emit` only writes text; `program.py` compiles it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shardwright.lowering.text.expressions import MOVE_FIRST, MOVE_LAST, PIECE, Expressions, draw_key, mask_key
from shardwright.lowering.text.functions import Function, FunctionCall, Functions, block_key, leaf_key
from shardwright.lowering.text.lines import MARK, Item, Lines, Scope
from shardwright.lowering.text.outside import Outside, find_outside
from shardwright.lowering.text.pieces import identifiers, identifiers_of, local_identifiers
from shardwright.lowering.text.statements import Statement, TextPart, drawn_ahead, flat, statements
from shardwright.pcg.attrs import integer
from shardwright.pcg.errors import GraphError
from shardwright.pcg.foreign import is_foreign
from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.moves import MOVES
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.late import LOSS
from shardwright.pcg.step.places import places
from shardwright.pcg.step.verbs import VERBS

HEADER = '''"""One rank's program on the mesh {mesh}, written by Shardwright.

`leaf` holds this rank's parts of parameters and buffers, those of a block of the model by themselves; `batch` those of
the inputs, `constant` what `constants` made; `blocks` gather sharded parameters; `saved` runs functions that are made
again in backward, and takes what waits on the host; {axes}: the mesh axes; `draw`: the first dropout mask.
Every rank runs the same text.
Comments: where it comes from in the model (in a function: in its block), layout on each axis, local type.
"""

import torch
from torch.nn import functional as F

from shardwright.lowering.runtime import kernels as rt
from shardwright.lowering.runtime.collectives import (
    {functions},
)
'''
IN_PIECES = f"from shardwright.lowering.runtime.pieces import {MOVE_FIRST}, {MOVE_LAST}\n"
STEP = '''

def step(forward, backward, microbatches, {time}):
    """A training step: every microbatch forward and backward. Gradients add up, and so do this rank's losses."""
    loss = 0.0
    for {time}.rank, batch in enumerate(microbatches):
        summand = forward(batch)
        loss = loss + summand.detach()
        backward(summand, loss)
    return loss
'''
_FUNCTIONS = sorted(
    {str(VERBS[verb].executor) for verb in ("start", "wait")}.union(kind.function for kind in MOVES.values())
)

_RESERVED = frozenset({
    "torch", "F", "rt", "leaf", "batch", "constant", "constants", "blocks", "saved", "device", "draw", "foreign",
    "forward", "float", "step", MOVE_FIRST, MOVE_LAST, PIECE, *_FUNCTIONS,
})  # fmt: skip

_KEYS = ("block ", "leaf ", "mask ", "draw ")
"""The prefixes of names that stand for something other than a node."""

INLINE = 4
"""A block of fewer statements is written inline, unless backward recomputes it."""


def emit(graph: Graph, boundary: Outside | None = None, *, marked: bool = False) -> str:
    """Return the source of a program's functions.

    `forward(leaf, batch, constant, blocks, saved, device, *axes, draw)` returns the graph's outputs by name, the loss
    as this rank's summand. `constants(device, *axes)` returns the values that are computed only once. `forward` calls
    the other functions. `draw` is the first draw of the step: a function counts its dropouts from the draw that its
    caller passes. With several microbatches, `step(forward, backward, microbatches, mb)` runs them. `boundary` lists
    the work of the runtime. `marked`: give operators and blocks names for a profiler (`_marks`).
    """
    boundary = boundary or find_outside(graph)
    return _Emitter(_with_axes_of_its_own(graph), boundary, marked=marked).source()


def _with_axes_of_its_own(graph: Graph) -> Graph:
    """Return the same graph with axes renamed that clash with a name of the program, such as `batch`."""
    mesh = graph.mesh
    names = identifiers(list(mesh.names), _RESERVED)
    if tuple(names.values()) == mesh.names:
        return graph
    nodes = [
        replace(n, attrs=tuple((k, names[str(v)] if k == "axis" else v) for k, v in n.attrs)) if n.is_parallel else n
        for n in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes), mesh=Mesh(tuple(names.values()), mesh.sizes))


class _Emitter:
    def __init__(self, graph: Graph, boundary: Outside, *, marked: bool) -> None:
        self.graph, self.outside = graph, boundary
        if taken := next((n for n in graph.nodes if n.name.startswith(_KEYS)), None):
            raise GraphError(f"{taken}: no node has a name of two words that begins with {', '.join(_KEYS)}; rename it")
        gathered = [p.result for p in boundary.operations.parameters.values() if p.slices is not None]
        regions = {operation.name: operation.region for operation in boundary.operations.listed}
        weights = [name for name in graph.by_name if boundary.operations.is_weight(name)]
        self.code = Expressions(
            graph, boundary.aliases, [*gathered, *boundary.loss_sums], regions, boundary.apart, weights,
            boundary.operations.pairs, boundary.away,
        )  # fmt: skip
        self.results = {key: self._result(key, name) for key, name in graph.outputs}
        self.items = statements(graph, self.code, boundary)
        self.code.drawn.update(drawn_ahead(graph, self.items))
        self.started = {str(s.name) for s in flat(self.items) if s.verb == "start"}
        self.lines = Lines(graph, boundary, self.code, self.started, self._marks() if marked else None)
        self.num_reads = Counter(name for s in flat(self.items) for name in self.lines.reads(s))
        self.num_reads.update(self.results.values())
        masks = [mask_key(node) for node in graph.nodes if node.name in self.code.drawn]
        taken = {*_RESERVED, *graph.mesh.names}
        self.names = identifiers([*(node.name for node in graph.nodes), *dict.fromkeys(masks)], taken)
        self.names |= {block_key(i): f"blocks[{i}]" for i in range(len(boundary.chunk.blocks))}
        self.seeds = {draw_key(n): integer(dict(n.attrs), "seed") for n in graph.nodes if n.is_random}
        self.names |= self._draws(self.seeds)
        self.names |= {
            leaf_key(module): f"leaf[{module!r}]" for module in {o.block for o in boundary.operations.listed} if module
        }
        self.functions = Functions({*taken, *self.names.values()})

    def source(self) -> str:
        once = [Statement("run", n.name) for n in self.code.written if n.name in self.outside.operations.once]
        main = Scope(self.names)
        items = list(self._items(self.items, "", main))
        forward = list(self.lines.body(items, main, self.results))
        read = {name for item in items for name in self.lines.reads(item)} | set(self.results.values())
        constants = {str(s.name): str(s.name) for s in once if s.name in read}
        mesh, axes = self.graph.mesh, self.graph.mesh.names
        given = ["leaf, batch, constant, blocks, saved, device", *axes, "draw=rt.Draw()"]
        given += ["foreign=None"] * any(map(is_foreign, self.graph.nodes))
        return "".join(
            (
                HEADER.format(mesh=mesh, axes=", ".join(axes) or "no axes", functions=",\n    ".join(_FUNCTIONS)),
                IN_PIECES * bool(self.code.pairs),
                *(f"\n\n{function.text}" for function in self.functions.found),
                f"\n\ndef forward({', '.join(given)}):\n",
                *map(str, forward),
                f"\n\ndef constants({', '.join(['device', *axes])}):\n",
                *map(str, self.lines.body(once, main, constants)),
                STEP.format(time=TIME) if mesh.num_microbatches > 1 else "",
            )
        )

    def _result(self, key: str, name: str) -> str:
        name = self.outside.loss if key == LOSS and self.outside.loss else name
        return self.outside.aliases.get(name, name)

    def _marks(self) -> dict[str, str]:
        """Return each operator's mark: its place in its block, after the places of the nodes that it absorbs."""
        where, fused = places(self.graph, {}), self.code.fused

        def mark(name: str) -> str:
            return " ".join(where[n] for n in (*(fused[name].absorbed if name in fused else ()), name) if n in where)

        return {name: MARK + mark(name) for name in where}

    # ---- functions ----

    def _items(self, items: Iterable[Statement | TextPart], module: str, scope: Scope | None = None) -> Iterator[Item]:
        """Yield the items, with parts as function calls if they are large enough or backward recomputes them."""
        for item in items:
            if isinstance(item, Statement):
                yield item
            elif item.region is None and len(item.body) < INLINE:
                yield from self._items(item.body, module)
            else:
                yield self._call(item)

    def _call(self, part: TextPart) -> FunctionCall:
        statement = part.body[0]
        if part.region is not None and len(part.body) == 1 and isinstance(statement, Statement):
            node = self.graph.by_name.get(str(statement.name))
            if node is not None and node.is_parallel:
                return FunctionCall(None, self.code.reads(node), (node.name,), part.module, part.region)
        function, operands, results, draw = self._function(part)
        return FunctionCall(function, operands, results, part.module, part.region, draw)

    def _function(self, part: TextPart) -> tuple[Function, tuple[str, ...], tuple[str, ...], str]:
        items = list(self._items(part.body, part.module))
        made = [name for item in items for name in self.lines.makes(item)]
        read = list(dict.fromkeys(name for item in items for name in self.lines.reads(item)))
        inner = [name for name in read if self.lines.is_own(name, part.module)]
        operands = [name for name in read if name not in {*made, *inner}]
        if inner and leaf_key(part.module) not in operands:
            operands.insert(0, leaf_key(part.module))
        inside = Counter(name for s in flat(part.body) for name in self.lines.reads(s))
        results = tuple(name for name in made if self.num_reads[name] > inside[name])
        draws = sorted(self._drawn_in(part), key=self.seeds.__getitem__)
        names = self._local_names(part.module, operands, [*inner, *made]) | self._draws(draws, *draws[:1])
        body = list(self.lines.body(items, Scope(names, part.module), results))
        comes = [names[name] for name in operands]
        words = {word for line in body for word in re.findall(r"\w+", line.code)}
        comes += [word for word in ("saved", "device", *self.graph.mesh.names, "draw", "foreign") if word in words]
        function = self.functions.add(self._base(part), part.module, comes, "".join(map(str, body)))
        return function, tuple(operands), results, next(iter(draws), "")

    def _drawn_in(self, part: TextPart) -> set[str]:
        """Return the draws of a part, including masks that it draws ahead for later parts."""
        nodes = (self.graph.by_name[str(s.name)] for s in flat(part.body) if s.verb in ("run", "draw"))
        return {draw_key(node) for node in nodes if node.is_random}

    def _draws(self, keys: Iterable[str], first: str | None = None) -> dict[str, str]:
        """Return the text of each draw, as an offset from the draw `first`, or from the first draw of the step."""
        start = self.seeds[first] if first is not None else 0
        return {key: f"draw + {self.seeds[key] - start}" for key in keys}

    def _base(self, part: TextPart) -> str:
        """Return the name of a part's function before it is made unique: its block's, `attention` or `remade`."""
        if part.region is None or part.region.results is Fate.KEPT:
            return identifiers_of([".".join(part.module.split(".")[-2:])])[0]
        return "attention" if part.region.name in self.graph.by_name else "remade"

    def _local_names(self, module: str, operands: Sequence[str], made: Iterable[str]) -> dict[str, str]:
        """Return the identifiers of a function's tensors; functions of equal blocks get the same ones."""
        wanted = dict[str, str]()
        for name in operands:
            node = self.graph.by_name.get(name)
            constant = node is not None and (node.is_leaf or name in self.outside.operations.once)
            wanted[name] = name if node is None or constant else "x"
        wanted.update((name, name) for name in made)
        prefix = re.sub(r"\W", "_", module) + "_"
        wanted = {name: text.removeprefix(prefix) for name, text in wanted.items()}
        wanted[leaf_key(module)] = "leaf"
        taken = {*_RESERVED - {"leaf"}, *self.graph.mesh.names, *self.functions.names}
        return local_identifiers(wanted, taken)

    # ---- what an item makes and reads ----
