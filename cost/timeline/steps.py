"""A typed parallel graph as steps: what each node costs forward and backward, reads, keeps and communicates.

Steps say nothing of time or order on streams; `forward` and `backward` make tasks of them. Parameters on their way
through parallel operators are no steps but `Weight`s: what is gathered before their use, and what becomes of their
gradients.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.collectives.moves import MoveCosts
from shardwright.cost.compute.compute import Compute
from shardwright.cost.compute.fusion import ALONE, Fusion, fuse, fusions
from shardwright.cost.compute.operators import NodeCost
from shardwright.cost.compute.work import Work
from shardwright.cost.timeline.memory import Stored
from shardwright.cost.timeline.tasks import COMPUTE
from shardwright.pcg.analysis import Written, block_of, computed_once, saved_by, stored_nodes, written
from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.moves import Move, fused_moves
from shardwright.pcg.optable import ROWS
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.types import ITEM_BYTES, TensorType, is_float


class Step(NamedTuple):
    """One operator, or one change of layout of an activation.

    reads        activations, by name; `weights`: parameters, by the names under which they are read
    alias        the operand whose memory the result shares, or ""
    keeps        what backward needs of activations; `mask_bytes`: and of a mask
    gradients    the activations among `reads` that get one; none and no weights: there is no backward
    stream       of forward, `back_stream` of backward: compute, or the mesh axis of a collective
    weight_s     the part of backward that only gradients of weights need
    block        the repeated module it lies in, or ""
    """

    name: str
    reads: tuple[str, ...]
    weights: tuple[str, ...]
    alias: str
    num_bytes: float
    keeps: tuple[str, ...]
    mask_bytes: float
    gradients: tuple[str, ...]
    grad: bool
    stream: str
    forward_s: float
    back_stream: str
    backward_s: float
    weight_s: float
    attention: bool
    block: str
    module: str


class Weight(NamedTuple):
    """A parameter as its readers see it.

    block        the repeated module it lies in, or ""
    used_bytes   of the value that they read
    gathers      axes along which it is gathered first, with the bytes of the gathered value
    sums         (collective, axis, bytes) that its gradient goes through, in order
    """

    leaf: str
    block: str
    grad: bool
    used_bytes: float
    gathers: tuple[tuple[str, float], ...]
    sums: tuple[tuple[str, str, float], ...]

    @property
    def home(self) -> str:
        """For people: its block, or itself."""
        return self.block or self.leaf


class Steps:
    """The steps, weights and leaves of one graph.

    Raises:
        PlanError: a precision of other values than those of a graph that is captured in 16 bits.
    """

    def __init__(self, graph: Graph, cluster: Cluster, execution: Execution) -> None:
        self.graph, self.cluster, self.execution = graph, cluster, execution
        self.costs, self.compute = MoveCosts(cluster, graph.mesh.sizes), Compute(cluster.device)
        self._known: dict[Hashable, tuple[float, float, float]] = {}
        self.stored = stored_nodes(graph)
        rates = execution.rates.items()
        self._rates = {kind: dtype for kind, dtype in rates if dtype in cluster.device.flops_per_s}
        floats = {graph.types[n.name].dtype for n in graph.leaves("parameter")} & {"bfloat16", "float16"}
        self.narrow = bool(floats)
        if self.narrow and execution.precision and (wanted := execution.compute_dtype("float32")) not in floats:
            own, good = " and ".join(sorted(floats)), " or ".join(sorted({wanted, "float32"}))
            problem = f"expected parameters in {good}, got {own}; leave the precision out, or plan the model in float32"
            raise PlanError(f"precision {execution.precision!r}: {problem}")
        self.once = computed_once(graph)
        self._moves = {node.name: (start, move) for node, start, move in fused_moves(graph)}
        self._fusions = fusions(graph) if execution.compiled else {}
        self.weights: dict[str, Weight] = {}
        self.leaves: dict[str, Stored] = {}
        self.steps: list[Step] = []
        self._alias: dict[str, str] = {}
        self._cast: set[str] = set()  # activations that are there in fp8 too
        for node in graph.nodes:
            self._visit(node)

    @cached_property
    def num_bytes(self) -> dict[str, float]:
        """Of every activation, by the name of its step."""
        return {step.name: step.num_bytes for step in self.steps}

    def bytes_of(self, name: str) -> float:
        """Of one device's part of a value, in the dtype that the execution keeps it in."""
        return self.graph.types[name].local_bytes(self.graph.mesh) * self._scale(self.graph.types[name].dtype)

    def dtype(self, dtype: str) -> str:
        """What a value is computed and kept in. A graph that is captured in 16 bits says itself what stays wide."""
        return dtype if self.narrow else self.execution.compute_dtype(dtype)

    def _scale(self, dtype: str) -> float:
        return ITEM_BYTES[self.dtype(dtype)] / ITEM_BYTES[dtype]

    def _visit(self, node: Node) -> None:
        if node.op == "parameter":
            self._leaf(node)
        elif node.is_leaf or node.name in self.once:
            return
        elif node.name in self.stored:
            self._weight_move(node)
        elif node.is_parallel:
            self._move(node)
        else:
            self._operator(node)

    def _name(self, name: str) -> str:
        """A value that is only half of a fused move is read as the whole move's start."""
        return self._alias.get(name, name)

    # ---- parameters ----

    def _leaf(self, node: Node) -> None:
        kind = self.graph.types[node.name]
        item = ITEM_BYTES[kind.dtype]
        self.leaves[node.name] = Stored(kind.local_bytes(self.graph.mesh) / item, kind.dtype, kind.grad, False)
        self.weights[node.name] = Weight(
            node.name, _repeated(str(node.attr("target"))), kind.grad, self.bytes_of(node.name), (), ()
        )

    def _weight_move(self, node: Node) -> None:
        if node.name not in self._moves:
            self._alias[node.name] = self._name(node.inputs[0])
            return
        start, move = self._moves[node.name]
        before = self.weights[self._name(start)]
        axis, num_bytes = self._axis(move), self._group_bytes(start, move)
        forward, backward = move.collectives()
        gathers = before.gathers
        if forward in ("all_gather", "all_to_all"):
            gathers = (*gathers, (axis, num_bytes))
            self.leaves[before.leaf] = self.leaves[before.leaf]._replace(gathered=True)
        wide = num_bytes
        if not gathers and is_float(dtype := self.graph.types[start].dtype):  # summed as they are accumulated
            wide *= ITEM_BYTES[self.execution.state_dtype(dtype)] / ITEM_BYTES[self.dtype(dtype)]
        sums = ((backward, axis, wide), *before.sums) if backward and before.grad else before.sums
        self.weights[node.name] = before._replace(used_bytes=self.bytes_of(node.name), gathers=gathers, sums=sums)

    # ---- activations ----

    def _axis(self, move: Move) -> str:
        return self.graph.mesh.names[move.axis]

    def _group_bytes(self, start: str, move: Move) -> float:
        """Bytes of the full tensor of one group along the move's axis."""
        return self.bytes_of(start) * (self.graph.mesh.sizes[move.axis] if move.before.is_shard else 1)

    def _move(self, node: Node) -> None:
        if node.name not in self._moves:
            self._alias[node.name] = self._name(node.inputs[0])
            return
        start, move = self._moves[node.name]
        start = self._name(start)
        kind, num_bytes = self.graph.types[node.name], self._group_bytes(start, move)
        forward, backward = move.collectives()
        inplace = forward == "" or (forward == "all_reduce" and len(self.graph.users[start]) == 1)
        leaf = self.graph.by_name[start].is_leaf
        self.steps.append(Step(
            node.name, (start,), (), start if inplace else "", self.bytes_of(node.name), (), 0.0,
            (start,) if kind.grad and not leaf else (), kind.grad,
            self._stream(forward, move), self.costs.collective_s(forward, move.axis, num_bytes),
            self._stream(backward, move),
            self.costs.collective_s(backward, move.axis, num_bytes) if kind.grad else 0.0, 0.0,
            False, *_place(node),
        ))  # fmt: skip

    def _stream(self, collective: str, move: Move) -> str:
        return COMPUTE if collective in ("", "slice") else self._axis(move)

    def _operator(self, node: Node) -> None:
        row, kind = ROWS.get(node.op), self.graph.types[node.name]
        operands = [self._name(i) for i in node.inputs]
        weights = tuple(i for i in operands if i in self.weights)
        reads = tuple(i for i in operands if i not in self.weights)
        how = written(self.graph, node)
        moves_nothing = row is not None and row.view and how != "copy" and bool(operands)
        of_weight = moves_nothing and operands[0] in self.weights
        forward_s, backward_s, weight_s = self._seconds(node, kind, how)
        if self._rates.get("matmul") == "fp8" and row is not None and row.contraction and row.passes == 1:
            forward_s += sum(self._cast_s(name) for name in reads if name not in self._cast)
            backward_s += self._cast_s(node.name) if kind.grad else 0.0
            self._cast.update(reads)
        saved = saved_by(node, [self.graph.types[i].grad for i in node.inputs]) if kind.grad else ()
        keeps = [operands[i] for i in saved if isinstance(i, int) and i < len(operands)]
        keeps += [node.name] if "result" in saved else []
        mask = kind.local_bytes(self.graph.mesh) / ITEM_BYTES[kind.dtype] if "mask" in saved else 0.0
        types = self.graph.types
        self.steps.append(Step(
            node.name, reads, weights, operands[0] if moves_nothing and not of_weight else "",
            0.0 if of_weight else self.bytes_of(node.name),
            tuple(k for k in keeps if k not in self.weights), mask,
            tuple(i for i in dict.fromkeys(reads) if kind.grad and types[i].grad), kind.grad,
            COMPUTE, forward_s, COMPUTE, backward_s, weight_s,
            row is not None and row.passes > 1, *_place(node),
        ))  # fmt: skip

    def _seconds(self, node: Node, kind: TensorType, how: Written) -> tuple[float, float, float]:
        """Forward, backward but for weights, and the part of backward that makes the gradients of weights."""
        types = [self.graph.types[i] for i in node.inputs]
        of_weights = tuple(i in self.stored for i in node.inputs)
        fusion = self._fusions.get(node.name, ALONE)
        key = (node.op, node.attrs, node.split, tuple(types), kind, how, of_weights, fusion)
        if key not in self._known:
            self._known[key] = self._node_seconds(node, types, kind, how, of_weights, fusion)
        return self._known[key]

    def _node_seconds(
        self,
        node: Node,
        operands: list[TensorType],
        kind: TensorType,
        how: Written,
        of_weights: tuple[bool, ...],
        fusion: Fusion,
    ) -> tuple[float, float, float]:
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
            return forward_s, backward_s, 0.0
        trained = [w for t, w in zip(operands, of_weights, strict=True) if t.grad]
        works = [self.compute.work_s(work) for work in found.backward]
        share = sum(s for s, w in zip(works, trained, strict=False) if w) / (sum(works) or 1.0)
        return forward_s, backward_s * (1 - share), backward_s * share

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


def _place(node: Node) -> tuple[str, str]:
    """The repeated module that a node lies in, if any, and its own module."""
    return _repeated(f"{node.source.module}."), node.source.module


def _repeated(name: str) -> str:
    """The numbered block of the model that a name lies in, or ""."""
    block = block_of(name)
    return block if block.rpartition(".")[2].isdigit() else ""
