"""The lines of a program's functions: each item as code, the reads that precede it and the `del` that follows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.lowering.text.expressions import Expressions, draw_key, mask_key, source_of
from shardwright.lowering.text.functions import FunctionCall, block_key
from shardwright.lowering.text.outside import Outside
from shardwright.lowering.text.pieces import attribute, indexed, words
from shardwright.lowering.text.statements import Statement
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import format_layouts
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.operation import Region
from shardwright.pcg.step.verbs import VERBS, Verb
from shardwright.pcg.types import TensorType

Item = Statement | FunctionCall
_RUN: Mapping[Fate, str] = {Fate.KEPT: "saved.checkpoint", Fate.AGAIN: "saved.remade"}
"""The function that runs a region, by the fate of the region's results."""
_WAITING: Mapping[Verb, str] = {"offload": f"saved.{VERBS['offload'].executor}", "arrive": "saved.before"}
"""The functions that take a value: it leaves for the host, or others arrive from there before its backward."""
BLOCK_MARK, MARK = "shardwright block ", "shardwright "
"""The prefixes of the names that a marked program gives to calls of functions, and to operators."""


class Line(NamedTuple):
    """A line of a function."""

    code: str
    comment: str = ""

    def __str__(self) -> str:
        return f"    {self.code}  # {words(self.comment)}\n" if self.comment else f"    {self.code}\n"


class Scope(NamedTuple):
    """The function that is being written: the identifiers in it, and the block of the model that it runs.

    `module` is "" if the function belongs to no block, and None for the program's `forward` and `constants`.
    """

    names: Mapping[str, str]
    module: str | None = None


class Lines:
    """The writer of functions' lines. `started`: sums over ranks, each of which its first reader waits for.

    `marks` maps nodes to their names for a profiler; other nodes have none.
    """

    def __init__(
        self, graph: Graph, boundary: Outside, code: Expressions, started: Collection[str],
        marks: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.outside, self.code, self.started, self.marks = graph, boundary, code, started, marks or {}
        around = {**boundary.inputs, **boundary.operations.aliases}
        self.held = {base: name for name, base in around.items() if graph.by_name[base].op != "parameter"}

    def is_own(self, name: str, module: str) -> bool:
        """Return whether a name is a parameter or buffer of this block, which the block's function reads itself."""
        node = self.graph.by_name.get(name)
        if node is None or node.op not in ("parameter", "buffer"):
            return False
        return str(node.attr("target")).startswith(f"{module}.")

    def makes(self, item: Item) -> tuple[str, ...]:
        if isinstance(item, FunctionCall):
            return item.results
        match item.verb:
            case "await":
                return tuple(p.result for p in self.outside.chunk.blocks[int(item.name)].parameters)
            case "free" | "offload" | "arrive" | "release":
                return ()
            case "draw":
                return (mask_key(self.graph.by_name[str(item.name)]),)
            case _:
                return (str(item.name),)

    def reads(self, item: Item) -> tuple[str, ...]:
        if isinstance(item, FunctionCall):
            return item.operands
        if item.verb in ("await", "free"):
            return (block_key(int(item.name)),)
        if item.verb in _WAITING:
            return (str(item.name),)
        return () if item.verb in ("draw", "release") else self.code.reads(self.graph.by_name[str(item.name)])

    def _dead_after(self, items: Sequence[Item], results: Collection[str], scope: Scope) -> dict[int, list[str]]:
        """Return, by the number of an item, the tensors that nothing reads after it."""
        last = {name: number for number, item in enumerate(items) for name in self.reads(item)}
        dead: dict[int, list[str]] = {}
        for name, number in last.items():
            node = self.graph.by_name.get(name)
            if (node is not None and not node.is_leaf and name not in results) or name.startswith("mask "):
                dead.setdefault(number, []).append(scope.names[name])
        return dead

    # ---- lines ----

    def body(self, items: Sequence[Item], scope: Scope, results: Mapping[str, str] | Sequence[str]) -> Iterator[Line]:
        returned = list(results.values() if isinstance(results, Mapping) else results)
        dead = self._dead_after(items, returned, scope)
        there: set[str] = set()
        split = _Splits(self._expressions(items, scope))
        for number, item in enumerate(items):
            for name in self.reads(item):
                yield from self._fetch(name, scope, there)
            yield from self._item(item, scope, split)
            there.update(self.makes(item) if not (isinstance(item, Statement) and item.verb == "start") else ())
            if names := dead.get(number):
                yield Line(f"del {', '.join(names)}")
        for name in returned:
            yield from self._fetch(name, scope, there)
        texts = [self.code.operand(name, scope.names) for name in returned]
        if isinstance(results, Mapping):
            pairs = ", ".join(f"{key!r}: {text}" for key, text in zip(results, texts, strict=True))
            yield Line(f"return {{{pairs}}}")
        else:
            yield Line(f"return {', '.join(texts)}")

    def _fetch(self, name: str, scope: Scope, there: set[str]) -> Iterator[Line]:
        """Yield the line that fetches a name, unless an earlier line made it or the caller passed it."""
        node = self.graph.by_name.get(name)
        if node is None or name in there:
            return
        there.add(name)
        text, comment = scope.names[name], self._comment(node, scope)
        if scope.module is not None:
            if self.is_own(name, scope.module):
                target = str(node.attr("target")).removeprefix(f"{scope.module}.")
                yield Line(f"{text} = leaf[{target!r}]", comment)
        elif node.is_leaf:
            target = node.attr("target")
            yield Line(f"{text} = {source_of(node)}[{target!r}]", comment)
        elif name in self.started:
            yield Line(f"{text} = {VERBS['wait'].executor}({text})", comment)
        elif name in self.outside.operations.once:
            yield Line(f"{text} = constant[{name!r}]", comment)

    def _expressions(self, items: Iterable[Item], scope: Scope) -> Iterator[tuple[str, int | None]]:
        for item in items:
            if isinstance(item, Statement) and item.verb == "run":
                node = self.graph.by_name[str(item.name)]
                yield self.code.of(node, scope.names), node.draw

    def _item(self, item: Item, scope: Scope, split: _Splits) -> Iterator[Line]:
        if isinstance(item, FunctionCall):
            yield self._marked(self._written_call(item, scope), BLOCK_MARK + item.module if self.marks else "")
            return
        executor = VERBS[item.verb].executor
        if item.verb == "await":
            yield from self._gather(int(item.name), scope)
            return
        if item.verb == "free":
            yield Line(f"{scope.names[block_key(int(item.name))]}.{executor}()")
            return
        if item.verb == "release":
            yield Line(f"saved.{executor}()")
            return
        if item.verb in _WAITING:
            yield Line(f"{_WAITING[item.verb]}({scope.names[str(item.name)]})")
            return
        node = self.graph.by_name[str(item.name)]
        if item.verb == "draw":
            kind, text = self.graph.types[node.name], scope.names[mask_key(node)]
            what = f"{kind.shape}, {attribute(node.attr('p'))}, {scope.names[draw_key(node)]}"
            yield Line(f"{text} = rt.{executor}({what}, torch.{kind.dtype}, device)")
        elif item.verb == "start":
            operand = self.code.operand(node.inputs[0], scope.names)
            yield Line(f"{scope.names[node.name]} = {executor}({operand}, {node.attr('axis')})")
        else:
            text = self.code.of(node, scope.names)
            for line in split.lines(scope.names[node.name], text, node.draw, self._comment(node, scope)):
                yield self._marked(line, self.marks.get(node.name, ""))

    def _marked(self, line: Line, mark: str) -> Line:
        return line._replace(code=f"with rt.mark({mark!r}): {line.code}") if mark else line

    def _written_call(self, call: FunctionCall, scope: Scope) -> Line:
        if call.function is None:
            function, _, rest = self.code.of(self.graph.by_name[call.results[0]], scope.names).partition("(")
            arguments = [rest[:-1]]
        else:
            function = call.function.name
            arguments = [scope.names[name] for name in call.operands]
            more = call.function.parameters[len(arguments) :]
            arguments += [scope.names[call.draw] if word == "draw" else word for word in more]
        region = call.region
        if region is not None:
            random = ["random=True"] if any(n.may_draw for n in self._nodes_of(region)) else []
            arguments = [function, *arguments, *random]
            function = _RUN[region.results]
        results = ", ".join(scope.names[name] for name in call.results)
        comment = self._relative(call.module, scope) or call.module
        if len(call.results) == 1:
            comment = self._comment(self.graph.by_name[call.results[0]], scope)
        text = f"{function}({', '.join(arguments)})"
        return Line(f"{results} = {text}" if results else text, comment)

    def _nodes_of(self, region: Region) -> Iterator[Node]:
        listed = self.outside.operations.listed
        return (self.graph.by_name[o.name] for o in listed if o.region == region)

    def _gather(self, number: int, scope: Scope) -> Iterator[Line]:
        parameters = self.outside.chunk.blocks[number].parameters
        yield Line("(")
        for p in parameters:
            yield Line(f"    {scope.names[p.result]},", self._comment(self.graph.by_name[p.result], scope))
        yield Line(
            f") = {scope.names[block_key(number)]}.{VERBS['await'].executor}()",
            parameters[0].module or "model" if not scope.module else "",
        )

    def _relative(self, module: str, scope: Scope) -> str:
        """Return a module's path relative to the block that the function runs."""
        return f"{module}.".removeprefix(f"{scope.module}.")[:-1] if scope.module else module

    def _comment(self, node: Node, scope: Scope) -> str:
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
        """Return the type of a name's value: inputs after the partitions of the batch, parameters after the gather."""
        return self.graph.types[self.held.get(name, name)]


class _Splits:
    """The calls of a function that return several values: equal ones are made once, unless they draw, and unpacked."""

    def __init__(self, calls: Iterable[tuple[str, int | None]]) -> None:
        self.uses = Counter((indexed(text)[0], draw) for text, draw in calls)
        self.made: dict[tuple[str, int | None], str] = {}

    def lines(self, name: str, text: str, draw: int | None, comment: str) -> Iterator[Line]:
        whole, index = indexed(text)
        call = whole, draw
        if index is None or (self.uses[call] < 2 and call not in self.made):
            yield Line(f"{name} = {text}", comment)
            return
        if call not in self.made:
            self.made[call] = f"{name}_all"
            yield Line(f"{self.made[call]} = {whole}")
        self.uses[call] -= 1
        yield Line(f"{name} = {self.made[call]}[{index}]", comment)
        if not self.uses[call]:
            yield Line(f"del {self.made[call]}")
