"""The graph of a whole model, from that of a model in which few layers run: each layer is a copy of one of its kind.

A copy reads what its kind reads: its own values, what the layer right before it hands on, and what all layers read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from shardwright.pcg.attrs import integer
from shardwright.pcg.capture.depth import Layers
from shardwright.pcg.graph import OPAQUE, Graph, Node

_NAME = re.compile(r"(?P<stem>.*?)(_(?P<number>\d+))?(?P<rest>(_\d+x.*)?)")


def deepened(graph: Graph, found: Sequence[Layers]) -> Graph | None:
    """Return the graph of all layers, from that of a shortened model; None if its layers form no chain."""
    for layers in found:
        blocks = _Blocks(graph, layers)
        if not blocks.can_be_copied():
            return None
        graph = blocks.all_of_them()
    is_named = len({node.name for node in graph.nodes}) == len(graph.nodes)  # else two nodes share a name
    return _drawn_in_order(graph) if is_named else None


class _Blocks:
    """The nodes of a graph that lie in the layers of a list, parameters and buffers included."""

    def __init__(self, graph: Graph, layers: Layers) -> None:
        self.graph, self.layers = graph, layers
        self.before, self.kept_before = layers.before, layers.kept_before
        self.number = dict[str, int]()  # by name, the block
        self.home = dict[str, tuple[int, int]]()  # by name, the block and the place in it; without what is common
        self.nodes: dict[int, list[Node]] = {number: [] for number in layers.kept}
        inside = re.compile(rf"{re.escape(layers.path)}\.(\d+)\.")
        for node in graph.nodes:
            found = inside.match(f"{node.attr('target') if node.is_leaf else node.source.module}.")
            if found is None:
                continue
            number = self.number[node.name] = int(found[1])
            if node.is_leaf or node.draw is not None or any(self._is_own(name) for name in node.inputs):
                self.home[node.name] = number, len(self.nodes[number])
                self.nodes[number].append(node)

    def _is_own(self, name: str) -> bool:
        """Return whether a value lies in a block and follows from its weights or draws.

        Others are common to all layers: capture computes them once, in the first layer that reads them.
        """
        return name in self.home

    # ---- what has to hold ----

    def can_be_copied(self) -> bool:
        """Return whether equal calls have become equal nodes, in blocks one after the other, and all can be linked."""
        copied = {kept for number, kept in self.layers.stands_for.items() if number != kept}
        if not all(self.nodes.values()) or any(n.op == "constant" for kept in copied for n in self.nodes[kept]):
            return False
        if any(name in self.home for _, name in self.graph.outputs) or not (self._in_one_piece() and self._are_alike()):
            return False
        return all(self._is_linked(number) for number in self.before)

    def _in_one_piece(self) -> bool:
        """Return whether the nodes of blocks lie side by side, one block after the other, in each kind of leaf too."""
        for _, nodes in self._by_kind(self.graph.nodes):
            numbers = [self.number.get(node.name, -1) for node in nodes]
            inside = [i for i, number in enumerate(numbers) if number >= 0]
            run = numbers[inside[0] : inside[-1] + 1] if inside else []
            if -1 in run or run != sorted(run):
                return False
        return True

    def _are_alike(self) -> bool:
        """Return whether exported layers that make the same calls have the same nodes."""
        seen = dict[int, list[Hashable]]()
        for number, nodes in self.nodes.items():
            slots = {name: slot for slot, name in enumerate(self._handed_to(number))}
            own = [self._seen(node, number, slots) for node in nodes]
            if number in self.kept_before and own != seen.setdefault(self.layers.calls[number], own):
                return False
        return True

    def _seen(self, node: Node, number: int, slots: Mapping[str, int]) -> Hashable:
        """Return the facts of a node, equal for nodes of other blocks that do the same."""
        attrs = tuple((key, value) for key, value in node.attrs if key not in ("seed", "target"))
        path = str(node.attr("target")) if node.is_leaf else node.source.module
        inputs = tuple(
            ("before", slots[i]) if i in slots else ("own", self.home[i][1]) if self._is_of(i, number) else ("far", i)
            for i in node.inputs
        )
        return node.op, attrs, path.removeprefix(self.layers.block(number)), node.source.line, inputs

    def _is_of(self, name: str, number: int) -> bool:
        return self.home.get(name, (-1, 0))[0] == number

    def _handed_to(self, number: int) -> list[str]:
        """Return the values of the exported layer right before this one that it reads, in the order of reading."""
        return self._read_by(self.nodes[number], self.kept_before.get(number, -1))

    def _read_by(self, nodes: Iterable[Node], number: int) -> list[str]:
        """Return the operators of a block that these nodes read, in order."""
        read = dict.fromkeys(name for node in nodes for name in node.inputs if self._is_of(name, number))
        return [name for name in read if not self.graph.by_name[name].is_leaf]

    # ---- what a layer reads of the one before it ----

    def _link(self, number: int) -> Mapping[str, int] | None:
        """Return by name, for what the layer exported for this one reads of the one before it, the place there.

        None if it is not clear. Where the layer before is of another kind than the one that was exported before, it is
        only clear for one value.
        """
        kept, before = self.layers.stands_for[number], self.before[number]
        read, kinds = self._handed_to(kept), self.layers.kinds
        if kinds[self.kept_before[kept]] == kinds[before]:
            return {name: self.home[name][1] for name in read}
        gives = self._given_by(self.layers.stands_for[before])
        if len(read) != 1 or len(gives) != 1 or self.graph.types[read[0]] != self.graph.types[gives[0]]:
            return None
        return {read[0]: self.home[gives[0]][1]}

    def _is_linked(self, number: int) -> bool:
        return self._link(number) is not None

    def _given_by(self, kept: int) -> list[str]:
        """Return what the layer exported right after this one reads of it, or what follows the last."""
        after = {before: after for after, before in self.kept_before.items()}
        return self._handed_to(after[kept]) if kept in after else self._read_by(self._outside, kept)

    @cached_property
    def _outside(self) -> Sequence[Node]:
        """The nodes that do not lie in blocks."""
        return [node for node in self.graph.nodes if node.name not in self.number]

    # ---- the graph of all ----

    @cached_property
    def called(self) -> Mapping[int, Sequence[str]]:
        """Return, by layer, the names of its nodes in the graph of all layers."""
        fresh, found = _Fresh(self.graph), dict[int, Sequence[str]]()
        for number, kept in self.layers.stands_for.items():
            nodes = self.nodes[kept]
            found[number] = [n.name if number == kept else self._called(n, number, kept, fresh) for n in nodes]
        return found

    def all_of_them(self) -> Graph:
        """Return the graph with copies of exported layers in the places of the others."""
        made = [node for number in self.layers.stands_for for node in self._copies(number)]
        inside, nodes = dict(self._by_kind(made)), list[Node]()
        (*_, last), kept = self.layers.stands_for, self.layers.kept[-1]
        read = {name: self.called[last][self.home[name][1]] for name in self._read_by(self._outside, kept)}
        for kind, own in self._by_kind(self.graph.nodes):
            start = next((i for i, node in enumerate(own) if node.name in self.number), len(own))
            rest = [self._reading(node, read) for node in own[start:] if node.name not in self.number]
            nodes += (*own[:start], *inside.get(kind, ()), *rest)
        return Graph(tuple(nodes), self.graph.outputs, self.graph.mesh).validate()

    def _by_kind(self, nodes: Iterable[Node]) -> list[tuple[str, list[Node]]]:
        """Return the leaves by their kind, then the operators, in the order in which graphs have them."""
        found = dict[str, list[Node]]()
        for node in nodes:
            found.setdefault(self._kind(node), []).append(node)
        return [*found.items()]

    def _kind(self, node: Node) -> str:
        return node.op if node.is_leaf else ""

    def _copies(self, number: int) -> Iterator[Node]:
        kept, called = self.layers.stands_for[number], self.called
        names = {node.name: name for node, name in zip(self.nodes[kept], called[number], strict=True)}
        if number in self.before:
            link = self._link(number) or {}
            names |= {name: called[self.before[number]][place] for name, place in link.items()}
        common = (node for node in self.graph.nodes if self.number.get(node.name) == number)
        for node in common if number == kept else self.nodes[kept]:
            copy = replace(self._reading(node, names), name=names.get(node.name, node.name))
            yield copy if number == kept else self._relabelled(copy, number, kept)

    def _reading(self, node: Node, names: Mapping[str, str]) -> Node:
        """Return the node with other operands."""
        return replace(node, inputs=tuple(names.get(i, i) for i in node.inputs))

    def _relabelled(self, node: Node, number: int, kept: int) -> Node:
        """Return the node with the paths of the layer that it lies in."""
        attrs = node.attrs
        if node.is_leaf:
            attrs = tuple((k, self._said(str(value), number, kept) if k == "target" else value) for k, value in attrs)
        path = self._said(node.source.module, number, kept)
        return replace(node, attrs=attrs, source=replace(node.source, module=path))

    def _called(self, node: Node, number: int, kept: int, fresh: _Fresh) -> str:
        """Return the name of a copy; leaves are named by their paths, as everywhere."""
        if node.is_leaf:
            return re.sub(r"\W", "_", self._said(str(node.attr("target")), number, kept))
        return fresh(node.name, number)

    def _said(self, path: str, number: int, kept: int) -> str:
        """Return a path in the exported layer as it is in another layer."""
        own = self.layers.block(kept)
        return self.layers.block(number) + path.removeprefix(own) if f"{path}.".startswith(f"{own}.") else path


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
