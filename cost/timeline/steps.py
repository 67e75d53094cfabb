"""The costs of a graph's operations, forward and backward, each alone.

Operations have no time or order; `pcg.step.actions` orders them, and `pricing` makes tasks of that.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from math import prod
from typing import NamedTuple, Self

from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster
from shardwright.cost.collectives.moves import MoveCosts
from shardwright.cost.compute.compute import compute_on
from shardwright.cost.compute.fusion import UNFUSED, Fusion, fuse, fusions
from shardwright.cost.compute.operators import NodeCost
from shardwright.cost.compute.work import Work
from shardwright.cost.timeline.clock import SHARING, exposed_s
from shardwright.cost.timeline.pieces import Piece, Pieces
from shardwright.cost.timeline.scratch import Scratch, move_scratch, operator_scratch
from shardwright.cost.timeline.tasks import COMPUTE
from shardwright.pcg.analysis import Written
from shardwright.pcg.choice import WHOLE, Exchange, Split, Transfers
from shardwright.pcg.encodings import Encoding, legs
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.mesh import TIME
from shardwright.pcg.moves import SLICE, Move
from shardwright.pcg.optable import ROWS
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.messages import Message
from shardwright.pcg.step.operations import Operation, Operations
from shardwright.pcg.step.pairs import Pair
from shardwright.pcg.types import TensorType, is_float

ENCODE_COPIES, DECODE_COPIES = 4.5, 2.5
"""The memory traffic of encoding and decoding, in copies of the values. Kernels read the values twice for magnitudes,
then make quotients, which two kernels change and a last one reads. Decoding makes values, which two kernels change.
Source: lowering/ranks/encodings.py."""


class Timed(NamedTuple):
    """A transfer along a mesh axis, while an operator runs."""

    axis: str
    seconds: float
    messages: tuple[Message, ...]


NOTHING_SENT = Transfers[Timed]()


class OperationCost(NamedTuple):
    """The cost of one operation, alone.

    stream     of forward, `back_stream` of backward: compute, or the mesh axis of a collective
    weight_s   the part of backward that only gradients of weights need; `backward_s` is the rest
    sent       in forward, `sent_back` in backward
    scratch    memory that it needs while it runs
    ways       transfers around it, forward; `ways_back` in backward
    waits_s    the seconds that these add to forward and to backward
    pieces     of an operation that runs in pieces; seconds and messages are those of all
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    stream: str = COMPUTE
    back_stream: str = COMPUTE
    sent: tuple[Message, ...] = ()
    sent_back: tuple[Message, ...] = ()
    scratch: Scratch = Scratch()
    ways: Transfers[Timed] = NOTHING_SENT
    ways_back: Transfers[Timed] = NOTHING_SENT
    waits_s: tuple[float, float] = (0.0, 0.0)
    pieces: Pieces | None = None

    @property
    def again_s(self) -> float:
        """The seconds of forward, with what is sent meanwhile."""
        return self.forward_s + self.waits_s[0]

    @property
    def total_s(self) -> float:
        return self.again_s + self.backward_s + self.weight_s + self.waits_s[1]


@dataclass(frozen=True, eq=False, slots=True)
class Operator:
    """The cost of an operator; operators with equal costs share one object.

    cost       as an operation, in the execution's precision
    serial_s   of forward and backward, and `sent`: exchanges between devices; both in the graph's own dtypes
    """

    cost: OperationCost
    serial_s: tuple[float, float]
    sent: tuple[Exchange, ...]


class NodeCosts(NamedTuple):
    """A node's part of a step: seconds of compute and of communication, and bytes that its collectives carry.

    `collectives`: of the value and of its gradient, and `counts`: how often each runs.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    communication_bytes: float = 0.0
    collectives: tuple[str, str] = ("", "")
    counts: tuple[int, int] = (0, 0)


@dataclass(eq=False, slots=True)
class Known:
    """Known costs of operators and moves on one mesh in one precision, by everything that they depend on.

    `moves`: as operations; `pieces`: of both; `serial_moves`: as parts of a step in which nothing overlaps.

    Equal blocks of a graph have the same costs, and so do the many graphs of one search, which differ in a few layouts.
    """

    operators: dict[Hashable, Operator] = field(default_factory=dict)
    moves: dict[Hashable, OperationCost] = field(default_factory=dict)
    pieces: dict[Hashable, OperationCost] = field(default_factory=dict)
    serial_moves: dict[Hashable, NodeCosts] = field(default_factory=dict)


KnownCosts = dict[Hashable, Known]
"""Known costs by cluster, mesh and precision; a caller that makes several programs keeps it for them."""


class Steps(Operations):
    """The operations of one graph, with their costs."""

    def __init__(
        self, graph: Graph, cluster: Cluster, execution: Execution, costs: KnownCosts | None = None,
        place: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Cost the operations. `place`: of the device whose messages they list; None: the busiest one's."""
        super().__init__(graph, execution)
        self.place = place
        self.cluster = cluster
        self.move_costs, self.compute = MoveCosts(cluster, graph.mesh), compute_on(cluster.device)
        way = cluster, graph.mesh, execution.precision, self._is_narrow, place
        self.known = Known() if costs is None else costs.setdefault(way, Known())
        self.operators: dict[str, Operator] = {}
        rates = execution.rates.items()
        self._rates = {kind: dtype for kind, dtype in rates if dtype in cluster.device.flops_per_s}
        self._fusions = fusions(graph) if execution.assumed.compiled else {}
        self._cast: set[str] = set()  # activations that exist in fp8 too
        self.costs = self._costs()

    def run_as(self, execution: Execution) -> Self:
        variant = super().run_as(execution)
        if max(self.execution.pieces, execution.pieces) > 1:  # what is made again apart is no pair
            variant.costs = variant._costs()
        return variant

    def _costs(self) -> dict[str, OperationCost]:
        costs = {operation.name: self._cost(operation) for operation in self.listed}
        for pair in self.pairs:
            for number, name in enumerate(pair.operations):
                costs[name] = self._in_pieces(costs[name], pair, number)
        return costs

    @cached_property
    def first_uses_s(self) -> float:
        """The extra seconds of the first dispatch of each operator in a step: an upper bound for a stage with fewer.

        Operators that are computed once, have no call of their own forward, or are compiled do not count.
        """
        graph, known = self.graph, self.cluster.device.first_uses
        if self.execution.assumed.compiled:
            return 0.0
        nodes = [n for n in graph.nodes if n.op in known and n.name not in self.once]
        forward = {n.op for n in nodes if self.written(n) != "fused"}
        backward = {n.op for n in nodes if graph.types[n.name].grad}
        return sum(known[op][0] for op in forward) + sum(known[op][1] for op in backward)

    def collective_s(self, collective: str, axis: str, num_bytes: float, *, merged: bool = False) -> float:
        """Return the seconds of a collective along a mesh axis over `num_bytes` per group, or of slicing them.

        `merged`: as a part of one over several axes at once.
        """
        costs = self.move_costs
        return (costs.library_s if merged else costs.collective_s)(collective, self.graph.mesh.index(axis), num_bytes)

    def sent_s(
        self, collective: str, axis: str, num_bytes: float, encoding: Encoding | None, *, merged: bool = False
    ) -> float:
        """Return the seconds of a collective whose values may be encoded, in so many bytes: of all its legs."""
        size = self.size_of((axis,))
        sent = legs(collective, num_bytes, size, encoding)
        return sum(self.collective_s(leg, axis, leg_bytes, merged=merged) for leg, leg_bytes in sent)

    def sent_messages(
        self, collective: str, axes: Collection[str], sizes: Sequence[float], encoding: Encoding | None
    ) -> tuple[Message, ...]:
        """Return the messages of collectives whose values may be encoded, in these bytes."""
        every = [legs(collective, num_bytes, self.size_of(axes), encoding) for num_bytes in sizes]
        return tuple(chain(*(self.messages(leg, axes, leg_bytes) for sent in every for leg, leg_bytes in sent)))

    def size_of(self, axes: Collection[str]) -> int:
        """Return the number of ranks along some axes of devices."""
        mesh = self.graph.mesh
        return prod([size for name, size in zip(mesh.names, mesh.device_sizes, strict=True) if name in axes])

    def encode_s(self, num_bytes: float, encoding: Encoding | None) -> float:
        """Return the seconds of encoding values of so many bytes."""
        return 0.0 if encoding is None else ENCODE_COPIES * self.cast_s(num_bytes, num_bytes)

    def decode_s(self, num_bytes: float, encoding: Encoding | None) -> float:
        """Return the seconds of decoding values of so many bytes."""
        return 0.0 if encoding is None else DECODE_COPIES * self.cast_s(num_bytes, num_bytes)

    def cast_s(self, before_bytes: float, after_bytes: float) -> float:
        """Return the seconds of a kernel that reads values in one dtype and writes them in another."""
        return self.compute.work_s(Work("copy", (round(before_bytes),), 0.0, before_bytes + after_bytes, "float32"))

    def _cost(self, operation: Operation) -> OperationCost:
        node = self.graph.by_name[operation.name]
        if node.is_parallel:
            return self._move_cost(node)
        cost, row = self.operator(node).cost, node.row
        if self._rates.get("matmul") == "fp8" and row is not None and row.contraction and row.passes == 1:
            return self._with_casts(cost, operation)
        return cost

    def _move_cost(self, node: Node) -> OperationCost:
        """Return the cost of a move; its collective takes the full tensor of one group along the axis."""
        start, move = self.moves[node.name]
        axis, types = self.graph.mesh.names[move.axis], self.graph.types
        key = move, types[start], types[node.name], self._axes_of(node.name, axis)
        if (cost := self.known.moves.get(key)) is None:
            cost = self.known.moves[key] = self._cost_of_move(node, start, move, axis)
        return cost

    def _cost_of_move(self, node: Node, start: str, move: Move, axis: str, num_pieces: int = 1) -> OperationCost:
        """Return the cost of a move, or of one of its pieces."""
        forward, backward = move.collectives()
        backward = SLICE if axis == TIME else backward  # zeros beside it
        shards = self.graph.mesh.sizes[move.axis] if move.before.is_shard else 1
        num_bytes = self.bytes_of(start) * shards / num_pieces
        grad = self.graph.types[node.name].grad
        return OperationCost(
            self.collective_s(forward, axis, num_bytes),
            self.collective_s(backward, axis, num_bytes) if grad else 0.0,
            stream=COMPUTE if forward in ("", SLICE) else axis,
            back_stream=COMPUTE if backward in ("", SLICE) else axis,
            sent=self.messages(forward, self._axes_of(node.name, axis), num_bytes),
            sent_back=self.messages(backward, (axis,), num_bytes) if grad else (),
            scratch=move_scratch(self.graph, start, move, node.name, num_bytes),
        )

    def _in_pieces(self, whole: OperationCost, pair: Pair, number: int) -> OperationCost:
        """Return the cost of an operation of a pair, whose cost is known as it were whole.

        Each piece gives weights a gradient, which are added up. What the last operations give, and the gradient of what
        is cut, is put together from pieces.
        """
        name, count = pair.operations[number], pair.num_pieces
        node, is_move, grad = self.graph.by_name[name], name == pair.move, self.graph.types[name].grad
        if is_move:
            one, read = self._piece_of_move(node, count), pair.start
        else:
            one, read = self._piece_of_product(node, dict(chain(*pair.chains))[name], count), pair.read
        made = self._joined(name) if name in pair.made else (0.0, 0.0)
        cut = self._joined(read) if grad and number == 0 and self.graph.types[read].grad else (0.0, 0.0)
        pieces = Pieces(
            number, len(pair.operations), count, is_move, Piece(one.stream, one.forward_s, one.sent, *made),
            Piece(one.back_stream, one.backward_s + one.weight_s, one.sent_back, *cut),
        )  # fmt: skip
        return whole._replace(
            forward_s=pieces.forward.whole_s(count), backward_s=pieces.backward.whole_s(count), weight_s=0.0,
            sent=count * one.sent, sent_back=count * one.sent_back, scratch=one.scratch, pieces=pieces,
        )  # fmt: skip

    def _joined(self, name: str) -> tuple[float, float]:
        """Return the bytes of a value, and the seconds of a copy of it."""
        num_bytes = self.bytes_of(name)
        return num_bytes, self.cast_s(num_bytes, num_bytes)

    def _piece_of_move(self, node: Node, count: int) -> OperationCost:
        start, move = self.moves[node.name]
        key = move, self.graph.types[start], self.graph.types[node.name], count
        if (cost := self.known.pieces.get(key)) is None:
            axis = self.graph.mesh.names[move.axis]
            cost = self.known.pieces[key] = self._cost_of_move(node, start, move, axis, count)
        return cost

    def _piece_of_product(self, node: Node, choice: Split, count: int) -> OperationCost:
        """Return the cost of one piece of a product: that of a member of an axis of so many, split in this way."""
        types, weights = [self.graph.types[i] for i in node.inputs], [self.is_weight(i) for i in node.inputs]
        key = node.op, node.attrs, node.split, *types, self.graph.types[node.name], *weights, choice, count
        if (cost := self.known.pieces.get(key)) is None:
            cost = self.known.pieces[key] = self._cost_of_piece(node, choice, count)
        return cost

    def _cost_of_piece(self, node: Node, choice: Split, count: int) -> OperationCost:
        operands, result = choice.layouts(self.graph.signature(node), ROWS[node.op])
        types = [self.graph.types[name] for name in node.inputs]
        operand_types = [
            kind._replace(layouts=(*kind.layouts, layout)) for kind, layout in zip(types, operands, strict=True)
        ]
        kind = self.graph.types[node.name]
        weights = tuple([self.is_weight(name) for name in node.inputs])
        cost = self._node_cost(
            replace(node, split=(*node.split, choice)), operand_types, kind._replace(layouts=(*kind.layouts, result)),
            self.written(node), weights, UNFUSED, (*self.graph.mesh.sizes, count),
        )  # fmt: skip
        trained = zip(node.inputs, weights, types, strict=True)
        sizes = [
            self.bytes_of(name) for name, is_weight, kind_of_weight in trained if is_weight and kind_of_weight.grad
        ]
        added_s = sum(self.cast_s(2 * size, size) for size in sizes) * (count - 1) / count
        scratch = Scratch(0.0, 2 * sum(sizes))  # what is added, and, of tensors that autograd does not overwrite, a sum
        return cost._replace(backward_s=cost.backward_s + added_s, scratch=scratch)

    def _axes_of(self, name: str, axis: str) -> tuple[str, ...]:
        """Return the axes of a move's message; the loss's sums are one message, which counts for the first of them."""
        if name not in self.loss_sums:
            return (axis,)
        return tuple(self.loss_sums.values()) if name == next(iter(self.loss_sums)) else ()

    def messages(self, collective: str, axes: Collection[str], *sizes: float) -> tuple[Message, ...]:
        """Return collectives of these bytes along some axes at once; none where the axes have no other ranks."""
        mesh = self.graph.mesh
        real = [n for n, size in zip(mesh.names, mesh.device_sizes, strict=True) if size > 1 and n in axes]
        if collective not in COLLECTIVES or not real:
            return ()
        return tuple(Message(collective, "_".join(real), round(num_bytes)) for num_bytes in sizes if num_bytes)

    def _with_casts(self, cost: OperationCost, operation: Operation) -> OperationCost:
        """Return the cost with fp8 casts: of each activation for its first product, and of the result's gradient."""
        forward_s = cost.forward_s + sum(self._cast_s(name) for name in operation.reads if name not in self._cast)
        self._cast.update(operation.reads)
        back_s = self._cast_s(operation.name) if operation.grad else 0.0
        return cost._replace(forward_s=forward_s, backward_s=cost.backward_s + back_s)

    def operator(self, node: Node) -> Operator:
        """Return the cost of an operator, even if it is not one of the operations."""
        if (operator := self.operators.get(node.name)) is not None:
            return operator
        types, how, row = self.graph.types, self.written(node), node.row
        operands, kind, of_weights = tuple([types[name] for name in node.inputs]), types[node.name], ()
        if row is not None and row.contraction:
            of_weights = tuple([self.is_weight(name) for name in node.inputs])  # not weights that the program casts
        fusion = self._fusions.get(node.name, UNFUSED)
        band = self.graph.band(node)
        key = (node.op, node.attrs, node.split, operands, kind, how, of_weights, fusion, band)
        if (operator := self.known.operators.get(key)) is None:
            scratch = operator_scratch(node.op, self.bytes_of(node.inputs[0])) if node.inputs else Scratch()
            cost = self._node_cost(node, operands, kind, how, of_weights, fusion)
            serial = NodeCost(
                node,
                [t.erased() for t in operands],
                kind.erased(),
                self.graph.mesh.sizes,
                self.compute,
                (),
                how,
                band,
            )
            split = node.split or (WHOLE,) * len(self.graph.mesh)
            operator = self.known.operators[key] = Operator(
                self._with_ways(cost._replace(scratch=scratch), node),
                serial.passes_s(split, tuple(t.layouts for t in operands), kind.layouts),
                self.graph.exchanges(node),
            )
        self.operators[node.name] = operator
        return operator

    def _with_ways(self, cost: OperationCost, node: Node) -> OperationCost:
        """Return the cost with the exchanges while the operator runs, and their memory."""
        sent = self.exchanges(node)
        if not sent:
            return cost
        grad = self.graph.types[node.name].grad
        held = Scratch(*(float(max(d.held_bytes(backward=b) for d in sent)) for b in (False, True)))
        ways, back = self._ways(sent), self._ways(sent, backward=True) if grad else NOTHING_SENT
        passes = (ways, cost.forward_s), (back, cost.backward_s + cost.weight_s)
        first, second = (self._waits_s(way, compute_s) for way, compute_s in passes)
        return cost._replace(scratch=held, ways=ways, ways_back=back, waits_s=(first, second))

    def _waits_s(self, ways: Transfers[Timed], compute_s: float) -> float:
        return exposed_s(ways.each(lambda way: way.seconds), compute_s, SHARING[self.cluster.device.kind])

    def _ways(self, sent: Sequence[Exchange], *, backward: bool = False) -> Transfers[Timed]:
        """Return the transfers of exchanges, the outermost of which comes first."""
        transfers = NOTHING_SENT
        for exchange in sent:
            messages = exchange.messages(self.place, backward=backward)
            transfers = transfers.around(
                exchange.sent(backward=backward).paired(messages).each(partial(self._timed, exchange))
            )
        return transfers

    def _timed(self, exchange: Exchange, transfer: tuple[int, tuple[int, int]]) -> Timed:
        """Return a transfer of so many bytes on all devices, of which its own device sends and receives some."""
        (num_bytes, own_bytes), axis = transfer, self.graph.mesh.names[exchange.axis]
        seconds = self.move_costs.transfer_s(exchange, num_bytes)
        if exchange.collective != "permute":
            return Timed(axis, seconds, self.messages(exchange.collective, (axis,), num_bytes))
        ways = zip(("send", "receive"), own_bytes, strict=True)
        return Timed(axis, seconds, tuple(Message(way, axis, size) for way, size in ways if size and exchange.size > 1))

    def _node_cost(
        self,
        node: Node,
        operands: Sequence[TensorType],
        kind: TensorType,
        how: Written,
        of_weights: tuple[bool, ...],
        fusion: Fusion,
        sizes: tuple[int, ...] | None = None,
    ) -> OperationCost:
        """Return an operator's cost on a mesh of these sizes; None: the graph's."""
        serial = [TensorType(t.shape, self.dtype(t.dtype), (), t.grad) for t in operands]
        result = TensorType(kind.shape, self.dtype(kind.dtype), (), kind.grad)
        sizes = sizes or self.graph.mesh.sizes
        cost = NodeCost(node, serial, result, sizes, self.compute, (), how, self.graph.band(node))
        split = node.split or (WHOLE,) * len(sizes)
        passes = cost.passes(split, tuple(t.layouts for t in operands), kind.layouts)
        if self._rates:
            forward, backward = (tuple(map(self._at_rate, works)) for works in (passes.forward, passes.backward))
            passes = replace(passes, forward=forward, backward=backward)
        if fusion != UNFUSED:
            passes = fuse(passes, fusion, tuple(self.bytes_of(name) for name in node.inputs), self.bytes_of(node.name))
        forward_s, backward_s = self.compute.passes_s(node.op, passes, launched=not fusion.absorbed)
        if cost.row is None or not cost.row.contraction or cost.row.passes > 1:
            return OperationCost(forward_s, backward_s)
        trained = [w for t, w in zip(operands, of_weights, strict=True) if t.grad]
        works = [self.compute.work_s(work) for work in passes.backward]
        share = sum(s for s, w in zip(works, trained, strict=False) if w) / (sum(works) or 1.0)
        return OperationCost(forward_s, backward_s * (1 - share), backward_s * share)

    def _at_rate(self, work: Work) -> Work:
        rate = self._rates.get(work.kind)
        return replace(work, dtype=rate) if rate and is_float(work.dtype) else work

    def _cast_s(self, name: str) -> float:
        """Return the seconds of casting a value to fp8, in which a matrix product reads activations and gradients.

        There are two passes: one finds the largest value, for the scale; the other reads again and writes the value
        and, for the other product of backward, its transpose. Source: NVIDIA Transformer Engine, per-tensor current
        scaling. Weights are cast once a step, which is left out.
        """
        num_bytes = self.bytes_of(name)
        elements = round(num_bytes / 2)
        return self.compute.work_s(Work("copy", (elements,), 0.0, 2 * num_bytes + 2 * elements, "bfloat16"))
