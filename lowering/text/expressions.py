"""The expression that computes one node on a rank, as torch code over the names of its operands."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch

from shardwright.lowering.text.fusions import PEEPHOLES, Fused, GraphView, at, split_of
from shardwright.lowering.text.pieces import attribute, foreign_call, literal, opaque_call
from shardwright.pcg.analysis import copies_data
from shardwright.pcg.choice import axes_along, step_along
from shardwright.pcg.foreign import is_foreign
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.layout import shard_order
from shardwright.pcg.node import RECEIVED
from shardwright.pcg.optable import ROWS, Row
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.operation import Region
from shardwright.pcg.step.pairs import Pair
from shardwright.pcg.types import TensorType, is_float, promote

PIECE = "piece"
"""The name of a piece in the products of a pair."""
MOVE_FIRST, MOVE_LAST = "move_then_products", "product_then_move"
"""The functions that run pairs, in `lowering/runtime/pieces.py`."""


class Expressions:
    """The expressions of a graph's nodes.

    `aliases` maps each parallel operator that the runtime carries out to the node that stands for it. `elsewhere` names
    further nodes that are not written. `regions` maps each operation to the region that backward recomputes with it, if
    any. `split` names operators whose gradients of `weights` are computed in a second part of backward. `pairs` run in
    pieces. `away` names the values that wait for backward on the host. `drawn` names the dropouts whose masks are drawn
    earlier, in lines of their own.
    """

    def __init__(
        self,
        graph: Graph,
        aliases: Mapping[str, str],
        elsewhere: Collection[str],
        regions: Mapping[str, Region | None],
        split: Collection[str] = (),
        weights: Collection[str] = (),
        pairs: Sequence[Pair] = (),
        away: Collection[str] = (),
    ) -> None:
        self.graph, self.aliases, self.regions = graph, aliases, regions
        self.split_backward, self.weights, self.away = frozenset(split), frozenset(weights), frozenset(away)
        self.context = GraphView(graph, regions)
        self.fused: dict[str, Fused] = {}
        self.pairs = {name: pair for pair in pairs for name in pair.made}
        self.in_pairs = frozenset(name for pair in pairs for name in pair.operations)
        self.skipped: set[str] = {*aliases, *elsewhere}
        self._fuse()
        self.literals = self._literals()
        self.drawn: set[str] = set()

    @property
    def written(self) -> list[Node]:
        """The nodes that need a line."""
        return [n for n in self.graph.nodes if n.name not in self.skipped and n.name not in self.literals]

    def reads(self, node: Node) -> tuple[str, ...]:
        """Return the names that a node's expression reads."""
        pair = self.pairs.get(node.name)
        inputs = self._inputs(node) if pair is None else self._inputs_of(pair)
        names = tuple(name for name in inputs if name not in self.literals)
        return (*names, mask_key(node)) if node.name in self.drawn else names

    def _fuse(self) -> None:
        for node in reversed(self.graph.nodes):
            if node.name in self.skipped:
                continue
            fused = next((f for peephole in PEEPHOLES if (f := peephole(self.context, node))), None)
            if fused is not None and not self.skipped.intersection(fused.absorbed):
                self.fused[node.name] = fused
                self.skipped.update(fused.absorbed)
        for pair in self.pairs.values():
            self.skipped.update({*pair.operations}.difference(pair.made))

    def _inputs(self, node: Node) -> tuple[str, ...]:
        fused = self.fused.get(node.name)
        names = fused.inputs if fused else node.inputs
        return tuple(self.aliases.get(name, name) for name in names)

    def _inputs_of(self, pair: Pair) -> tuple[str, ...]:
        """Return the names that a pair reads: the value that is cut, then weights."""
        nodes = [self.graph.by_name[member.name] for member in chain(*pair.chains)]
        cut = pair.start if pair.move_first else pair.read
        inner = {pair.read, *pair.operations}
        names = (cut, *(name for node in nodes for name in node.inputs if name not in inner))
        return tuple(dict.fromkeys(self.aliases.get(name, name) for name in names))

    def _literals(self) -> dict[str, str]:
        """Return the zero-dimensional constants that every reader can take as a Python number, as text."""
        literals: dict[str, str] = {}
        for node in self.graph.nodes:
            if node.op == "full" and node.attr("shape") == () and node.name not in self.context.results:
                readers = [self.graph.by_name[name] for name in self.graph.users[node.name]]
                if readers and all(self._takes_number(reader, node.name, literals) for reader in readers):
                    literals[node.name] = literal(self._number(node, readers))
        return literals

    def _number(self, node: Node, readers: Sequence[Node]) -> object:
        """Return the value of a constant, rounded to its dtype if a reader computes in a wider one."""
        value, types = node.attr("value"), self.graph.types
        dtype = types[node.name].dtype
        if is_float(dtype) and any(
            is_float(d) and promote(d, dtype) != dtype for d in (types[r.name].dtype for r in readers)
        ):
            return torch.tensor(value, dtype=getattr(torch, dtype)).item()
        return value

    def _takes_number(self, reader: Node, number: str, literals: Mapping[str, str]) -> bool:
        row = reader.row
        if row is None or reader.name in self.fused:
            return False
        if any(name == number and position not in row.numbers for position, name in enumerate(reader.inputs)):
            return False
        others = [reader.inputs[position] for position in row.numbers if reader.inputs[position] != number]
        dtype, types = self.graph.types[number].dtype, self.graph.types
        result = dtype if types[reader.name].dtype == "bool" else types[reader.name].dtype
        return bool(others) and all(
            name not in literals
            and (types[name].dtype == dtype or (is_float(types[name].dtype) and types[name].dtype == result))
            for name in others
        )

    def operand(self, name: str, names: Mapping[str, str]) -> str:
        """Return a node's identifier, or the number that it stands for, as text."""
        name = self.aliases.get(name, name)
        return self.literals.get(name) or names[name]

    def of(self, node: Node, names: Mapping[str, str]) -> str:
        """Return the expression that computes a node, over identifiers."""
        if (pair := self.pairs.get(node.name)) is not None:
            return self._in_pieces(pair, node, names)
        text, fused = self._of(node, names), self.fused.get(node.name)
        if self.split_backward.isdisjoint((node.name, *(fused.absorbed if fused else ()))):
            return text
        read = {name: self.operand(name, names) for name in self._inputs(node) if name not in self.literals}
        groups = [
            {text: None for name, text in read.items() if (name in self.weights) == is_weight}
            for is_weight in (False, True)
        ]
        given = ", ".join(f"({', '.join(group)},)" for group in groups)
        return f"saved.apart(lambda {', '.join(chain(*groups))}: {text}, {given})"

    def _in_pieces(self, pair: Pair, node: Node, names: Mapping[str, str]) -> str:
        """Return the call that runs a pair; of several results, the node's."""
        inside = {**names, pair.read: PIECE}
        for member in chain(*pair.chains):
            inside[member.name] = f"({self._of(self.graph.by_name[member.name], inside)})"
        texts = ", ".join(inside[chain[-1].name][1:-1] for chain in pair.chains)
        axis, moved = self.graph.by_name[pair.move].attr("axis"), tuple(pair.moved)
        if pair.move_first:
            results = ", ".join(str(tuple(place)) for place in pair.results)
            given = f"{pair.function}, {self.operand(pair.start, names)}, {axis}, {moved}, {pair.num_pieces}"
            call = f"{MOVE_FIRST}({given}, lambda {PIECE}: ({texts},), {results})"
            return f"{call}[{pair.made.index(node.name)}]"
        given = f"{self.operand(pair.read, names)}, {tuple(pair.operand)}, {pair.num_pieces}"
        return f"{MOVE_LAST}(lambda {PIECE}: {texts}, {given}, {pair.function}, {axis}, {moved})"

    def _of(self, node: Node, names: Mapping[str, str]) -> str:
        fused = self.fused.get(node.name)
        operands = [self.operand(name, names) for name in self._inputs(node)]
        if fused is not None:
            return fused.text.format(*operands)
        if node.is_leaf:
            return f"{source_of(node)}[{node.attr('target')!r}]"
        if node.is_parallel:
            return self._parallel(node, operands[0])
        if is_foreign(node):
            return foreign_call(node, operands)
        if node.op == OPAQUE:
            return opaque_call(node, operands)
        if (split := split_of(self.context, node)) is not None:
            return split.format(*operands)
        return self._row(node, operands, names)

    def _parallel(self, node: Node, operand: str) -> str:
        axis = node.attr("axis")
        if node.op in (PARTITION, COMBINE):
            return f"{node.op}({operand}, {axis}, {at(self.context.place(node))})"
        in_place = self.context.sums_in_place(node.inputs[0], node) if node.op == REDUCE else None
        fresh = self._gradient_in_place(node) if in_place is None else in_place
        return f"{node.op}({operand}, {axis}{', inplace=True' if fresh else ''})"

    def _gradient_in_place(self, node: Node) -> bool:
        rows = [self.graph.by_name[name].row for name in self.graph.users[node.name]]
        return all(row is not None and row.fresh_gradients for row in rows)

    def _row(self, node: Node, operands: list[str], names: Mapping[str, str]) -> str:
        row = ROWS[node.op]
        attrs: dict[str, Any] = {k: attribute(v) for k, v in self.graph.local_attrs(node).items()}
        if row.offset is not None:
            attrs["offset"] = self._offset(node, row.offset)
        if row.random:
            attrs["shard"] = self._shard(self.graph.types[node.name])
            attrs["draw"] = names[draw_key(node)]
            if node.name in self.drawn:
                return f"rt.drop({operands[0]}, {attrs['p']}, {names[mask_key(node)]}, {attrs['shard']})"
        numbers = [operand for operand in operands if operand in self.literals.values()]
        if row.with_number and len(numbers) == 1:
            (tensor,) = (operand for operand in operands if operand not in numbers)
            return row.with_number.format(tensor, *numbers)
        attrs["*"] = ", ".join(operands)
        attrs["*1"] = ", ".join(operands[1:])
        if len(operands) == 2 and operands[0].startswith("-") and operands[0] in self.literals.values():
            operands = [f"({operands[0]})", operands[1]]
        call = row.torch.replace("rt.device()", "device").format(*operands, **attrs)
        if self._is_copied_for_others(node):
            return f"{call}.contiguous()"
        ways = "".join(f", {way}" for way in (*self._ways(node), *self._steps(node, row)))
        return f"{call.removesuffix(')')}{ways})" if ways else call

    def _is_copied_for_others(self, node: Node) -> bool:
        """Return whether to copy a permutation that backward recomputes, or that waits on the host.

        It is copied for its readers, or those outside its region: each of them would otherwise save a copy of its own.
        """
        if node.op != "permute":
            return False
        region, readers = self.regions.get(node.name), self.graph.users[node.name]
        is_recomputed = region is not None and region.results is Fate.AGAIN
        leaves = is_recomputed and any(self.regions.get(name) != region for name in readers)
        return (leaves or node.name in self.away) and copies_data(self.graph, node)

    def _offset(self, node: Node, factor: str) -> str:
        """Return this rank's first position along a factor of an operand or the result, as code.

        It is "None" if the rank has all of it.
        """
        mesh = self.graph.mesh
        axes = [a for a in axes_along(node.split, factor) if mesh.sizes[a] > 1]
        if not axes:
            return "None"
        signature = self.graph.signature(node)
        alone = (signature.index(factor),)
        tensors = zip((*node.inputs, node.name), (*signature.operands, signature.result), strict=True)
        held, dims = next((n, d) for n, d in tensors if alone in d)
        kind = self.graph.types[held]
        spread = [a for a in axes if node.split[a].blocks > 1]  # the innermost ones: neighbours lie on other ranks
        near, extent = self._position(spread), kind.local_shape(mesh)[dims.index(alone)]
        far = self._position([a for a in axes if a not in spread])
        places = [f"{far} * {extent * prod(mesh.sizes[a] for a in spread)}"] if far else []
        return " + ".join([*places, near] if near else places)

    def _steps(self, node: Node, row: Row) -> Iterator[str]:
        """Yield the argument that says how far apart a rank's positions are, unless they are neighbours."""
        if (step := step_along(node.split, self.graph.mesh.sizes, row.offset)) > 1:
            yield f"step={step}"

    def _position(self, axes: Sequence[int]) -> str:
        """Return this rank's number along these axes, the outermost first, as code."""
        mesh, position = self.graph.mesh, ""
        for a in axes:
            rank = f"{mesh.names[a]}.rank"
            position = f"({position} * {mesh.sizes[a]} + {rank})" if position else rank
        return position

    def _ways(self, node: Node) -> Iterator[str]:
        """Yield the further arguments of an operator's kernel, one for each axis along which devices exchange data."""
        mesh = self.graph.mesh
        for exchange in self.graph.exchanges(node):
            along = axes_along(node.split, node.split[exchange.axis].inner.factors[0])
            outer = [a for a in along if a < exchange.axis and mesh.sizes[a] > 1]
            yield exchange.call(mesh.names[exchange.axis], self._position(outer))

    def _shard(self, kind: TensorType) -> str:
        steps = shard_order(kind.shape, kind.layouts, self.graph.mesh.sizes)
        if not steps:
            return "None"
        places = ", ".join(f"({self.graph.mesh.names[a]}, {dim}, {blocks})" for a, dim, blocks in steps)  # type: ignore[misc]
        return f"rt.Shard({kind.shape}, {places})"


def source_of(node: Node) -> str:
    """Return the name of the program's mapping that holds a leaf: `batch` or `leaf`."""
    return "batch" if node.op in ("input", RECEIVED) else "leaf"


def draw_key(node: Node) -> str:
    """Return the key of a dropout's draw, which functions write as an offset from their first draw."""
    return f"draw {node.attr('seed')}"


def mask_key(node: Node) -> str:
    """Return the key of the mask that is drawn ahead of a dropout; no node has this name."""
    return f"mask {node.attr('seed')}"
