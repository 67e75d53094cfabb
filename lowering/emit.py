"""From a parallel graph to the Python source of one rank's forward function.

Each node is a line that ends in a comment: where it comes from in the user's model, its layout on each mesh axis, and
the shape of this rank's part. Blocks of the model are functions, equal ones the same; what is made again in backward
is a function, too. `emit` only writes text; `program.py` compiles it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.lowering.expressions import Expressions, draw_key, mask_key
from shardwright.lowering.functions import Function, FunctionCall, Functions, block_key, leaf_key
from shardwright.lowering.outside import Outside, find_outside
from shardwright.lowering.pieces import identifiers, indexed, local_identifiers
from shardwright.lowering.statements import Part, Statement, drawn_ahead, flat, statements
from shardwright.pcg.attrs import integer
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import format_layouts
from shardwright.pcg.mesh import TIME
from shardwright.pcg.moves import MOVES
from shardwright.pcg.step.late import LOSS
from shardwright.pcg.types import TensorType

HEADER = '''"""One rank's program on the mesh {mesh}, written by Shardwright.

`leaf` holds this rank's parts of parameters and buffers, those of a block of the model by themselves; `batch` those of
the inputs, `constant` what `constants` made; `blocks` gather sharded parameters; `saved` runs functions that are made
again in backward; {axes}: the mesh axes; `draw`: the first dropout mask. Every rank runs the same text.
Comments: where it comes from in the model (in a function: in its block), layout on each axis, local type.
"""

import torch
from torch.nn import functional as F

from shardwright.lowering import kernels as rt
from shardwright.lowering.collectives import (
    {functions},
)
'''
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
_FUNCTIONS = sorted({"start_sum", "finish_sum", *(kind.function for kind in MOVES.values())})

_RESERVED = frozenset({
    "torch", "F", "rt", "leaf", "batch", "constant", "constants", "blocks", "saved", "device", "draw", "forward",
    "float", "step", *_FUNCTIONS,
})  # fmt: skip

INLINE = 4
"""A block of fewer statements is no function, unless it is made again."""


def emit(graph: Graph, outside: Outside | None = None) -> str:
    """The source of a program's functions.

    `forward(leaf, batch, constant, blocks, saved, device, *axes, draw)` returns the graph's outputs by name, the loss
    as this rank's summand; `constants(device, *axes)` returns what is computed only once; the others are called by
    `forward`. `draw` is the first draw of the step: a function's dropouts count from the one that its caller hands it.
    Where there are several microbatches, `step(forward, backward, microbatches, mb)` runs them. `outside` says what the
    runtime does.
    """
    return _Emitter(graph, outside or find_outside(graph)).source()


Item = Statement | FunctionCall


class _Line(NamedTuple):
    code: str
    comment: str = ""

    def __str__(self) -> str:
        return f"    {self.code}  # {self.comment}\n" if self.comment else f"    {self.code}\n"


class _Scope(NamedTuple):
    """A function that is being written: what is called how in it, and the block of the model that it is of."""

    names: Mapping[str, str]
    module: str = ""


class _Emitter:
    def __init__(self, graph: Graph, outside: Outside) -> None:
        self.graph, self.outside = graph, outside
        around = {**outside.inputs, **outside.operations.aliases}
        self.held = {base: name for name, base in around.items() if graph.by_name[base].op != "parameter"}
        gathered = [p.result for p in outside.operations.parameters.values() if p.slices is not None]
        regions = {operation.name: operation.again for operation in outside.operations.listed}
        self.code = Expressions(graph, outside.aliases, [*gathered, *outside.loss_sums], regions)
        self.results = {key: self._result(key, name) for key, name in graph.outputs}
        self.items = statements(graph, self.code, outside)
        self.code.drawn.update(drawn_ahead(graph, self.items))
        self.started = {str(s.name) for s in flat(self.items) if s.kind == "start"}
        self.num_reads = Counter(name for s in flat(self.items) for name in self._reads(s))
        self.num_reads.update(self.results.values())
        masks = [mask_key(node) for node in graph.nodes if node.name in self.code.drawn]
        taken = {*_RESERVED, *graph.mesh.names}
        self.names = identifiers([*(node.name for node in graph.nodes), *dict.fromkeys(masks)], taken)
        self.names |= {block_key(i): f"blocks[{i}]" for i in range(len(outside.chunk.blocks))}
        self.seeds = {draw_key(n): integer(dict(n.attrs), "seed") for n in graph.nodes if n.is_random}
        self.names |= self._draws(self.seeds)
        self.names |= {
            leaf_key(module): f"leaf[{module!r}]" for module in {o.block for o in outside.operations.listed} if module
        }
        self.functions = Functions({*taken, *self.names.values()})

    def source(self) -> str:
        once = [Statement("node", n.name) for n in self.code.written if n.name in self.outside.operations.once]
        main = _Scope(self.names)
        items = list(self._items(self.items, "", main))
        forward = list(self._body(items, main, self.results))
        kept = {name for item in items for name in self._reads(item)} | set(self.results.values())
        constants = {str(s.name): str(s.name) for s in once if s.name in kept}
        mesh, axes = self.graph.mesh, self.graph.mesh.names
        given = ["leaf, batch, constant, blocks, saved, device", *axes, "draw=rt.Draw()"]
        return "".join(
            (
                HEADER.format(mesh=mesh, axes=", ".join(axes) or "no axes", functions=",\n    ".join(_FUNCTIONS)),
                *(f"\n\n{function.text}" for function in self.functions.found),
                f"\n\ndef forward({', '.join(given)}):\n",
                *map(str, forward),
                f"\n\ndef constants({', '.join(['device', *axes])}):\n",
                *map(str, self._body(once, main, constants)),
                STEP.format(time=TIME) if mesh.num_microbatches > 1 else "",
            )
        )

    def _result(self, key: str, name: str) -> str:
        name = self.outside.loss if key == LOSS and self.outside.loss else name
        return self.outside.aliases.get(name, name)

    # ---- functions ----

    def _items(self, items: Iterable[Statement | Part], module: str, scope: _Scope | None = None) -> Iterator[Item]:
        """Parts as calls of functions, where they are large enough or made again."""
        for item in items:
            if isinstance(item, Statement):
                yield item
            elif item.again is None and len(item.body) < INLINE:
                yield from self._items(item.body, module)
            else:
                yield self._call(item)

    def _call(self, part: Part) -> FunctionCall:
        statement = part.body[0]
        if part.again is not None and len(part.body) == 1 and isinstance(statement, Statement):
            node = self.graph.by_name[str(statement.name)]
            if node.is_parallel:
                return FunctionCall(None, self.code.reads(node), (node.name,), part.module, part.again)
        function, operands, results, draw = self._function(part)
        return FunctionCall(function, operands, results, part.module, part.again, draw)

    def _function(self, part: Part) -> tuple[Function, tuple[str, ...], tuple[str, ...], str]:
        items = list(self._items(part.body, part.module))
        made = [name for item in items for name in self._makes(item)]
        read = list(dict.fromkeys(name for item in items for name in self._reads(item)))
        own = [name for name in read if self._is_own(name, part.module)]
        operands = [name for name in read if name not in {*made, *own}]
        if own and leaf_key(part.module) not in operands:
            operands.insert(0, leaf_key(part.module))
        inside = Counter(name for s in flat(part.body) for name in self._reads(s))
        results = tuple(name for name in made if self.num_reads[name] > inside[name])
        draws = sorted(self._drawn_in(part), key=self.seeds.__getitem__)
        names = self._local_names(part.module, operands, [*own, *made]) | self._draws(draws, *draws[:1])
        body = list(self._body(items, _Scope(names, part.module), results))
        comes = [names[name] for name in operands]
        words = {word for line in body for word in re.findall(r"\w+", line.code)}
        comes += [word for word in ("saved", "device", *self.graph.mesh.names, "draw") if word in words]
        base = "attention" if part.again is not None and not part.again.whole else self._base(part.module)
        function = self.functions.add(base, part.module, comes, "".join(map(str, body)))
        return function, tuple(operands), results, next(iter(draws), "")

    def _drawn_in(self, part: Part) -> set[str]:
        """The draws of a part, with those that it makes ahead for others."""
        nodes = (self.graph.by_name[str(s.name)] for s in flat(part.body) if s.kind in ("node", "draw"))
        return {draw_key(node) for node in nodes if node.is_random}

    def _draws(self, keys: Iterable[str], first: str | None = None) -> dict[str, str]:
        """What draws are called, counted from one of them, or from the first of the step."""
        start = self.seeds[first] if first is not None else 0
        return {key: f"draw + {self.seeds[key] - start}" for key in keys}

    def _base(self, module: str) -> str:
        return re.sub(r"\W", "_", ".".join(module.split(".")[-2:]))

    def _is_own(self, name: str, module: str) -> bool:
        """Whether it is a parameter or a buffer of this block, that its function reads by itself."""
        node = self.graph.by_name.get(name)
        if node is None or node.op not in ("parameter", "buffer"):
            return False
        return str(node.attr("target")).startswith(f"{module}.")

    def _local_names(self, module: str, operands: Sequence[str], made: Iterable[str]) -> dict[str, str]:
        """What is called how in a function: the same in all functions of equal blocks."""
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

    def _makes(self, item: Item) -> tuple[str, ...]:
        if isinstance(item, FunctionCall):
            return item.results
        match item.kind:
            case "gather":
                return tuple(p.result for p in self.outside.chunk.blocks[int(item.name)].parameters)
            case "free":
                return ()
            case "draw":
                return (mask_key(self.graph.by_name[str(item.name)]),)
            case _:
                return (str(item.name),)

    def _reads(self, item: Item) -> tuple[str, ...]:
        if isinstance(item, FunctionCall):
            return item.operands
        if item.kind in ("gather", "free"):
            return (block_key(int(item.name)),)
        return () if item.kind == "draw" else self.code.reads(self.graph.by_name[str(item.name)])

    def _dead_after(self, items: Sequence[Item], results: Collection[str], scope: _Scope) -> dict[int, list[str]]:
        """For each item, the tensors that nothing reads after it."""
        last = {name: number for number, item in enumerate(items) for name in self._reads(item)}
        dead: dict[int, list[str]] = {}
        for name, number in last.items():
            node = self.graph.by_name.get(name)
            if (node is not None and not node.is_leaf and name not in results) or name.startswith("mask "):
                dead.setdefault(number, []).append(scope.names[name])
        return dead

    # ---- lines ----

    def _body(
        self, items: Sequence[Item], scope: _Scope, results: Mapping[str, str] | Sequence[str]
    ) -> Iterator[_Line]:
        returned = list(results.values() if isinstance(results, Mapping) else results)
        dead = self._dead_after(items, returned, scope)
        there: set[str] = set()
        split = _Splits(self._expressions(items, scope))
        for number, item in enumerate(items):
            for name in self._reads(item):
                yield from self._fetch(name, scope, there)
            yield from self._item(item, scope, split)
            there.update(self._makes(item) if not (isinstance(item, Statement) and item.kind == "start") else ())
            if names := dead.get(number):
                yield _Line(f"del {', '.join(names)}")
        for name in returned:
            yield from self._fetch(name, scope, there)
        texts = [self.code.operand(name, scope.names) for name in returned]
        if isinstance(results, Mapping):
            pairs = ", ".join(f"{key!r}: {text}" for key, text in zip(results, texts, strict=True))
            yield _Line(f"return {{{pairs}}}")
        else:
            yield _Line(f"return {', '.join(texts)}")

    def _fetch(self, name: str, scope: _Scope, there: set[str]) -> Iterator[_Line]:
        """Whatever is read that no earlier line has made, nor the caller handed in."""
        node = self.graph.by_name.get(name)
        if node is None or name in there:
            return
        there.add(name)
        text, comment = scope.names[name], self._comment(node, scope)
        if self._is_own(name, scope.module) or (node.is_leaf and not scope.module):
            target = str(node.attr("target")).removeprefix(f"{scope.module}.") if scope.module else node.attr("target")
            yield _Line(f"{text} = {'batch' if node.op == 'input' else 'leaf'}[{target!r}]", comment)
        elif scope.module:
            return
        elif name in self.started:
            yield _Line(f"{text} = finish_sum({text})", comment)
        elif name in self.outside.operations.once:
            yield _Line(f"{text} = constant[{name!r}]", comment)

    def _expressions(self, items: Iterable[Item], scope: _Scope) -> Iterator[str]:
        for item in items:
            if isinstance(item, Statement) and item.kind == "node":
                yield self.code.of(self.graph.by_name[str(item.name)], scope.names)

    def _item(self, item: Item, scope: _Scope, split: _Splits) -> Iterator[_Line]:
        if isinstance(item, FunctionCall):
            yield self._written_call(item, scope)
            return
        if item.kind == "gather":
            yield from self._gather(int(item.name), scope)
            return
        if item.kind == "free":
            yield _Line(f"{scope.names[block_key(int(item.name))]}.free()")
            return
        node = self.graph.by_name[str(item.name)]
        if item.kind == "draw":
            kind, text = self.graph.types[node.name], scope.names[mask_key(node)]
            what = f"{kind.shape}, {node.attr('p')}, {scope.names[draw_key(node)]}, torch.{kind.dtype}, device"
            yield _Line(f"{text} = rt.ahead({what})")
        elif item.kind == "start":
            operand = self.code.operand(node.inputs[0], scope.names)
            yield _Line(f"{scope.names[node.name]} = start_sum({operand}, {node.attr('axis')})")
        else:
            text = self.code.of(node, scope.names)
            yield from split.lines(scope.names[node.name], text, self._comment(node, scope))

    def _written_call(self, call: FunctionCall, scope: _Scope) -> _Line:
        if call.function is None:
            function, _, rest = self.code.of(self.graph.by_name[call.results[0]], scope.names).partition("(")
            arguments = [rest[:-1]]
        else:
            function = call.function.name
            arguments = [scope.names[name] for name in call.operands]
            more = call.function.parameters[len(arguments) :]
            arguments += [scope.names[call.draw] if word == "draw" else word for word in more]
        again = call.again
        if again is not None:
            random = ["random=True"] if any(n.may_draw for n in self._nodes_of(again)) else []
            arguments = [function, *arguments, *random]
            function = "saved.checkpoint" if again.whole else "saved.remade"
        results = ", ".join(scope.names[name] for name in call.results)
        comment = self._relative(call.module, scope) or call.module
        if len(call.results) == 1:
            comment = self._comment(self.graph.by_name[call.results[0]], scope)
        text = f"{function}({', '.join(arguments)})"
        return _Line(f"{results} = {text}" if results else text, comment)

    def _nodes_of(self, again: object) -> Iterator[Node]:
        listed = self.outside.operations.listed
        return (self.graph.by_name[o.name] for o in listed if o.again == again)

    def _gather(self, number: int, scope: _Scope) -> Iterator[_Line]:
        parameters = self.outside.chunk.blocks[number].parameters
        yield _Line("(")
        for p in parameters:
            yield _Line(f"    {scope.names[p.result]},", self._comment(self.graph.by_name[p.result], scope))
        yield _Line(
            f") = {scope.names[block_key(number)]}.gather()",
            parameters[0].module or "model" if not scope.module else "",
        )

    def _relative(self, module: str, scope: _Scope) -> str:
        """A module's path within the block that a function is of."""
        return f"{module}.".removeprefix(f"{scope.module}.")[:-1] if scope.module else module

    def _comment(self, node: Node, scope: _Scope) -> str:
        kind, source = self._type(node.name), node.source
        parts = []
        elsewhere = bool(scope.module) and node.is_parallel and not f"{source.module}.".startswith(f"{scope.module}.")
        if (source.module or source.line) and not elsewhere:
            module = self._relative(source.module, scope)
            parts = [str(replace(source, module=module)) if module or not scope.module else source.line]
        if self.graph.mesh.names:
            parts.append(format_layouts(kind.layouts, self.graph.mesh))
        parts.append(f"{kind.dtype}{list(kind.local_shape(self.graph.mesh))}")
        return " | ".join(part for part in parts if part)

    def _type(self, name: str) -> TensorType:
        """The type of what a name holds: of inputs after the partitions of the batch, of parameters as gathered."""
        return self.graph.types[self.held.get(name, name)]


class _Splits:
    """Calls that give several values, made once in a function and taken apart."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.uses = Counter(indexed(text)[0] for text in texts)
        self.made: dict[str, str] = {}

    def lines(self, name: str, text: str, comment: str) -> Iterator[_Line]:
        whole, index = indexed(text)
        if index is None or (self.uses[whole] < 2 and whole not in self.made):
            yield _Line(f"{name} = {text}", comment)
            return
        if whole not in self.made:
            self.made[whole] = f"{name}_all"
            yield _Line(f"{self.made[whole]} = {whole}")
        self.uses[whole] -= 1
        yield _Line(f"{name} = {self.made[whole]}[{index}]", comment)
        if not self.uses[whole]:
            yield _Line(f"del {self.made[whole]}")
