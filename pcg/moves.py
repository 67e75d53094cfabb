"""Moves: the changes of layout along one mesh axis that run as one, and the collective that carries out each.

    before   after     operators                 forward          backward         function
    R        S(d)      partition                 slice            all-gather       partition
    S(d)     R         combine                   all-gather       slice            combine
    R        C         replicate                 nothing          all-reduce       replicate
    P        R         reduce                    all-reduce       nothing          reduce
    P        S(d)      reduce, partition         reduce-scatter   all-gather       reduce_scatter
    S(d)     C         combine, replicate        all-gather       reduce-scatter   gather_copy
    P        C         reduce, replicate         all-reduce       all-reduce       reduce_copy
    S(d)     S(e)      combine, partition        all-to-all       all-to-all       all_to_all

`MOVES` is this table: the cost model prices it, the search chooses among it, the lowering calls its functions, the
rules of the parallel operators and the reports read its names. Any other change of a layout is several moves.

From a shard to a shard there are two kinds. To another dimension: each device sends each other one its slice along the
new dimension. To the same one in other blocks, `S(d, m) → S(d, n)` on an axis of size k: each device's slices are cut
once more, or put together, and all messages are of one size exactly where n is a multiple of m·k, or m one of n·k.
Otherwise it is a `combine` and a `partition`, which run one after the other.

Along time nothing moves: a microbatch takes its slice, gradients of weights are accumulated, and summands of
microbatches are summed up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.pcg.attrs import Attr
from shardwright.pcg.graph import Graph, Node, make_attrs
from shardwright.pcg.layout import Layout, Layouts, R, innermost, local_blocks
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.parallel import COMBINE, PARTITION, REDUCE, REPLICATE

SLICE = "slice"
"""A device's work alone: no collective, but a copy."""
ALONE = "alone"
"""The attribute of a parallel operator that is not to be fused with the one before."""


@dataclass(frozen=True, slots=True)
class MoveKind:
    """A way for a value to go from one kind of layout to another.

    Attributes:
        operators: the parallel operators that it stands for.
        forward, backward: the collective of the value, and that of its gradient; `SLICE`, or "" where nothing happens.
        function: the function that a lowered program calls, in `lowering/runtime/collectives.py`.
        words: a description for people.
    """

    operators: tuple[str, ...]
    forward: str
    backward: str
    function: str
    words: str


MOVES: Mapping[tuple[str, str], MoveKind] = {
    ("R", "S"): MoveKind(
        (PARTITION,), SLICE, "all_gather", PARTITION, "each device takes its slice; gradients all-gathered"
    ),
    ("S", "R"): MoveKind((COMBINE,), "all_gather", SLICE, COMBINE, "all-gathered; gradients sliced"),
    ("R", "C"): MoveKind((REPLICATE,), "", "all_reduce", REPLICATE, "gradients all-reduced"),
    ("P", "R"): MoveKind((REDUCE,), "all_reduce", "", REDUCE, "partial sums all-reduced"),
    ("P", "S"): MoveKind(
        (REDUCE, PARTITION), "reduce_scatter", "all_gather", "reduce_scatter",
        "partial sums reduce-scattered; gradients all-gathered",
    ),
    ("S", "C"): MoveKind(
        (COMBINE, REPLICATE), "all_gather", "reduce_scatter", "gather_copy",
        "all-gathered; gradients reduce-scattered",
    ),
    ("P", "C"): MoveKind(
        (REDUCE, REPLICATE), "all_reduce", "all_reduce", "reduce_copy",
        "partial sums all-reduced; gradients all-reduced",
    ),
    ("S", "S"): MoveKind((COMBINE, PARTITION), "all_to_all", "all_to_all", "all_to_all", "all-to-all, both ways"),
}  # fmt: skip
"""The moves by the kinds of layout before and after."""

FUSED: Mapping[tuple[str, ...], str] = {
    kind.operators: kind.function for kind in MOVES.values() if len(kind.operators) > 1
}
"""The functions of moves of two operators, by the operators."""


Operator = tuple[str, tuple[tuple[str, Attr], ...]]
"""A parallel operator and its attributes."""


@dataclass(frozen=True, slots=True)
class Move:
    """A change of layout along one axis that is in the table."""

    axis: int
    before: Layout
    after: Layout

    @property
    def kind(self) -> MoveKind:
        return MOVES[self.before.kind, self.after.kind]

    def collectives(self) -> tuple[str, str]:
        """Return the collectives of the forward and of the backward pass ("" or "slice" if there is none)."""
        return self.kind.forward, self.kind.backward


def move_between(before: Layouts, after: Layouts, axis: int, sizes: tuple[int, ...]) -> Move | None:
    """Return the move between two states that differ on `axis`, on a mesh of `sizes`; None if it takes more than one.

    Only the innermost shard of a dimension moves without the others.
    """
    old, new = before[axis], after[axis]
    if old == new or (old.kind, new.kind) not in MOVES:
        return None
    if any(state[axis].is_shard and not innermost(state, axis) for state in (before, after)):
        return None
    if old.is_shard and old.dim == new.dim:
        fewer, more = sorted(local_blocks(state, axis, sizes) for state in (before, after))
        if more % (fewer * sizes[axis]):
            return None
    return Move(axis, old, new)


def steps_of(path: Sequence[Move], mesh: Mesh) -> Iterator[list[Operator]]:
    """Yield the parallel operators of each move of a path, with their attributes.

    If a path goes along one axis by way of R, that takes less time than the single move would, so the lowering is told
    not to fuse the two.
    """
    ended = -1  # the axis on which the move before led to R
    for move in path:
        attrs: list[dict[str, Attr]] = [{"axis": mesh.names[move.axis]} for _ in move.kind.operators]
        if move.after.is_shard:
            attrs[-1] |= {"dim": move.after.dim, "blocks": move.after.blocks}
        if ended == move.axis:
            attrs[0][ALONE] = True
        yield [(op, make_attrs(**values)) for op, values in zip(move.kind.operators, attrs, strict=True)]
        ended = move.axis if move.after == R else -1


def absorbed(graph: Graph, node: Node) -> tuple[Node, Move] | None:
    """Return the parallel operator before a parallel `node` that is one move with it, and the move; else None.

    Nobody else reads the value between them. For parameters the runtime decides: a parameter is gathered and replicated
    together with others of its block, and none goes from shard to shard at once.
    """
    before = graph.by_name[node.inputs[0]]
    if (before.op, node.op) not in FUSED or before.attr("axis") != node.attr("axis"):
        return None
    if graph.users[before.name] != (node.name,) or any(before.name == name for _, name in graph.outputs):
        return None
    start, axis = before.inputs[0], graph.mesh.index(str(node.attr("axis")))
    move = move_between(graph.types[start].layouts, graph.types[node.name].layouts, axis, graph.mesh.sizes)
    if source_of(graph, start).op == "parameter":
        runs = move is not None and not move.after.is_shard
    else:
        runs = (ALONE, True) not in node.attrs
    return (before, move) if move is not None and runs else None


def source_of(graph: Graph, name: str) -> Node:
    """Return the node of a value without its parallel operators; for a parameter, also without casts on the way."""
    node = uncast = graph.by_name[name]
    while uncast.is_parallel or uncast.op == "cast":
        uncast = graph.by_name[uncast.inputs[0]]
    if uncast.op == "parameter":
        return uncast
    while node.is_parallel:
        node = graph.by_name[node.inputs[0]]
    return node


def fused_moves(graph: Graph) -> Iterator[tuple[Node, str, Move]]:
    """Yield the moves of a parallel graph as the lowering runs them: (last node, tensor before, move), last first.

    Slices and sums along time are no moves.
    """
    kinds, done = graph.types, set[str]()
    for node in reversed(graph.nodes):
        if not node.is_parallel or node.name in done or node.attr("axis") == TIME:
            continue
        if (merged := absorbed(graph, node)) is not None:
            before, move = merged
            done.add(before.name)
            yield node, before.inputs[0], move
        else:
            axis, start = graph.mesh.index(str(node.attr("axis"))), node.inputs[0]
            yield node, start, Move(axis, kinds[start].layouts[axis], kinds[node.name].layouts[axis])
