"""Predictions of a parallel graph's costs: seconds, bytes sent and memory, per node and in all.

The prediction walks the finished graph, so it judges any plan, however it was found. The sum over its nodes agrees with
the search's objective (tested); step time and memory come from the timeline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from shardwright.cost.clusters.cluster import COLLECTIVES, Cluster
from shardwright.cost.collectives.algorithms import on_a_switch
from shardwright.cost.collectives.moves import TensorClass
from shardwright.cost.prediction import Prediction
from shardwright.cost.timeline.clock import SHARING, exposed_s
from shardwright.cost.timeline.memory import Stored, update_s
from shardwright.cost.timeline.muon import orthogonalized
from shardwright.cost.timeline.program import Programs, StepProgram
from shardwright.cost.timeline.steps import NodeCosts, Operator, Steps
from shardwright.cost.timeline.timeline import Timeline, simulate
from shardwright.pcg.analysis import constant_nodes, is_timeless, read_again
from shardwright.pcg.encodings import CARRIED, legs
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.mesh import TIME
from shardwright.pcg.moves import Move, source_of
from shardwright.pcg.parallel import COMBINE, REDUCE
from shardwright.pcg.step.again import made_again_in
from shardwright.pcg.step.execution import DEFAULT, Execution
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.parameters import KEEP, block_of
from shardwright.pcg.types import ITEM_BYTES, TensorType


def collective_bytes(collective: str, num_bytes: float, size: int) -> float:
    """Return the bytes that one of `size` devices sends for a tensor of `num_bytes`; 0 if not a collective."""
    if collective == "permute":
        return num_bytes / size
    if collective not in COLLECTIVES:
        return 0.0
    return num_bytes * float(on_a_switch(collective, size).share)


def node_costs(steps: Steps) -> dict[str, NodeCosts]:
    """Return every node's predicted part of a step. Parameters carry their optimizer's update as compute."""
    graph, once, twice = steps.graph, steps.once, made_again_in(steps).twice
    table, updates = dict.fromkeys(once, NodeCosts()), dict[TensorType, NodeCosts]()
    parts = dict[tuple[Operator, bool], NodeCosts]()
    for node in graph.nodes:
        name = node.name
        if node.is_parallel or name in once:
            continue
        if name in steps.aliases:  # a cast of slices, which is part of gathering them
            table[name] = NodeCosts()
            continue
        if node.is_leaf:
            table[name] = _update(node, steps, updates)
            continue
        key = steps.operator(node), name in twice
        if (part := parts.get(key)) is None:
            part = parts[key] = _operator_part(*key, steps, grad=graph.types[name].grad)
        table[name] = part
    constants, reread = constant_nodes(graph), read_again(graph)
    for name, (start, move) in steps.fused.items():
        if name not in once:
            table[name] = _move_part(
                graph.by_name[name], start, move, steps, free=name in constants, reread=reread, twice=name in twice
            )
    return table


def _update(leaf: Node, steps: Steps, known: dict[TensorType, NodeCosts]) -> NodeCosts:
    """Return the cost of a parameter's update; `known`: of types seen before."""
    graph, device = steps.graph, steps.compute.device
    kind = graph.types[leaf.name]
    if leaf.op != "parameter" or not kind.grad:
        return NodeCosts()
    if kind not in known:
        elements = kind.local_bytes(graph.mesh) / ITEM_BYTES[kind.dtype]
        stored = Stored(elements, kind.dtype, True, False, kind.dtype, kind.shape)
        run = DEFAULT.assuming(optimizer=steps.execution.assumed.optimizer)
        known[kind] = NodeCosts(update_s(stored, run, device) + device.update_overhead_s)
    return known[kind]


def _move_part(
    node: Node, start: str, move: Move, steps: Steps, *, free: bool, reread: Collection[str], twice: bool
) -> NodeCosts:
    """Return the cost of a move from `start` to `node`; it is `free` if no parameter reaches it."""
    graph, costs = steps.graph, steps.move_costs
    kind, leaf = graph.types[start], source_of(graph, start)
    stored = leaf.op == "parameter"
    summed = steps.execution.reduced_dtype(graph.types[leaf.name].dtype) if stored else ""
    zero, late = _zero(graph, start, node), _is_late(graph, start)
    encodings = [steps.execution.encoding(what, kind.dtype) if stored else None for what in CARRIED]
    key = (kind, move, stored, leaf.name in reread, summed, zero, twice, late, free, *encodings)
    if (cost := steps.known.serial_moves.get(key)) is None:
        tensor = TensorClass(
            kind.shape, kind.dtype, kind.grad, stored, recomputed=leaf.name in reread, summed=summed,
            zero=zero, twice=twice, late=late, gathered_as=encodings[0], summed_as=encodings[1],
        )  # fmt: skip
        size = graph.mesh.sizes[move.axis]
        num_bytes = kind.local_bytes(graph.mesh) * (size if move.before.is_shard else 1)
        elements = num_bytes / ITEM_BYTES[kind.dtype]
        sent = sum(
            one.times * collective_bytes(leg, leg_bytes, size)
            for one in costs.loop.sent(tensor, kind.layouts, move, elements)
            for leg, leg_bytes in legs(one.collective, one.num_bytes, size, one.encoding)
        )
        seconds = (
            costs.collective_s("slice", move.axis, num_bytes) * costs.loop.times(tensor, kind.layouts)
            if free
            else costs.move_s(tensor, kind.layouts, move)
        )
        forward, backward = move.collectives()
        collectives = forward, backward if kind.grad else ""
        cost = NodeCosts(0.0, seconds, sent, collectives, costs.loop.counts(tensor, kind.layouts, move))
        steps.known.serial_moves[key] = cost
    return cost


def _is_late(graph: Graph, name: str) -> bool:
    """Return whether a value is a sum over the microbatches, as the loss is."""
    node = graph.by_name[name]
    while node.op == REDUCE and node.attr("axis") != TIME:
        node = graph.by_name[node.inputs[0]]
    return node.op == REDUCE


def _zero(graph: Graph, start: str, last: Node) -> Zero:
    """Return the lifetime of a gathered parameter, by the move from `start` to `last` that gathers it."""
    combine = last if last.op == COMBINE else graph.by_name[last.inputs[0]]
    keep = dict(combine.attrs).get(KEEP)
    if graph.mesh.num_microbatches > 1 and is_timeless(graph, start):
        return "zero-1"
    return "kept" if keep == "microbatch" else "zero-2" if keep == "step" else "zero-3"


def _operator_part(known: Operator, twice: bool, steps: Steps, *, grad: bool) -> NodeCosts:
    times, (forward_s, backward_s) = steps.graph.mesh.num_microbatches, known.serial_s
    costs = NodeCosts(times * (forward_s * (1 + twice) + backward_s))
    if not known.sent:
        return costs
    counts = times * (1 + twice), times * grad
    return _with_exchanges(costs, known, steps, counts)


def _with_exchanges(computing: NodeCosts, known: Operator, steps: Steps, counts: tuple[int, int]) -> NodeCosts:
    """Return an operator's part with its exchanges, which run `counts` times in forward and in backward.

    Its seconds are those for which the operator does not compute meanwhile.
    """
    seconds = num_bytes = 0.0
    sent, costs, sharing = known.sent, steps.move_costs, SHARING[steps.cluster.device.kind]
    for exchange in sent:
        for backward, (times, compute_s) in enumerate(zip(counts, known.serial_s, strict=True)):
            seconds += times * exposed_s(costs.exchange_s(exchange, backward=bool(backward)), compute_s, sharing)
            transfers = exchange.sent(backward=bool(backward)).listed
            num_bytes += times * sum(collective_bytes(exchange.collective, n, exchange.size) for n in transfers)
    names = sent[0].collective, sent[0].collective if counts[1] else ""
    return computing._replace(communication_s=seconds, communication_bytes=num_bytes, collectives=names, counts=counts)


def predict(
    graph: Graph, cluster: Cluster, execution: Execution = DEFAULT, repeats: Mapping[str, int] | None = None
) -> Prediction:
    """Return the predicted step of a validated parallel graph on a cluster.

    `repeats`: module path of a block -> how often the block really occurs.
    """
    return predicted(Programs(graph, cluster, repeats), execution)


def predicted(programs: Programs, execution: Execution = DEFAULT) -> Prediction:
    """Return the predicted step of programs, which may have been run in other ways before."""
    return details(programs, execution).prediction


class Details(NamedTuple):
    """A prediction and its parts; `costs` is by node."""

    prediction: Prediction
    program: StepProgram
    timeline: Timeline
    costs: Mapping[str, NodeCosts]


def details(programs: Programs, execution: Execution = DEFAULT) -> Details:
    """Return the prediction and its parts."""
    graph, repeats = programs.graph, programs.repeats
    made, table = programs.program(execution), node_costs(programs.steps(execution))
    timeline = simulate(made)
    if repeats:
        table = {name: _many(cost, repeats.get(block_of(graph.by_name[name]), 1)) for name, cost in table.items()}
    leaves = {leaf.name: repeats.get(block_of(leaf), 1) if repeats else 1 for leaf in graph.leaves("parameter")}
    shared = orthogonalized(programs.steps(execution), leaves)
    optimizer_s = sum([table[leaf].compute_s for leaf in leaves]) + shared.compute_s
    stages = execution.schedule.num_stages
    compute_s = sum([c.compute_s for name, c in table.items() if name not in leaves])
    if stages > 1:
        passes_s, optimizer_s = made.compute_s(timeline.stages.index(timeline.busiest))
        compute_s = passes_s / execution.assumed.num_microbatches  # of the graph's batch, as the table is
    prediction = Prediction(
        timeline.step_s,
        compute_s,
        (sum([c.communication_s for c in table.values()]) + shared.exchange_s) / stages,
        optimizer_s,
        timeline.busiest.exposed_s,
        timeline.busiest.bubble_s,
        (sum([c.communication_bytes for c in table.values()]) + sum(shared.exchanged)) / stages,
        timeline.fullest.memory,
        timeline.fullest.peak_at,
        timeline.fullest.device_bytes,
    )
    return Details(prediction, made, timeline, table)


def _many(cost: NodeCosts, times: int) -> NodeCosts:
    if times == 1:
        return cost
    return cost._replace(
        compute_s=times * cost.compute_s,
        communication_s=times * cost.communication_s,
        communication_bytes=times * cost.communication_bytes,
    )
