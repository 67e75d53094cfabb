"""Operators of a plan on the device that they are predicted for: seconds of forward and of backward, one by one.

What is timed is what a lowered program runs: the expression of a node, with the bias that is written into a product.
The operands have the shapes and dtypes that the prediction takes, and the gradients that it asks for; what a `permute`
makes is stored as it leaves it, so that what copies, copies. Left out are the parts of a split, whose gradients are one
concatenation, and whatever has no kernel.

Kernels are compared, without their dispatch, which in a loop is not what it is in a model. On a GPU the loop hides it
behind any kernel that takes longer; on a CPU it is in the measured times, which serve to try the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.cost.calibration.measure import Clock
from shardwright.cost.calibration.workload import trimmed_mean
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.steps import Steps
from shardwright.lowering.runtime import kernels
from shardwright.lowering.text.expressions import Expressions
from shardwright.lowering.text.pieces import identifiers
from shardwright.pcg.analysis import written
from shardwright.pcg.graph import OPAQUE, Graph, Node
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.types import TensorType, is_float

NUM_WARMUP, NUM_SAMPLES = 3, 12
MOST_TOGETHER, TOGETHER_BYTES = 32, 2**30
"""Gradients that are asked for at once, so that what a pass of autograd takes does not count: how many, how large."""
_SCOPE: dict[str, Any] = {"torch": torch, "F": F, "rt": kernels}
Times = tuple[float, float]
"""Seconds of forward and of backward; 0 where there is none."""


@dataclass(frozen=True)
class Operator:
    """An operator, or several written as one, as it occurs `count` times in a model, on `operands` of these types."""

    model: str
    op: str
    operands: tuple[str, ...]
    count: int
    predicted_s: Times
    measured_s: Times

    @property
    def errors(self) -> tuple[float | None, float | None]:
        """Return the relative errors of forward and of backward, each None where there is none."""
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        forward, backward = (p / m - 1 if p and m else None for p, m in pairs)
        return forward, backward


class Measured:
    """The operators of one graph on one device."""

    def __init__(self, model: str, graph: Graph, cluster: Cluster, execution: Execution) -> None:
        self.model, self.graph, self.device = model, graph, cluster.device.kind
        bare = replace(cluster.device, op_overhead_s=0.0, operators={})
        self.costs = Steps(graph, replace(cluster, device=bare), execution)
        self.code = Expressions(graph, {}, (), {})
        self.names = identifiers([node.name for node in graph.nodes], {*_SCOPE, "device", "float", *graph.mesh.names})
        self.clock = Clock(self.device, torch.get_num_threads())

    def heaviest(self, most: int) -> Iterator[Operator]:
        """The `most` operators that are predicted to take most of a step: each operator and shape once."""
        alike: dict[object, list[Node]] = {}
        for node in self.code.written:
            if self._is_timed(node):
                alike.setdefault(self._key(node), []).append(node)
        ranked = sorted(alike.values(), key=lambda nodes: -len(nodes) * sum(self.predicted_s(nodes[0])))
        for nodes in ranked[:most]:
            operands = tuple(_text(self._stored_type(name)) for name in self._reads(nodes[0]))
            op = " + ".join(self.graph.by_name[name].op for name in self.written_as(nodes[0]))
            yield Operator(self.model, op, operands, len(nodes), self.predicted_s(nodes[0]), self.measured_s(nodes[0]))

    def written_as(self, node: Node) -> tuple[str, ...]:
        """The node and those that are written into it, such as the product that a bias is added to."""
        fused = self.code.fused.get(node.name)
        return (*(fused.absorbed if fused else ()), node.name)

    def predicted_s(self, node: Node) -> Times:
        """Return the predicted times of the node and of those that are written into it."""
        costs = [self.costs.costs[name] for name in self.written_as(node)]
        return sum(c.forward_s for c in costs), sum(c.backward_s + c.weight_s for c in costs)

    def measured_s(self, node: Node) -> Times:
        """Means but for the slowest tenth; without the gradients of operands that get none."""
        names = self._reads(node)
        arguments = ", ".join(self.names[name] for name in names)
        function = eval(
            f"lambda {arguments}: {self.code.of(node, self.names)}", {**_SCOPE, "device": torch.device(self.device)}
        )
        every = [[self.operand(node, name) for name in names] for _ in range(self._num_together(node))]
        forward_s = self._seconds(lambda: function(*every[0]))
        results: list[Tensor] = [function(*operands) for operands in every]
        trained = [x for operands in every for x in operands if x.requires_grad]
        if not trained or not results[0].requires_grad:
            return forward_s, 0.0
        seeds = [torch.ones_like(result) for result in results]
        backward_s = self._seconds(
            lambda: torch.autograd.grad(results, trained, seeds, retain_graph=True, allow_unused=True)
        )
        return forward_s, backward_s / len(every)

    def _num_together(self, node: Node) -> int:
        num_bytes = sum(self._stored_type(name).num_bytes for name in (*self._reads(node), node.name))
        return max(1, min(MOST_TOGETHER, TOGETHER_BYTES // num_bytes))

    def _is_timed(self, node: Node) -> bool:
        if (
            node.is_leaf
            or node.is_parallel
            or node.op == OPAQUE
            or not self._reads(node)
            or node.name in self.costs.once
        ):
            return False
        return written(self.graph, node) != "part" and any(self.predicted_s(node))

    def _reads(self, node: Node) -> Sequence[str]:
        return tuple(dict.fromkeys(self.code.reads(node)))

    def _key(self, node: Node) -> object:
        """Nodes of one key do the same work."""
        ops = tuple((n.op, n.attrs) for n in map(self.graph.by_name.__getitem__, self.written_as(node)))
        stored = tuple((self._stored_type(name), self._permutation(name)) for name in self._reads(node))
        return ops, stored, self.graph.types[node.name]

    def _stored_type(self, name: str) -> TensorType:
        kind = self.graph.types[name]
        return TensorType(kind.shape, self.costs.dtype(kind.dtype), (), kind.grad)

    def _permutation(self, name: str) -> tuple[int, ...]:
        """Return the permutation of a value's dimensions in memory, () where they are in order."""
        node = self.graph.by_name[name]
        return tuple(dict(node.attrs)["dims"]) if node.op == "permute" else ()  # type: ignore[arg-type]

    def operand(self, node: Node, name: str) -> Tensor:
        """A new value for what the node reads by this name."""
        kind, order = self._stored_type(name), self._permutation(name)
        shape = [kind.shape[order.index(dim)] for dim in range(len(order))] if order else kind.shape
        value = self._values(node, kind, shape)
        value = value.permute(order) if order else value
        return value.requires_grad_() if kind.grad and is_float(kind.dtype) else value

    def _values(self, node: Node, kind: TensorType, shape: Sequence[int]) -> Tensor:
        dtype = getattr(torch, kind.dtype)
        if is_float(kind.dtype):
            return torch.rand(tuple(shape), device=self.device).add_(0.5).to(dtype)
        if kind.dtype == "bool":
            return torch.ones(tuple(shape), dtype=dtype, device=self.device)
        table = self.graph.types[node.inputs[0]].shape or (1,)  # what indices point into, if they are such
        bound = table[-1] if node.op == "cross_entropy_sum" else table[0]
        return torch.randint(bound, tuple(shape), dtype=dtype, device=self.device)

    def _seconds(self, call: Callable[[], object]) -> float:
        for _ in range(NUM_WARMUP):
            call()
        return trimmed_mean([self.clock.kernel_s(call) for _ in range(NUM_SAMPLES)])


def _text(kind: TensorType) -> str:
    return f"{kind.dtype} {'×'.join(map(str, kind.shape)) or 'scalar'}"
