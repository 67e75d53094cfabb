"""A typed parallel graph as operations: what each one costs forward and backward, alone, and what parameters are.

Operations say nothing of time or order; `pcg.step.actions` says what happens when, and `pricing` makes tasks of that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.moves import MoveCosts
from shardwright.cost.compute.compute import Compute
from shardwright.cost.compute.fusion import ALONE, Fusion, fuse, fusions
from shardwright.cost.compute.operators import NodeCost
from shardwright.cost.compute.work import Work
from shardwright.cost.timeline.tasks import COMPUTE
from shardwright.pcg.analysis import Written, computed_once, saved_by, written
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.moves import Move, fused_moves
from shardwright.pcg.optable import ROWS
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.operations import Operation, views_of_parameters
from shardwright.pcg.step.parameters import find_parameters, narrow_dtypes
from shardwright.pcg.types import ITEM_BYTES, TensorType, is_float


class OperationCost(NamedTuple):
    """What one operation takes, alone.

    stream     of forward, `back_stream` of backward: compute, or the mesh axis of a collective
    weight_s   the part of backward that only gradients of weights need; `backward_s` is the rest
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    stream: str = COMPUTE
    back_stream: str = COMPUTE

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.weight_s


class Steps:
    """The operations and parameters of one graph, with what they cost.

    Raises:
        PlanError: a precision of other values than those of a graph that is captured in 16 bits.
    """

    def __init__(self, graph: Graph, cluster: Cluster, execution: Execution) -> None:
        self.graph, self.cluster, self.execution = graph, cluster, execution
        self._move_costs, self.compute = MoveCosts(cluster, graph.mesh.sizes), Compute(cluster.device)
        self._known: dict[Hashable, OperationCost] = {}
        rates = execution.rates.items()
        self._rates = {kind: dtype for kind, dtype in rates if dtype in cluster.device.flops_per_s}
        floats = narrow_dtypes(graph)
        self.narrow = bool(floats)
        if self.narrow and execution.precision and (wanted := execution.compute_dtype("float32")) not in floats:
            own, good = " and ".join(sorted(floats)), " or ".join(sorted({wanted, "float32"}))
            problem = f"expected parameters in {good}, got {own}; leave the precision out, or plan the model in float32"
            raise PlanError(f"precision {execution.precision!r}: {problem}")
        found = find_parameters(graph, execution)
        self.parameters, self._leaf_of = found.by_leaf, found.names
        self._views = views_of_parameters(graph, found)
        self.once = computed_once(graph)
        self._moves = {node.name: (start, move) for node, start, move in fused_moves(graph)}
        self._fusions = fusions(graph) if execution.compiled else {}
        self.operations: list[Operation] = []
        self.costs: dict[str, OperationCost] = {}
        self._alias: dict[str, str] = {}
        self._cast: set[str] = set()  # activations that are there in fp8 too
        for node in graph.nodes:
            self._visit(node)

    @cached_property
    def num_bytes(self) -> dict[str, float]:
        """Of every activation, by the name of its operation."""
        return {operation.name: operation.num_bytes for operation in self.operations}

    def collective_s(self, collective: str, axis: str, num_bytes: float) -> float:
        """Seconds of a collective along a mesh axis over tensors of `num_bytes` per group, or of a slice of them."""
        return self._move_costs.collective_s(collective, self.graph.mesh.index(axis), num_bytes)

    def bytes_of(self, name: str) -> float:
        """Of one device's part of a value, in the dtype that the execution keeps it in."""
        return self.graph.types[name].local_bytes(self.graph.mesh) * self._scale(self.graph.types[name].dtype)

    def dtype(self, dtype: str) -> str:
        """What a value is computed and kept in. A graph that is captured in 16 bits says itself what stays wide."""
        return dtype if self.narrow else self.execution.compute_dtype(dtype)

    def _scale(self, dtype: str) -> float:
        return ITEM_BYTES[self.dtype(dtype)] / ITEM_BYTES[dtype]

    def _visit(self, node: Node) -> None:
        if node.is_leaf or node.name in self.once or node.name in self._leaf_of:
            return
        if node.is_parallel:
            self._move(node)
        else:
            self._operator(node)

    def _name(self, name: str) -> str:
        """A parameter's leaf; a value that is only half of a fused move is read as the whole move's start."""
        name = self._alias.get(name, name)
        return self._leaf_of.get(name, name)

    def _operands(self, names: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Activations and parameters among what a node reads."""
        operands = [self._name(name) for name in names]
        reads, weights = [], []
        for name in operands:
            (weights if name in self.parameters else reads).append(name)
        return tuple(reads), tuple(weights)

    def _group_bytes(self, start: str, move: Move) -> float:
        """Bytes of the full tensor of one group along the move's axis."""
        return self.bytes_of(start) * (self.graph.mesh.sizes[move.axis] if move.before.is_shard else 1)

    def _started(self, node: Node) -> tuple[str, Move]:
        """What a move begins with. What is gathered around the program is not half of a move within it."""
        start, move = self._moves[node.name]
        if start != node.inputs[0] and node.inputs[0] in self._leaf_of:
            start = node.inputs[0]
            before, after = (self.graph.types[name].layouts[move.axis] for name in (start, node.name))
            move = Move(move.axis, before, after)
        return start, move

    def _move(self, node: Node) -> None:
        if node.name not in self._moves:
            self._alias[node.name] = self._name(node.inputs[0])
            return
        start, move = self._started(node)
        kind, axis = self.graph.types[node.name], self.graph.mesh.names[move.axis]
        (forward, backward), num_bytes = move.collectives(), self._group_bytes(start, move)
        (reads, weights), leaf = self._operands((start,)), self.graph.by_name[start].is_leaf
        inplace = forward == "" or (forward == "all_reduce" and len(self.graph.users[start]) == 1)
        self.operations.append(
            Operation(
                name=node.name,
                reads=reads,
                weights=weights,
                views=self._views.get(start, ()),
                alias=reads[0] if inplace and reads else "",
                num_bytes=self.bytes_of(node.name),
                gradients=reads if kind.grad and not leaf else (),
                grad=kind.grad,
                module=node.source.module,
            )
        )
        self.costs[node.name] = OperationCost(
            self.collective_s(forward, axis, num_bytes),
            self.collective_s(backward, axis, num_bytes) if kind.grad else 0.0,
            stream=COMPUTE if forward in ("", "slice") else axis,
            back_stream=COMPUTE if backward in ("", "slice") else axis,
        )

    def _operator(self, node: Node) -> None:
        row, kind, types = ROWS.get(node.op), self.graph.types[node.name], self.graph.types
        reads, weights = self._operands(node.inputs)
        operands = [self._name(i) for i in node.inputs]
        how = written(self.graph, node)
        moves_nothing = row is not None and row.view and how != "copy" and bool(operands)
        of_weight = moves_nothing and operands[0] in self.parameters
        cost = self._cost(node, kind, how)
        if self._rates.get("matmul") == "fp8" and row is not None and row.contraction and row.passes == 1:
            cost = self._with_casts(cost, node, reads)
        saved = saved_by(node, [types[i].grad for i in node.inputs]) if kind.grad else ()
        keeps = [operands[i] for i in saved if isinstance(i, int) and i < len(operands)]
        keeps += [node.name] if "result" in saved else []
        self.operations.append(
            Operation(
                name=node.name,
                reads=reads,
                weights=weights,
                views=tuple(dict.fromkeys(leaf for i in node.inputs for leaf in self._views.get(i, ()))),
                alias=operands[0] if moves_nothing and not of_weight else "",
                num_bytes=0.0 if of_weight else self.bytes_of(node.name),
                keeps=tuple(k for k in keeps if k not in self.parameters),
                mask_bytes=kind.local_bytes(self.graph.mesh) / ITEM_BYTES[kind.dtype] if "mask" in saved else 0.0,
                gradients=tuple(i for i in dict.fromkeys(reads) if kind.grad and types[i].grad),
                grad=kind.grad,
                apart=cost.weight_s > 0,
                attention=row is not None and row.passes > 1,
                module=node.source.module,
            )
        )
        self.costs[node.name] = cost

    def _with_casts(self, cost: OperationCost, node: Node, reads: Sequence[str]) -> OperationCost:
        """In fp8, each activation is cast for its first product, and the gradient of the result."""
        forward_s = cost.forward_s + sum(self._cast_s(name) for name in reads if name not in self._cast)
        self._cast.update(reads)
        back_s = self._cast_s(node.name) if self.graph.types[node.name].grad else 0.0
        return cost._replace(forward_s=forward_s, backward_s=cost.backward_s + back_s)

    def _cost(self, node: Node, kind: TensorType, how: Written) -> OperationCost:
        types = [self.graph.types[i] for i in node.inputs]
        of_weights = tuple(i in self._leaf_of for i in node.inputs)
        fusion = self._fusions.get(node.name, ALONE)
        key = (node.op, node.attrs, node.split, tuple(types), kind, how, of_weights, fusion)
        if key not in self._known:
            self._known[key] = self._node_cost(node, types, kind, how, of_weights, fusion)
        return self._known[key]

    def _node_cost(
        self,
        node: Node,
        operands: list[TensorType],
        kind: TensorType,
        how: Written,
        of_weights: tuple[bool, ...],
        fusion: Fusion,
    ) -> OperationCost:
        serial = [TensorType(t.shape, self.dtype(t.dtype), (), t.grad) for t in operands]
        result = TensorType(kind.shape, self.dtype(kind.dtype), (), kind.grad)
        cost = NodeCost(node, serial, result, self.graph.mesh.sizes, self.compute, (), how)
        split = node.split or ("R",) * len(self.graph.mesh)
        found = cost.passes(split, tuple(t.layouts for t in operands), kind.layouts)
        if self._rates:
            forward, backward = (tuple(map(self._at_rate, works)) for works in (found.forward, found.backward))
            found = replace(found, forward=forward, backward=backward)
        if fusion != ALONE:
            found = fuse(found, fusion, tuple(self.bytes_of(name) for name in node.inputs), self.bytes_of(node.name))
        forward_s, backward_s = self.compute.passes_s(node.op, found, launched=not fusion.absorbed)
        if cost.row is None or not cost.row.contraction or cost.row.passes > 1:
            return OperationCost(forward_s, backward_s)
        trained = [w for t, w in zip(operands, of_weights, strict=True) if t.grad]
        works = [self.compute.work_s(work) for work in found.backward]
        share = sum(s for s, w in zip(works, trained, strict=False) if w) / (sum(works) or 1.0)
        return OperationCost(forward_s, backward_s * (1 - share), backward_s * share)

    def _at_rate(self, work: Work) -> Work:
        rate = self._rates.get(work.kind)
        return replace(work, dtype=rate) if rate and is_float(work.dtype) else work

    def _cast_s(self, name: str) -> float:
        """A matrix product in fp8 reads its activations, and the gradients of its result, in fp8.

        Two passes: one finds the largest value, for the scale; one reads again and writes the value and, for the other
        product of backward, its transpose. Source: NVIDIA Transformer Engine, per-tensor current scaling. Weights are
        cast once a step, which is left out.
        """
        num_bytes = self.bytes_of(name)
        elements = round(num_bytes / 2)
        return self.compute.work_s(Work("copy", (elements,), 0.0, 2 * num_bytes + 2 * elements, "bfloat16"))
