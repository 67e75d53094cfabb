"""Pairs of a move and the products beside it, which run in pieces: one travels while another is computed.

    the move first    combine, gather_copy or replicate, and the products that read its result
    the move last     a product, and the reduce, reduce_scatter or reduce_copy of its result

A piece is what a member of an axis of time inside the products has: they are split once more, `Split(f, b)`, along the
factor that the move gathers or scatters, or along rows where it only sums. The certificate of that choice covers
forward and gradients (lemma `pieces`), so a pair is a way to carry out what the graph says already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shardwright.pcg.analysis import written
from shardwright.pcg.choice import Split, indivisible
from shardwright.pcg.errors import GraphError, LayoutError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.layout import Layout, Layouts, S, local_blocks, shard_order
from shardwright.pcg.moves import Move
from shardwright.pcg.optable import ROWS
from shardwright.pcg.row import keep_attrs
from shardwright.pcg.step.operation import Operation

FIRST, LAST = ("combine", "gather_copy", "replicate"), ("reduce", "reduce_scatter", "reduce_copy")
"""The functions of moves that come before products, and of those that come after one."""


class Place(NamedTuple):
    """The pieces of a device's part of a tensor: each is a slice of each of `blocks` equal blocks of a dimension."""

    dim: int
    blocks: int


class Member(NamedTuple):
    """A product of a pair, or the addition of its bias, and the choice of which its pieces are the members."""

    name: str
    choice: Split


@dataclass(frozen=True, slots=True)
class Pair:
    """A move and products that run in `num_pieces` pieces.

    Attributes:
        move: the last node of the move; `function`: that carries it out; `start`: the value before it.
        chains: the products, each with the addition of its bias; the last of each gives what others read.
        read: the operand of all products that is cut.
        moved: the place of pieces in a device's part, before a gather or after a scatter; if the move only sums, of
            both.
        operand, results: the place of pieces in what the products read, and in what each chain gives.
    """

    move: str
    function: str
    start: str
    num_pieces: int
    chains: tuple[tuple[Member, ...], ...]
    read: str
    moved: Place
    operand: Place
    results: tuple[Place, ...]

    @property
    def move_first(self) -> bool:
        """True if the move comes before the products, and false if it comes after one."""
        return self.function in FIRST

    @property
    def operations(self) -> tuple[str, ...]:
        """All operations of the pair in order."""
        products = tuple(member.name for chain in self.chains for member in chain)
        return (self.move, *products) if self.move_first else (*products, self.move)

    @property
    def made(self) -> tuple[str, ...]:
        """The operations whose values others read."""
        return tuple(chain[-1].name for chain in self.chains) if self.move_first else (self.move,)


def find_pairs(
    graph: Graph, moves: Mapping[str, tuple[str, Move]], listed: Sequence[Operation], num_pieces: int
) -> list[Pair]:
    """Return the pairs of a graph that can run in so many pieces, in order; no operation is in two of them.

    `moves`: each move's start, by its last node; `listed`: the operations. The operations of a pair lie in one block
    and are made again together, if at all.
    """
    finder, pairs, taken = _Finder(graph, {o.name: o for o in listed}, num_pieces), list[Pair](), set[str]()
    for operation in listed if num_pieces > 1 else ():
        if operation.name in moves and operation.verb == "run":
            pair = finder.pair(operation.name, *moves[operation.name])
            if pair is not None and taken.isdisjoint(pair.operations):
                pairs.append(pair)
                taken.update(pair.operations)
    return pairs


def side_by_side(listed: Sequence[Operation], pairs: Sequence[Pair]) -> list[Operation]:
    """Return the operations with those of each pair one after the other.

    A move goes to its first reader, which the other readers follow, and a product to its move.
    """
    operations = {o.name: o for o in listed}
    at = {pair.operations[1] if pair.move_first else pair.move: pair for pair in pairs}
    elsewhere, in_order = {name for pair in pairs for name in pair.operations}, list[Operation]()
    for operation in listed:
        if (pair := at.get(operation.name)) is not None:
            in_order += [operations[name] for name in pair.operations]
        elif operation.name not in elsewhere:
            in_order.append(operation)
    return in_order


class _Finder:
    def __init__(self, graph: Graph, operations: Mapping[str, Operation], num_pieces: int) -> None:
        self.graph, self.operations, self.num_pieces = graph, operations, num_pieces
        self.sizes = (*graph.mesh.sizes, num_pieces)
        self.results = {name for _, name in graph.outputs}
        self.order = {name: number for number, name in enumerate(operations)}

    def pair(self, name: str, start: str, move: Move) -> Pair | None:
        """Return the pair of a move, if there is one."""
        function, own_pair = move.kind.function, None
        if self.graph.mesh.device_sizes[move.axis] == 1:
            return None
        if function in FIRST:
            own_pair = self._move_first(name, start, move)
        elif function in LAST:
            own_pair = self._move_last(name, start, move)
        operations = [self.operations[each] for each in own_pair.operations] if own_pair else []
        return own_pair if len({(o.block, o.region) for o in operations}) == 1 else None

    def _move_first(self, name: str, start: str, move: Move) -> Pair | None:
        readers = sorted(set(self.graph.users[name]), key=lambda reader: self.order.get(reader, -1))
        if name in self.results or not readers or not all(map(self._is_product, readers)):
            return None
        others = {read for reader in readers for read in self.operations[reader].reads} - {name}
        if any(self.order.get(read, -1) > self.order[readers[0]] for read in others):
            return None  # a later reader cannot run with the first
        for moved, place in self._places(name, start, move):
            chains = tuple(self._chain(reader, name, place) for reader in readers)
            if all(chains):
                results = tuple(self._place(chain[-1].name, self._layouts(*chain[-1])[1]) for chain in chains)
                shape = move.kind.function, start, self.num_pieces
                return Pair(name, *shape, chains, name, moved, place, results)
        return None

    def _move_last(self, name: str, start: str, move: Move) -> Pair | None:
        if not self._is_product(start) or len(self.graph.users[start]) != 1 or start in self.results:
            return None
        node = self.graph.by_name[start]
        for moved, place in self._places(start, name, move):
            for number, operand in enumerate(node.inputs):
                choice = self._choice(node, number, place, of_result=True)
                if choice is not None and operand in self.operations[start].reads:
                    shape, chains = (move.kind.function, start, self.num_pieces), ((Member(start, choice),),)
                    cut = self._place(operand, self._layouts(start, choice)[0][number])
                    return Pair(name, *shape, chains, operand, moved, cut, (place,))
        return None

    def _is_product(self, name: str) -> bool:
        row = self.graph.by_name[name].row
        return name in self.operations and row is not None and (
            row.contraction and row.fresh and row.passes == 1 and row.offset is None and row.localize is keep_attrs
        )  # fmt: skip

    def _chain(self, product: str, moved: str, place: Place) -> tuple[Member, ...]:
        """Return a product in pieces, with the addition of its bias; nothing if it cannot be cut."""
        choice = self._along(product, moved, place)
        if choice is None:
            return ()
        member, users = Member(product, choice), self.graph.users[product]
        if len(users) == 1 and self._adds_bias(users[0], product):
            added = self._along(users[0], product, self._place(product, self._layouts(*member)[1]))
            return () if added is None else (member, Member(users[0], added))
        return (member,)

    def _adds_bias(self, name: str, product: str) -> bool:
        node = self.graph.by_name[name]
        is_whole = all(layout.kind != "P" for layout in self.graph.types[name].layouts)
        return name in self.operations and is_whole and product in node.inputs and written(self.graph, node) == "fused"

    # ---- places and choices ----

    def _places(self, whole: str, part: str, move: Move) -> Iterator[tuple[Place, Place]]:
        """Yield where pieces may lie in the `part` that the move gathers or gives, and in the value `whole`.

        Where it only sums, they may lie in any dimension; the outermost comes first.
        """
        layouts = self.graph.types[part].layouts
        if layouts[move.axis].is_shard:
            dim, blocks = layouts[move.axis].dim, local_blocks(layouts, move.axis, self.graph.mesh.sizes)
            yield Place(dim, blocks), Place(dim, blocks * self.sizes[move.axis])
        else:
            yield from ((Place(dim, 1), Place(dim, 1)) for dim in range(len(self.graph.types[whole].shape)))

    def _along(self, name: str, operand: str, place: Place) -> Split | None:
        node = self.graph.by_name[name]
        return self._choice(node, node.inputs.index(operand), place)

    def _choice(self, node: Node, number: int, place: Place, *, of_result: bool = False) -> Split | None:
        """Return the choice whose members are pieces of the result and of one operand alone.

        They lie at this place of that operand, or of the result.
        """
        signature, row = self.graph.signature(node), ROWS[node.op]
        held = signature.result if of_result else signature.operands[number]
        (factor, *more), name = held[place.dim] or (-1,), node.name if of_result else node.inputs[number]
        layout = self._layout(name, place)
        if factor < 0 or more or layout is None or signature.factors[factor].role != "map":
            return None
        if node.inputs.count(node.inputs[number]) > 1:
            return None  # a product with itself, `linear(x, x)`, reads all of it beside each piece
        if any((factor in sum(dims, ())) != (i == number) for i, dims in enumerate(signature.operands)):
            return None
        choice = Split(signature.factors[factor].name, layout.blocks)
        try:
            operands, result = choice.layouts(signature, row)
        except (LayoutError, GraphError):
            return None
        fits = self._fits(node.inputs[number], operands[number]) and self._fits(node.name, result)
        return choice if fits and indivisible(signature, (*node.split, choice), self.sizes) is None else None

    def _layouts(self, name: str, choice: Split) -> tuple[Layouts, Layout]:
        node = self.graph.by_name[name]
        return choice.layouts(self.graph.signature(node), ROWS[node.op])

    def _layout(self, name: str, place: Place) -> Layout | None:
        """Return the layout along the axis of pieces, the innermost, of pieces at this place of a device's part."""
        outer = [(x.blocks, size) for x, size in self._shards(name, place.dim)]
        whole = place.blocks * prod(size for _, size in outer)
        return next(
            (layout for blocks in (max(outer, default=(1, 1))[0], whole)
             if self._place(name, layout := S(place.dim, blocks)) == place), None,
        )  # fmt: skip

    def _shards(self, name: str, dim: int) -> Iterator[tuple[Layout, int]]:
        pairs = zip(self.graph.types[name].layouts, self.graph.mesh.sizes, strict=True)
        return ((layout, size) for layout, size in pairs if layout.is_shard and layout.dim == dim)

    def _place(self, name: str, layout: Layout) -> Place:
        """Return where pieces of this layout lie in a device's part of a value."""
        layouts = (*self.graph.types[name].layouts, layout)
        return Place(layout.dim, local_blocks(layouts, len(layouts) - 1, self.sizes))

    def _fits(self, name: str, layout: Layout) -> bool:
        kind = self.graph.types[name]
        return not isinstance(shard_order(kind.shape, (*kind.layouts, layout), self.sizes), str)
