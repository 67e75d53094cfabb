"""The proof step before a plan runs: its graph type-checks, denotes the captured graph, and can be run as planned.

A well-typed parallel graph denotes its erasure. `materialize` may compute nodes that no parameter reaches more than
once, in several layouts, so two serial graphs are compared by their *structure*: each node has a digest of (operator,
attributes, digests of its operands). Names and source lines play no part. Operators that draw random numbers carry the
number of their draw as an attribute, and must come in the same order.

What is sent encoded (`Execution.encodings`) is no part of a graph: such a plan is exact up to its encodings, whose
bounds its parameters have (`Parameter.gathered_bound`, `summed_bound`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from shardwright.pcg.choice import Split
from shardwright.pcg.errors import GraphError, PlanError
from shardwright.pcg.graph import Graph, Node
from shardwright.pcg.padding.longer import padded
from shardwright.pcg.padding.rows import with_rows
from shardwright.pcg.stages import cut
from shardwright.pcg.step.again import made_again
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.schedules import check, orders
from shardwright.pcg.step.time import as_run
from shardwright.search.collector import collector_paused
from shardwright.search.plan import Plan, attributes, fingerprint, structure
from shardwright.search.rewrites.replay import replay
from shardwright.substitutions.equations import Equation

if TYPE_CHECKING:
    from shardwright.search.choices.domain import CertifiedSplits


@collector_paused()
def check_plan(
    plan: Plan, captured: Graph, certified: CertifiedSplits, rules: Mapping[str, Equation] | None = None
) -> None:
    """Raise a `PlanError` unless `plan` is a well-typed parallel form of the captured serial graph.

    Every operator is split as a `certified` choice says. The captured graph is first padded, rows are added to its
    batch, and rewrites are replayed on it, with certified `rules` only, all as the plan says. The message names the
    first operator that differs, with the module and source line on both sides. The graph must allow the microbatches,
    the recomputation and the stages of the plan's execution.
    """
    try:
        plan.graph.validate()
        erased = plan.graph.erased().validate()
    except GraphError as error:
        raise PlanError(f"plan for {plan.model!r}: its graph is ill-typed: {error}; make the plan again") from error
    try:
        serial = replay(lengthened(plan, captured), plan.report.rewrites, rules or {}, plan.mesh)
    except (PlanError, GraphError):
        if plan.fingerprint == fingerprint(captured):
            raise
        serial = captured
    differs = difference(erased, serial)
    if differs and plan.fingerprint != (digest := fingerprint(captured)):
        raise PlanError(
            f"plan for {plan.model!r} has fingerprint {plan.fingerprint}, the captured model {digest}: {differs}; "
            "plan for this model, batch shape and train mode, or use the model that the plan was made for"
        )
    if differs:
        raise PlanError(f"plan for {plan.model!r}: its graph is not the captured one: {differs}; make the plan again")
    if differs := uncertified(plan.graph, certified, _in_pieces(plan)):
        raise PlanError(f"plan for {plan.model!r}: {differs}; make the plan again, or compile it with its rule file")
    try:
        run = as_run(plan.graph, plan.execution)
        if plan.execution.schedule.num_virtual_stages > 1:
            _check_stages(run, plan.execution)
        else:
            made_again(run, plan.execution)
    except PlanError as error:
        raise PlanError(f"plan for {plan.model!r}: {error}") from error


def lengthened(plan: Plan, captured: Graph) -> Graph:
    """Return the captured graph with the plan's padding, and the rows that it adds to its batch."""
    longer = padded(captured, plan.report.padding)
    if not plan.report.rows:
        return longer
    (size, rows, *_), most = (*plan.report.rows, 0), plan.mesh.num_devices * plan.mesh.num_microbatches
    shapes = [captured.types[leaf.name].shape for leaf in captured.leaves("input")]
    if not size < rows < size + max(most, 2) or not any(shape and shape[0] == size for shape in shapes):
        raise PlanError(
            f"plan for {plan.model!r}: it makes {rows} rows of a batch of {size}; expected inputs of {size} rows and "
            f"at most {most - 1} more; make the plan again"
        )
    return with_rows(longer, size, rows)


def _check_stages(run: Graph, execution: Execution) -> None:
    """Check that sends keep their types, that the stages together compute the graph, and that the schedule ends."""
    sent, whole = cut(run, execution).with_sends().erased(), run.erased()
    if sent != whole and (differs := difference(sent, whole)):
        raise PlanError(f"its stages do not compute the captured graph: {differs}")
    many = execution.schedule, run.mesh.num_microbatches
    check(orders(*many), *many)


def _in_pieces(plan: Plan) -> dict[str, Split]:
    """Return the choices of which pieces of products are the members, by the product."""
    if plan.execution.pieces == 1:
        return {}
    pairs = Operations(plan.graph, plan.execution).pairs
    return dict(member for pair in pairs for member in chain(*pair.chains))


def uncertified(graph: Graph, certified: CertifiedSplits, in_pieces: Mapping[str, Split] | None = None) -> str | None:
    """Return a description of the first operator whose split has no certificate, or None.

    `in_pieces`: further splits of some operators, of which one device runs all members, one after the other.
    """
    for node in graph.nodes:
        if node.is_leaf or node.is_parallel:
            continue
        further = (in_pieces or {}).get(node.name)
        places = [(f"on axis {axis!r}", choice) for axis, choice in zip(graph.mesh.names, node.split, strict=False)]
        places += [] if further is None else [("into pieces", further)]
        blocked = [choice for _, choice in places if choice.blocks > 1]
        known = certified(node, [graph.types[name] for name in node.inputs], blocked)
        for where, choice in places:
            if choice not in known:
                return f"{_describe(node)}: the split {choice!r} {where} is not certified"
    return None


def difference(planned: Graph, captured: Graph) -> str | None:
    """Return the first difference between two serial graphs up to names, order and repeated nodes, or None."""
    if differs := _leaf_difference(planned, captured):
        return differs
    ours, theirs = structure(planned), structure(captured)
    results, expected = dict(planned.outputs), dict(captured.outputs)
    if results.keys() != expected.keys():
        return f"the plan has the outputs {sorted(results)}, the model {sorted(expected)}"
    for key, name in expected.items():
        if ours[results[key]] != theirs[name]:
            return f"output {key!r}: " + _first_difference(planned, captured, results[key], name, ours, theirs)
    if (draws := _draws(planned)) != (expected_draws := _draws(captured)):
        return f"random numbers are drawn in the order {draws}, by the model in the order {expected_draws}"
    return _batch_difference(planned, captured, ours, theirs)


def _leaf_difference(planned: Graph, captured: Graph) -> str | None:
    """Return a description of the first leaf that has different types in the two graphs, or None."""
    mine = {(n.op, n.attr("target")): n for n in planned.nodes if n.is_leaf}
    for node in captured.nodes:
        leaf = mine.get((node.op, node.attr("target"))) if node.is_leaf else None
        if leaf is not None and planned.types[leaf.name] != captured.types[node.name]:
            ours, theirs = (f"{t.dtype}{list(t.shape)}" for t in (planned.types[leaf.name], captured.types[node.name]))
            frozen = "" if ours != theirs else " and one of them is frozen"
            return f"{node.op} {node.attr('target')!r} is {ours} in the plan, {theirs} in the model{frozen}"
    return None


def _first_difference(
    planned: Graph, captured: Graph, ours_at: str, theirs_at: str, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> str:
    """Follow operands that differ down to an operator that differs by itself."""
    while True:
        mine, other = planned.by_name[ours_at], captured.by_name[theirs_at]
        if (mine.op, attributes(mine), len(mine.inputs)) != (other.op, attributes(other), len(other.inputs)):
            return f"the plan has {_describe(mine)}, the model {_describe(other)}"
        pairs = zip(mine.inputs, other.inputs, strict=True)
        ours_at, theirs_at = next((a, b) for a, b in pairs if ours[a] != theirs[b])


def _describe(node: Node) -> str:
    shown = ", ".join(f"{k}={v!r}" for k, v in node.attrs if k not in ("layouts", "grad"))
    return f"%{node.name} = {node.op}({shown}) at {node.source}"


def _draws(graph: Graph) -> list[str]:
    """Return the random draws in program order, each as its operator and number."""
    return [f"{op} {number}" for op, number in graph.draws]


def _batch_difference(
    planned: Graph, captured: Graph, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> str | None:
    mine = {ours[n.name]: str(n.attr("target")) for n in planned.leaves("input")}
    other = {theirs[n.name]: str(n.attr("target")) for n in captured.leaves("input")}
    if mine.keys() == other.keys():
        return None
    return f"the plan reads the batch {sorted(mine.values())}, the model {sorted(other.values())}"
