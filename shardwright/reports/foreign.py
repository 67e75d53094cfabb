"""The foreign parts of a plan: what the program calls as it is, why, and what share of the step it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwright.pcg.foreign import Call, is_foreign
from shardwright.reports.facts import PlanFacts
from shardwright.reports.report import Paragraph
from shardwright.reports.units import percent, seconds

BY_HAND = "named by the user"


class ForeignPart(NamedTuple):
    """A part of the model that runs as it is. `share`: its compute as a share of the predicted step."""

    name: str
    way: str
    num_calls: int
    compute_s: float
    share: float
    basis: str
    why: str


def foreign_parts(facts: PlanFacts) -> tuple[ForeignPart, ...]:
    """Return the foreign parts, the most expensive first."""
    by_name: dict[str, list[tuple[Call, float]]] = {}
    for node in facts.graph.nodes:
        if is_foreign(node):
            call = Call.of(node)
            by_name.setdefault(call.name, []).append((call, facts.costs[node.name].compute_s))
    parts = (_part(calls, facts) for calls in by_name.values())
    return tuple(sorted(parts, key=lambda part: -part.compute_s))


def _part(calls: list[tuple[Call, float]], facts: PlanFacts) -> ForeignPart:
    call, kind = calls[0][0], facts.plan.cluster.device.kind
    compute_s = sum(seconds_ for _, seconds_ in calls)
    basis = f"measured on this machine's {kind}" if call.device == kind and call.seconds else "counted operations"
    number = len({one.number for one, _ in calls})
    share = compute_s / facts.plan.prediction.step_s
    return ForeignPart(call.name, call.way, number, compute_s, share, basis, call.why or BY_HAND)


def foreign_line(facts: PlanFacts) -> Iterator[str]:
    """Yield what the first paragraph of a report says, if there are foreign parts."""
    if parts := foreign_parts(facts):
        names, share = ", ".join(part.name for part in parts), percent(sum(part.share for part in parts))
        yield f"RUNS AS IT IS   {names}: not captured, {share} of the step; everything else is proven"


def foreign(facts: PlanFacts) -> Iterator[Paragraph]:
    """Yield the paragraph on the foreign parts, if there are any."""
    if not (parts := foreign_parts(facts)):
        return
    ways = {"whole": "whole on every device", "batch": "along the batch"}
    rows = [
        (part.name, ways[part.way], seconds(part.compute_s), percent(part.share), part.basis, part.why)
        for part in parts
    ]
    columns = ("part", "runs", ">time", ">of the step", "time is", "why")
    notes = ["the proof covers everything else; what these parts compute is taken as it is"]
    if any(part.way == "batch" for part in parts):
        notes.append("that a part runs along the batch is what the user says; two halves of the batch gave the whole")
    yield Paragraph(f"Foreign parts ({len(parts)} not captured)", [], columns, rows, notes)
