"""Capture of deep models from a few of their layers: equal layers of a list are exported once.

    long list ──shortened──▶ four layers exported ──deepened──▶ the graph of all of them
        └──────── both run on tensors without data, operator by operator: all layers must do the same
        (`pcg.capture.alike`)

So capture takes about as long however deep a model is. A model whose layers are not seen to repeat is exported whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from shardwright.pcg.attrs import integer
from shardwright.pcg.graph import OPAQUE, Graph, Node

KEPT = 4
"""The number of layers that are exported.

The first reads what comes before, what follows reads the last, and the third stands for all in between.
"""
_NAME = re.compile(r"(?P<stem>.*?)(_(?P<number>\d+))?(?P<rest>(_\d+x.*)?)")
_FEWEST = 8
"""The smallest number of layers for which some are left out."""


class Run(NamedTuple):
    """The last layers of a list, which have equal parts: the numbers from `start` up to `stop`."""

    path: str
    start: int
    stop: int

    def block(self, number: int) -> str:
        return f"{self.path}.{number}"


def runs(model: nn.Module) -> list[Run]:
    """Return the outermost lists of a model that end in many layers of equal parts."""
    found = list[Run]()
    for path, layers in model.named_modules():
        if not path or not isinstance(layers, (nn.ModuleList, nn.Sequential)) or _is_inside(path, found):
            continue
        if list(layers._modules) != [str(number) for number in range(len(layers))]:
            continue
        parts, start = [_parts(layer) for layer in layers._modules.values()], len(layers)
        while start and parts[-1] is not None and parts[start - 1] == parts[-1]:
            start -= 1
        modules: list[nn.Module | None] = list(layers._modules.values())
        own = [layer for layer in modules if layer is not None]
        if len(layers) - start >= _FEWEST and len(set(map(id, own))) == len(own):
            found.append(Run(path, start, len(layers)))
    return found


def _is_inside(path: str, found: Sequence[Run]) -> bool:
    return any(path.startswith(f"{run.path}.") for run in found)


def _parts(layer: nn.Module | None) -> Hashable:
    """Return the modules and tensors of a layer, or None without a layer.

    What it does with them is seen when it runs.
    """
    if layer is None:
        return None
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return (
        tuple((name, type(part), part.training) for name, part in layer.named_modules()),
        tuple((name, type(t), tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors),
    )


@contextmanager
def shortened(model: nn.Module, found: Sequence[Run]) -> Generator[None]:
    """Leave only `KEPT` layers of each run in its list, inside the context."""
    dropped = dict[str, dict[str, nn.Module | None]]()
    try:
        for run in found:
            layers = model.get_submodule(run.path)._modules
            names = [str(number) for number in range(run.start + KEPT, run.stop)]
            dropped[run.path] = {name: layers.pop(name) for name in names}
        yield
    finally:
        for path, layers in dropped.items():
            model.get_submodule(path)._modules.update(layers)


def deepened(graph: Graph, found: Sequence[Run]) -> Graph | None:
    """Return the graph of all layers, from that of a shortened model; None if its layers form no chain."""
    for run in found:
        blocks = _Blocks(graph, run)
        if not blocks.are_alike():
            return None
        graph = blocks.all_of_them()
    is_named = len({node.name for node in graph.nodes}) == len(graph.nodes)  # else two nodes share a name
    return _drawn_in_order(graph) if is_named else None


class _Blocks:
    """The nodes of a graph that lie in the layers of a run, parameters and buffers included."""

    def __init__(self, graph: Graph, run: Run) -> None:
        self.graph, self.run = graph, run
        prefixes = [f"{run.block(run.start + number)}." for number in range(KEPT)]
        self.nodes: list[list[Node]] = [[] for _ in prefixes]
        self.home = dict[str, tuple[int, int]]()  # by name, the block and the place in it
        for node in graph.nodes:
            where = f"{node.attr('target') if node.is_leaf else node.source.module}."
            for number, prefix in enumerate(prefixes):
                if where.startswith(prefix):
                    self.home[node.name] = number, len(self.nodes[number])
                    self.nodes[number].append(node)

    def are_alike(self) -> bool:
        """Return whether the third block equals the fourth, and nothing outside depends on which block it follows."""
        *_, third, last = self.nodes
        if not third or [self._seen(n, KEPT - 2) for n in third] != [self._seen(n, KEPT - 1) for n in last]:
            return False
        if any(node.op == "constant" for node in (*third, *last)):
            return False
        if any(name in self.home for _, name in self.graph.outputs):
            return False
        return all(map(self._reads_what_stays, self.graph.nodes)) and self._in_one_piece()

    def _reads_what_stays(self, node: Node) -> bool:
        """Return whether a node can stay when layers are added between.

        A layer may read weights of its own and of the first one. Nodes outside may read the first and the last layer.
        """
        own, outside = self.home.get(node.name, (-1, 0))[0], range(1, KEPT - 1)
        for name in node.inputs:
            number = self.home.get(name, (0, 0))[0]
            if number not in (0, own) and (self.graph.by_name[name].is_leaf or (own < 0 and number in outside)):
                return False
        return True

    def _in_one_piece(self) -> bool:
        """Return whether operators of the blocks lie side by side, one block after the other."""
        operators = [node for node in self.graph.nodes if not node.is_leaf]
        numbers = [self.home.get(node.name, (-1, 0))[0] for node in operators]
        inside = [i for i, number in enumerate(numbers) if number >= 0]
        run = numbers[inside[0] : inside[-1] + 1] if inside else []
        return -1 not in run and run == sorted(run)

    def _seen(self, node: Node, number: int) -> Hashable:
        """Return the facts of a node, equal for nodes of other blocks that do the same."""
        attrs = tuple((key, value) for key, value in node.attrs if key not in ("seed", "target"))
        path = str(node.attr("target")) if node.is_leaf else node.source.module
        return (
            node.op,
            attrs,
            self._within(path, number),
            node.source.line,
            tuple(self._place(i, number) for i in node.inputs),
        )

    def _within(self, path: str, number: int) -> str:
        return path.removeprefix(self.run.block(self.run.start + number))

    def _place(self, name: str, number: int) -> Hashable:
        block, place = self.home.get(name, (-1, 0))
        return ("own", place) if block == number else ("before", place) if block == number - 1 else ("far", name)

    def all_of_them(self) -> Graph:
        """Return the graph with copies of the third block before the last one, which is the last of all."""
        third = self.nodes[-2]
        before = {node.name: number for number, node in enumerate(self.nodes[-3])}
        numbers, fresh = range(self.run.start + KEPT - 1, self.run.stop), _Fresh(self.graph)
        called = {number: [self._called(node, number, fresh) for node in third] for number in numbers}
        called[numbers.start - 1] = [node.name for node in third]
        own = {node.name: place for place, node in enumerate(third)}

        def copies(number: int) -> Iterator[Node]:
            for place, node in enumerate(third):
                inputs = (
                    called[number][own[i]] if i in own else called[number - 1][before[i]] if i in before else i
                    for i in node.inputs
                )
                yield self._copy(replace(node, name=called[number][place], inputs=tuple(inputs)), number)

        made = {number: list(copies(number)) for number in numbers}
        last = {node.name: name for node, name in zip(self.nodes[-1], called[numbers[-1]], strict=True)}
        nodes, done = list[Node](), set[str]()
        for node in self.graph.nodes:
            if node.name not in last:
                nodes.append(replace(node, inputs=tuple(last.get(i, i) for i in node.inputs)))
                continue
            kind = node.op if node.is_leaf else ""  # leaves come first, by kind
            if kind not in done:
                done.add(kind)
                nodes += (c for own in made.values() for c in own if (c.op if c.is_leaf else "") == kind)
        outputs = tuple((key, last.get(name, name)) for key, name in self.graph.outputs)
        return Graph(tuple(nodes), outputs, self.graph.mesh)

    def _copy(self, node: Node, number: int) -> Node:
        """Return the node with the names of the layer that it lies in."""
        attrs = node.attrs
        if node.is_leaf:
            attrs = tuple((key, self._said(str(value), number) if key == "target" else value) for key, value in attrs)
        return replace(node, attrs=attrs, source=replace(node.source, module=self._said(node.source.module, number)))

    def _called(self, node: Node, number: int, fresh: _Fresh) -> str:
        """Return the name of a copy; leaves are named by their paths, as everywhere."""
        if node.is_leaf:
            return re.sub(r"\W", "_", self._said(str(node.attr("target")), number))
        return fresh(node.name, number)

    def _said(self, path: str, number: int) -> str:
        """Return a path in the third layer as it is in another layer."""
        own = self.run.block(self.run.start + KEPT - 2)
        return self.run.block(number) + path.removeprefix(own) if f"{path}.".startswith(f"{own}.") else path


class _Fresh:
    """New names with numbers as `torch.export` gives them: "addmm_9_1x" for a copy of "addmm_7_1x"."""

    def __init__(self, graph: Graph) -> None:
        self._last = Counter[str]()
        self._found = dict[tuple[str, str, int], int]()
        for node in graph.nodes:
            stem, number, _ = self._parts(node.name)
            self._last[stem] = max(self._last[stem], int(number or 0))

    def __call__(self, name: str, layer: int) -> str:
        """Return the name of a copy in another layer."""
        stem, number, rest = self._parts(name)
        if (stem, number, layer) not in self._found:
            self._last[stem] += 1
            self._found[stem, number, layer] = self._last[stem]
        return f"{stem}_{self._found[stem, number, layer]}{rest}"

    def _parts(self, name: str) -> tuple[str, str, str]:
        found = _NAME.fullmatch(name)
        assert found is not None
        return found["stem"], found["number"] or "", found["rest"]


def _drawn_in_order(graph: Graph) -> Graph:
    """Renumber the draws of random numbers in the order of the program."""
    numbers, nodes, before = Counter[str](), list[Node](), dict[str, Node]()
    for node in graph.nodes:
        if node.draw is not None:
            last, before[node.op] = before.get(node.op), node
            numbers[node.op] += last is None or not _of_one_call(last, node)
            seed = numbers[node.op] - 1
            node = replace(node, attrs=tuple((k, seed if k == "seed" else v) for k, v in node.attrs))
        nodes.append(node)
    return Graph(tuple(nodes), graph.outputs, graph.mesh)


def _of_one_call(last: Node, node: Node) -> bool:
    """Return whether a draw is a further result of the one before it.

    Layers are copies, so equal numbers alone do not show that.
    """
    if node.op != OPAQUE or last.draw != node.draw:
        return False
    return integer(dict(last.attrs), "result") < integer(dict(node.attrs), "result")
