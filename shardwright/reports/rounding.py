"""The exact and the rounded values of a step, with dtypes, read from the types of the plan's own graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwright.pcg.graph import Graph
from shardwright.pcg.mesh import TIME
from shardwright.pcg.moves import fused_moves, source_of
from shardwright.pcg.precision import HALVES, low_dtype
from shardwright.pcg.step.execution import DEFAULT
from shardwright.pcg.step.late import LOSS
from shardwright.pcg.step.parameters import Parameter
from shardwright.pcg.step.precisions import every, shown
from shardwright.pcg.types import ITEM_BYTES, is_float
from shardwright.reports.facts import PlanFacts
from shardwright.reports.report import Paragraph
from shardwright.reports.units import plural

ROUNDS_BY = {"bfloat16": "2^-8", "float16": "2^-11", "float32": "2^-24", "float64": "2^-53"}
"""The largest relative error of rounding to a dtype: half a unit in the last place."""


_WORK = {"matmul": "matrix products", "conv": "convolutions"}
SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Rounding:
    """The `count` values of kind `what` in a dtype; `rounded` says which of them it rounds, or "nothing"."""

    what: str
    dtype: str
    count: int
    rounded: str


def roundings(facts: PlanFacts) -> tuple[Rounding, ...]:
    """Return all roundings of a step, in its order.

    They are casts, operators, sums over devices, weights, gradients, optimizer states and loss.
    """
    graph, parameters = facts.graph, list(facts.parameters.values())
    trained = [p for p in parameters if p.grad]
    return (
        *_casts(facts),
        *(Rounding("operators", dtype, n, "what they give") for dtype, n in facts.dtypes.items()),
        *_counted("sums of activations over devices", _summed(graph), "every summand, and every addition"),
        *_counted("weights that are stored", (p.dtype for p in parameters), "nothing"),
        *_gathered(parameters),
        *_counted("gradients that are accumulated", (p.dtype for p in trained), "every addition"),
        *_sent(trained),
        *_counted("optimizer states, of weights", (p.dtype for p in trained), "what the update gives"),
        *_counted("loss", [graph.types[name].dtype for key, name in graph.outputs if key == LOSS], "what it is"),
    )


def _counted(what: str, dtypes: Iterable[str], rounded: str) -> Iterator[Rounding]:
    for dtype, count in Counter(dtypes).most_common():
        yield Rounding(what, dtype, count, rounded)


def _casts(facts: PlanFacts) -> Iterator[Rounding]:
    """Yield the casts of the graph, by kind of value."""
    types, counts = facts.graph.types, Counter[tuple[str, str, str]]()
    for node in facts.operators:
        before, after = (types[name].dtype for name in (*node.inputs[:1], node.name))
        if node.op == "cast" and is_float(before) and is_float(after) and before != after:
            kind = "weight" if source_of(facts.graph, node.name).op == "parameter" else "activation"
            counts[kind, before, after] += 1
    for (kind, before, after), count in counts.most_common():
        rounded = "nothing" if ITEM_BYTES[after] > ITEM_BYTES[before] else "each once"
        yield Rounding(f"{kind}s that are cast, from {before}", after, count, rounded)


def _summed(graph: Graph) -> Iterator[str]:
    """Yield the dtypes of sums over devices, of activations and of their gradients."""
    yield from (kind.dtype for node in graph.nodes if graph.exchanges(node)
                for kind in (graph.types[node.name],) for _ in range(1 + kind.grad))  # fmt: skip
    for _, start, move in fused_moves(graph):
        kind = graph.types[start]
        if source_of(graph, start).op == "parameter" or not is_float(kind.dtype):
            continue
        if graph.mesh.names[move.axis] == TIME:  # nothing is sent along time
            continue
        forward, backward = move.collectives()
        yield from [kind.dtype] * (forward in SUMS and kind.num_elements > 1) + [kind.dtype] * (
            kind.grad and backward in SUMS
        )


def _gathered(parameters: Iterable[Parameter]) -> Iterator[Rounding]:
    """Yield the weights as they are gathered from their slices."""
    for (dtype, used, encoding), count in Counter(
        (p.dtype, p.used_dtype, p.gathered_as) for p in parameters if p.slices is not None
    ).most_common():
        rounded = "nothing" if used == dtype else "each slice, before it"
        if encoding is not None:
            rounded = f"each, as {encoding.name}" if used == dtype else f"{rounded}, and then as {encoding.name}"
        yield Rounding("weights that are gathered", used, count, rounded)


def _sent(trained: Iterable[Parameter]) -> Iterator[Rounding]:
    """Yield the dtypes in which gradients are sent to be summed over devices."""
    sent = (p for p in trained if p.sums or (p.slices is not None and p.slices.copied))
    for (stored, dtype, encoding), count in Counter(
        (p.dtype, p.reduced_dtype, p.summed_as) for p in sent
    ).most_common():
        narrower = ITEM_BYTES[dtype] < ITEM_BYTES[stored]
        rounded = "each device's gradient once, and every addition" if narrower else "every addition"
        if encoding is not None:
            first = " once, then" if narrower else ""
            rounded = f"each device's gradient{first} as {encoding.name}, and so a sum that all need; every addition"
        yield Rounding("gradients that are summed over devices", dtype, count, rounded)


def precision(facts: PlanFacts) -> str:
    """Return a line with the dtypes of operators, and the roundings that one process does not make."""
    execution, narrow = facts.plan.execution, [dtype for dtype in facts.dtypes if dtype in HALVES]
    operators = ", ".join(f"{plural(n, 'operator')} in {dtype}" for dtype, n in facts.dtypes.items()) or "no operators"
    dtypes = {p.dtype for p in facts.parameters.values()}
    parts = [f"{shown(execution.precision)}: {operators}"]
    if narrow and not dtypes.intersection(narrow):
        casts = any(low_dtype(one, "parameters") for one in every(execution.precision))
        what = "weights where they are read, and what operators give" if casts else "what products read and give"
        in_float32 = ["weights", "what is accumulated of their gradients", "optimizer states"]
        loss = ["the loss"] * all(
            facts.graph.types[n].dtype not in HALVES for key, n in facts.graph.outputs if key == LOSS
        )
        parts += [
            f"rounded to {' and '.join(narrow)}: {what}",
            f"kept in float32: {', '.join(in_float32 + loss)}",
        ]
    elif not narrow and not execution.rates:
        parts.append("nothing is rounded but as one process rounds")
    if execution.rates:
        kinds = " and ".join(_WORK[kind] for kind in execution.rates)
        parts.append(f"{kinds} round what they read to {next(iter(execution.rates.values()))}, on devices that have it")
    if execution.reduce_dtype:
        parts.append(f"gradients are sent in {execution.reduce_dtype}")
    if execution.assumed.optimizer != DEFAULT.assumed.optimizer:
        parts.append(f"optimizer states are those of {execution.assumed.optimizer}")
    return "; ".join(parts)


def rounded(facts: PlanFacts) -> Paragraph:
    """Return the list for people."""
    rows = [(r.what, r.dtype, str(r.count), r.rounded) for r in roundings(facts)]
    there = [f"{dtype} by {most}" for dtype, most in ROUNDS_BY.items() if any(dtype == row[1] for row in rows)]
    note = f"a value is rounded relative to itself, to {', '.join(there)} at most"
    title = "What is exact and what is rounded"
    return Paragraph(title, [note] if there else [], ("what", "in", ">number", "rounded"), rows)
