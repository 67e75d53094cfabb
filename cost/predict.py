"""What a parallel graph is predicted to cost: seconds, bytes sent and memory, per node and in all.

The prediction walks the finished graph, so it judges any plan, however it was found. Its sum agrees with the search's
objective (tested). Communication is taken as not overlapped with compute; the timeline that knows better is later work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields

from shardwright.cost.cluster import Cluster
from shardwright.cost.compute import Compute
from shardwright.cost.memory import ADAM_TRAFFIC_PER_BYTE, Memory, adam_bytes
from shardwright.cost.moves import MoveCosts, TensorClass, fused_moves
from shardwright.cost.operators import NodeCost
from shardwright.pcg.analysis import block_of, constant_nodes, copies_data, saved_by, stored_nodes, written
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.optable import ROWS


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """One node's part: seconds of compute, seconds of communication, and bytes its collectives carry per step."""

    name: str
    compute_s: float = 0.0
    communication_s: float = 0.0
    communication_bytes: float = 0.0
    collectives: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's predicted step on every device."""

    compute_s: float
    communication_s: float
    optimizer_s: float
    communication_bytes: float
    memory: Memory

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s + self.optimizer_s

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "step_s": self.step_s}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Prediction:
        values = {f.name: data[f.name] for f in fields(cls)}
        values["memory"] = Memory(**values["memory"])  # type: ignore[arg-type]
        return cls(**values)  # type: ignore[arg-type]


def collective_bytes(collective: str, num_bytes: float, size: int) -> float:
    """Bytes that one device sends: 2(n−1)/n of the tensor for an all-reduce, (n−1)/n for each of its halves."""
    share = num_bytes * (size - 1) / size
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share / size}.get(
        collective, 0.0
    )


def node_costs(graph: Graph, cluster: Cluster) -> dict[str, NodeCosts]:
    """Every node's predicted part of a step. Parameters carry their optimizer's update as compute."""
    costs, compute = MoveCosts(cluster, graph.mesh.sizes), Compute(cluster.device)
    constants, known = constant_nodes(graph), dict[Hashable, float]()
    table = {node.name: _compute_part(graph, node, compute, known) for node in graph.nodes if not node.is_parallel}
    stored = stored_nodes(graph)
    for node, start, move in fused_moves(graph):
        kind = graph.types[start]
        tensor = TensorClass(kind.shape, kind.dtype, kind.grad, start in stored)
        forward, backward = move.collectives()
        num_bytes = kind.local_bytes(graph.mesh) * (graph.mesh.sizes[move.axis] if move.before.is_shard else 1)
        size = graph.mesh.sizes[move.axis]
        sent = collective_bytes(forward, num_bytes, size)
        if tensor.grad:
            sent += collective_bytes(backward, num_bytes, size) + (
                collective_bytes(forward, num_bytes, size) if tensor.stored and forward == "all_gather" else 0
            )
        free = node.name in constants
        seconds = (
            costs.collective_s("slice", move.axis, num_bytes) if free else costs.move_s(tensor, kind.layouts, move)
        )
        table[node.name] = NodeCosts(node.name, 0.0, seconds, sent, (forward, backward if kind.grad else ""))
    return table


def _compute_part(graph: Graph, node: Node, compute: Compute, known: dict[Hashable, float]) -> NodeCosts:
    """`known` holds the seconds of operators seen before: equal blocks are costed once."""
    kind = graph.types[node.name]
    if node.op == "parameter" and kind.grad:
        update_s = kind.local_bytes(graph.mesh) * ADAM_TRAFFIC_PER_BYTE / compute.device.memory_bytes_per_s
        return NodeCosts(node.name, update_s)
    if node.is_leaf or (node.op in ROWS and not node.inputs and not kind.shape):
        return NodeCosts(node.name)
    operands = [graph.types[i] for i in node.inputs]
    how = written(graph, node)
    key = (node.op, node.attrs, node.split, tuple(operands), kind, how)
    if key not in known:
        serial = [t.erased() for t in operands]
        cost = NodeCost(node, serial, kind.erased(), graph.mesh.sizes, compute, (), how)
        split = node.split or ("R",) * len(graph.mesh)
        known[key] = cost.time_s(split, tuple(t.layouts for t in operands), kind.layouts)
    return NodeCosts(node.name, known[key])


def predict_memory(graph: Graph) -> Memory:
    """Peak bytes on one device, by category. Gathered weights: two of the largest blocks, in use and prefetched."""
    total, gathered = Memory(), defaultdict[str, int](int)
    for node in graph.nodes:
        kind, local = graph.types[node.name], graph.types[node.name].local_bytes(graph.mesh)
        if node.op == "parameter" and kind.grad:
            total += adam_bytes(_local_elements(graph, node), element_bytes=kind.num_bytes // max(kind.num_elements, 1))
        elif node.op == "parameter":
            total += Memory(parameters_bytes=local)
        elif node.op in ("buffer", "constant"):
            total += Memory(buffers_bytes=local)
    for name, whole in _gathered(graph):
        gathered[block_of(name)] += whole
    largest = sorted(gathered.values(), reverse=True)[:2]
    return total + Memory(activations_bytes=_kept_activations(graph), gathered_bytes=sum(largest))


def _local_elements(graph: Graph, node: Node) -> int:
    kind = graph.types[node.name]
    return kind.local_bytes(graph.mesh) * kind.num_elements // max(kind.num_bytes, 1)


def _gathered(graph: Graph) -> Iterable[tuple[str, int]]:
    """Parameters that are gathered from shards, by qualified name, with the bytes of the gathered value."""
    stored = stored_nodes(graph)
    for node in graph.nodes:
        if node.op == "combine" and node.name in stored:
            leaf = node
            while leaf.is_parallel:
                leaf = graph.by_name[leaf.inputs[0]]
            yield str(leaf.attr("target")), graph.types[node.name].local_bytes(graph.mesh)


def _kept_activations(graph: Graph) -> int:
    """Bytes that wait for backward: what the op table says is saved, each storage once."""
    constants = constant_nodes(graph)
    stored = stored_nodes(graph)
    roots: dict[str, str] = {}
    kept: dict[str, int] = {}
    for node in graph.nodes:
        row = ROWS.get(node.op)
        aliases = node.op == "replicate" or (row is not None and row.view and not copies_data(graph, node))
        roots[node.name] = roots[node.inputs[0]] if aliases else node.name
        if node.is_leaf or node.is_parallel or not graph.types[node.name].grad:
            continue
        for item in saved_by(node):
            name = roots[node.inputs[item]] if isinstance(item, int) else node.name
            if name in constants or name in stored or graph.by_name[name].is_leaf:
                continue
            kind = graph.types[name]
            key = f"{name}.mask" if item == "mask" else name
            kept[key] = kind.local_bytes(graph.mesh) // (
                kind.num_bytes // max(kind.num_elements, 1) if item == "mask" else 1
            )
    return sum(kept.values())


def predict(graph: Graph, cluster: Cluster) -> Prediction:
    """The predicted step of a validated parallel graph on a cluster."""
    table = node_costs(graph, cluster)
    optimizer_s = sum(table[n.name].compute_s for n in graph.leaves("parameter"))
    compute_s = sum(c.compute_s for c in table.values()) - optimizer_s
    return Prediction(
        compute_s,
        sum(c.communication_s for c in table.values()),
        optimizer_s,
        sum(c.communication_bytes for c in table.values()),
        predict_memory(graph),
    )
