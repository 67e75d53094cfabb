"""How parameters reach their readers, and what of that the runtime does outside the program.

`replicate` on a stored parameter is no operator of the program: every reader lies behind it, so the gradient may be
summed once, when all of it is there (`reducer.py`). `combine` of a sharded parameter (ZeRO-3), alone or with
`replicate` along the same axis, is done for a whole block of the model at a time (`blocks.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardwright.lowering.fusions import GraphView
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.optable import ROWS
from shardwright.pcg.parallel import COMBINE, REPLICATE

BLOCK_BYTES = 128 << 20
"""A block is closed when its gathered parameters have reached this size."""


@dataclass(frozen=True)
class Gathered:
    """A parameter stored in slices along `axis`, gathered before use; `result` is the node that readers see.

    `dim`, `blocks`: the slices, in blocks of what the other axes leave. `copied`: used differently on each rank, so
    that its gradient is reduce-scattered; otherwise every rank has the whole gradient and keeps its slice.
    """

    leaf: str
    result: str
    axis: str
    dim: int
    blocks: int
    copied: bool


@dataclass(frozen=True)
class Block:
    """Parameters of one module block that are gathered, freed and reduce-scattered together."""

    module: str
    members: tuple[Gathered, ...]


@dataclass
class Paths:
    """What the runtime does for parameters.

    summed      for each parameter that gets a gradient, in the order in which gradients become complete: the axes
                (names, in mesh order) that the gradient is summed over when the backward has made it
    aliases     the parallel operators that this replaces, and the node whose value their readers see
    blocks      in the order of first use
    """

    summed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)


def find_paths(graph: Graph) -> Paths:
    """Follow every parameter from its storage to its readers."""
    paths, first_use, gathered = Paths(), dict[str, int](), list[Gathered]()
    position = {node.name: i for i, node in enumerate(graph.nodes)}
    for leaf in graph.leaves("parameter"):
        walk = _Walk(graph, leaf)
        paths.aliases.update(walk.aliases)
        if walk.gathered is not None:
            gathered.append(walk.gathered)
        readers = [position[u] for name in walk.seen for u in graph.users[name] if u not in walk.seen]
        first_use[leaf.name] = min(readers, default=len(position))
        if graph.types[leaf.name].grad:
            paths.summed[leaf.name] = tuple(a for a in graph.mesh.names if a in walk.summed)
    paths.summed = dict(sorted(paths.summed.items(), key=lambda item: -first_use[item[0]]))
    paths.blocks = _blocks(graph, sorted(gathered, key=lambda g: first_use[g.leaf]))
    return paths


class _Walk:
    """The parallel operators between one leaf and its readers."""

    def __init__(self, graph: Graph, leaf: Node) -> None:
        self.graph = graph
        self.context = GraphView(graph)
        self.sizes = dict(zip(graph.mesh.names, graph.mesh.sizes, strict=True))
        self.aliases: dict[str, str] = {}
        self.summed: set[str] = set()
        self.seen = [leaf.name]
        self.gathered: Gathered | None = None
        self.visible = leaf.name
        name: str | None = leaf.name
        while name is not None and name not in self.context.results:
            name = self._pass(leaf, name)

    def _pass(self, leaf: Node, name: str) -> str | None:
        """Go through the operators that read `name` if all are one and the same; the next name, or None at the end."""
        readers = list(dict.fromkeys(self.graph.users[name]))
        nodes = [self.graph.by_name[reader] for reader in readers]
        if not nodes or len({(n.op, n.attr("axis") if n.is_parallel else n.name) for n in nodes}) > 1:
            return None
        axis = str(nodes[0].attr("axis")) if nodes[0].is_parallel else ""
        if nodes[0].op == REPLICATE:
            self._replicate(readers, axis)
        elif nodes[0].op == COMBINE and len(nodes) == 1 and self.gathered is None:
            self._combine(leaf, nodes[0], axis)
        else:
            return None
        self.seen += readers
        return readers[0] if len(readers) == 1 else None

    def _replicate(self, readers: list[str], axis: str) -> None:
        if self.gathered is not None and self.gathered.axis == axis:
            self.gathered = replace(self.gathered, copied=True)
        elif self.sizes[axis] > 1:
            self.summed.add(axis)
        self.aliases.update(dict.fromkeys(readers, self.visible))

    def _combine(self, leaf: Node, node: Node, axis: str) -> None:
        if self.sizes[axis] == 1:
            self.aliases[node.name] = self.visible
            return
        dim, blocks = self.context.place(node)
        self.gathered = Gathered(leaf.name, node.name, axis, dim, blocks, False)
        self.visible = node.name


def _blocks(graph: Graph, gathered: Iterable[Gathered]) -> list[Block]:
    """Neighbours in the order of first use that belong to one module block, one axis and one dtype."""
    groups: list[list[Gathered]] = []
    last: tuple[str, ...] = ()
    size = 0
    for member in gathered:
        kind = graph.types[member.result]
        key = (module_block(str(graph.by_name[member.leaf].attr("target"))), member.axis, kind.dtype)
        if key != last or size >= BLOCK_BYTES:
            groups.append([])
            last, size = key, 0
        groups[-1].append(member)
        size += kind.local_bytes(graph.mesh)
    names = [module_block(str(graph.by_name[group[0].leaf].attr("target"))) for group in groups]
    return [Block(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


def module_block(name: str) -> str:
    """The repeated part of the model that a parameter belongs to: `h.3.attn.weight` is in `h.3`; others are in ``."""
    match = re.match(r"((?:[^.]+\.)*?\d+)\.", name)
    return match[1] if match else ""


def last_readers(graph: Graph, name: str) -> set[str]:
    """Everything that may read a value's memory: its readers, and the readers of views of it."""
    found: set[str] = set()
    pending = [name]
    while pending:
        for user in graph.users[pending.pop()]:
            if user in found:
                continue
            found.add(user)
            node = graph.by_name[user]
            if node.is_parallel or (node.op in ROWS and (ROWS[node.op].view or node.op in ("cast", "contiguous"))):
                pending.append(user)
    return found
