"""The way in which a plan's step is run: microbatches, lifetimes of gathered weights, recomputation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from shardwright.cost.timeline.memory import MemoryVerdict, verdict
from shardwright.pcg.mesh import TIME, Mesh
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.lifetimes import ZEROS
from shardwright.pcg.step.meshes import stage_meshes
from shardwright.pcg.step.recompute import OFFLOAD, RECOMPUTE, Field
from shardwright.reports.again import Remade
from shardwright.reports.away import OnHost, modules_of
from shardwright.reports.facts import PlanFacts
from shardwright.reports.lifetimes import lifetime_name, lifetime_words
from shardwright.reports.report import Paragraph
from shardwright.reports.rounding import precision, roundings
from shardwright.reports.units import plural, seconds, size
from shardwright.search.plan import Plan
from shardwright.search.request.spaces import batch_size


def device_mesh(mesh: Mesh) -> str:
    """Return the mesh of devices, without the axis of time: `[dp=8, tp=8]`."""
    axes = [(name, size) for name, size in zip(mesh.names, mesh.sizes, strict=True) if name != TIME]
    return str(Mesh.of(**dict(axes)))


def meshes(mesh: Mesh, execution: Execution) -> str:
    """Return the stages' meshes: `mesh [dp=8] for each of 4 stages`, `meshes [dp=8], [dp=4] for 2 stages`."""
    meshes_by_stage, count = (
        [device_mesh(each) for each in stage_meshes(mesh, execution)],
        execution.schedule.num_stages,
    )
    if len(set(meshes_by_stage)) > 1:
        return f"meshes {', '.join(meshes_by_stage)} for {count} stages"
    return f"mesh {meshes_by_stage[0]}" + (f" for each of {count} stages" if count > 1 else "")


_MOST_NAMED = 3
"""The most operators or modules that are named in a line; in a table, `_MOST_SHOWN`."""
_MOST_SHOWN = 12
_MODES: dict[str, str] = {
    "none": "everything that backward needs is kept",
    "selective": "attention is made again in backward",
    "full": "every block is made again in backward",
}  # fmt: skip
_AGAIN: dict[str, str] = {"none": "nothing", "selective": "attention", "full": "all"}


def way(facts: PlanFacts, times: int = 1) -> str:
    """Return the microbatches, the recomputation and the pieces of a step of `times` batches, in words."""
    plan = facts.plan
    obstacle = f"; no microbatches: {plan.report.obstacle}" if plan.report.obstacle else ""
    count = plan.execution.pieces
    cut = f"; changes of layout in {count} pieces beside products" if count > 1 else ""
    return f"{microbatches(plan, times)}; {_again(facts)}{_away(facts)}{cut}{obstacle}"


def microbatches(plan: Plan, times: int = 1) -> str:
    """Return the microbatches in words, `4 microbatches of 16 of the batch's 64`; `times`: batches a step."""
    count, size = plan.mesh.num_microbatches, batch_size(plan.graph)
    text = plural(times * count, "microbatch", "microbatches")
    return text + (f", each of {size // count} of the batch's {size}" if count > 1 and size % count == 0 else "")


def _again(facts: PlanFacts) -> str:
    mode, recomputation = facts.plan.execution.recompute, facts.recomputation
    if isinstance(mode, str):
        return _MODES[mode]
    phrases = "; ".join(
        f"{remade_text(remade)} of {remade.blocks or 'what is in no block'}" for remade in recomputation.remade
    )
    number = sum(remade.num_blocks for remade in recomputation.remade if remade.blocks)
    return (
        f"made again in backward: {phrases} ({number} of {recomputation.num_blocks} blocks)"
        if phrases
        else _MODES["none"]
    )


def _away(facts: PlanFacts) -> str:
    """Return what waits on the host, in words; "" for nothing."""
    if not (rows := facts.on_host):
        return ""
    phrases = "; ".join(
        f"values in {_shown(row, _MOST_NAMED)} of {row.blocks or 'what is in no block'}" for row in rows
    )
    return f"; waits on the host: {phrases} ({size(sum(row.num_bytes for row in rows))} of a microbatch)"


def _shown(row: OnHost, most: int) -> str:
    modules = list(modules_of(row))
    return ", ".join(modules[:most]) + (", …" if len(modules) > most else "")


def remade_text(remade: Remade, most: int = _MOST_NAMED) -> str:
    """Return the recomputed part of such a block: all, attention, or values in some modules, `most` of them named."""
    if isinstance(remade.mode, str):
        return _AGAIN[remade.mode]
    modules = list(dict.fromkeys(place.partition(":")[0] or "its own code" for place in remade.mode))
    return "values in " + ", ".join(modules[:most]) + (", …" if len(modules) > most else "")


def text_of(plan: Plan, field: Field) -> str:
    """Return the plan's recomputation or offload as JSON, for the argument and the option of that name."""
    return json.dumps(plan.execution.to_json().get(field.name, "none"), indent=2)


def again_name(execution: Execution) -> str:
    """Return the recomputation in a word; "" for none."""
    mode = execution.recompute
    if execution.schedule.recompute_by_stage:
        return "by stage"
    if isinstance(mode, str):
        return "" if mode == "none" else mode
    return "by value" if any(isinstance(kind, tuple) for _, kind in mode) else "by block"


def saving(facts: PlanFacts) -> str:
    """Return the cost and the saving of recomputation, in words; "" where there is none."""
    prediction, plain = facts.plan.prediction, facts.recomputation.without
    if plain is None:
        return ""
    may_be_used = plain.memory.total_bytes <= facts.plan.report.limit_bytes
    fit = verdict(plain.memory.total_bytes, plain.device_bytes) if may_be_used else "does not fit"
    longer, less = prediction.step_s - plain.step_s, plain.memory.total_bytes - prediction.memory.total_bytes
    return (
        f"with everything kept, this plan would take {seconds(plain.step_s)} a step and "
        f"{size(plain.memory.total_bytes)} on each device, which {_FITS[fit]}: "
        f"making it again costs {seconds(longer)} and saves {size(less)}"
    )


_FITS: dict[MemoryVerdict, str] = {
    "fits": "fits too", "may not fit": "may not fit", "does not fit": "does not fit",
}  # fmt: skip


def statistics(facts: PlanFacts) -> str:
    """Return the operators with statistics of each microbatch by itself, in words."""
    shown = ", ".join(facts.estimated[:_MOST_NAMED]) + (", …" if len(facts.estimated) > _MOST_NAMED else "")
    return (
        f"{plural(len(facts.estimated), 'sum')} over the batch of each microbatch by itself ({shown}): the step "
        "is that of one process which runs the microbatches in turn"
    )


# ---- paragraphs ----

COPIES = "copies over: along these axes every slice is there more than once; data parallel over them, hybrid sharding"


def gathered(facts: PlanFacts) -> Iterator[Paragraph]:
    """Yield the gathered weights with their lifetimes."""
    rows = [
        (str(g.count), g.where, lifetime_name(g.zero, facts.mesh), g.axis, ", ".join(g.copies), size(g.stored_bytes),
         size(g.gathered_bytes))
        for g in facts.gathered
    ]  # fmt: skip
    if rows:
        there = {g.zero for g in facts.gathered}
        notes = [
            f"{lifetime_name(zero, facts.mesh)}: {lifetime_words(zero, facts.mesh)}" for zero in ZEROS if zero in there
        ]
        notes += [COPIES] if any(g.copies for g in facts.gathered) else []
        columns = (">weights", "of", "lifetime", "slices over", "copies over", ">slices", ">gathered")
        title = "Weights that are stored in slices and gathered for use (bytes of one device, all gathered at once)"
        yield Paragraph(title, [], columns, rows, notes)


def made_again(facts: PlanFacts) -> Iterator[Paragraph]:
    """Yield the recomputed blocks, with the cost and the saving."""
    rows = [
        (r.blocks or "in no block", remade_text(r, _MOST_SHOWN), str(r.num_operators), seconds(r.compute_s),
         seconds(r.communication_s))
        for r in facts.recomputation.remade
    ]  # fmt: skip
    if rows:
        columns = ("blocks", "what", ">operators", ">compute", ">comm.")
        title = "Made again in backward (what that adds to compute and communication of a step)"
        notes = [saving(facts)]
        if any(isinstance(r.mode, tuple) for r in facts.recomputation.remade):
            notes.append("`explain --recompute` prints all of it, as recompute= and --recompute take it")
        yield Paragraph(title, [], columns, rows, notes)


def away(facts: PlanFacts) -> Iterator[Paragraph]:
    """Yield what waits on the host, with the time of its copies."""
    rows = [
        (row.blocks or "in no block", _shown(row, _MOST_SHOWN), str(row.num_values), size(row.num_bytes),
         seconds(row.copies_s))
        for row in facts.on_host
    ]  # fmt: skip
    if rows:
        columns = ("blocks", "values in", ">number", ">bytes", ">copies")
        title = "Waits on the host until backward (bytes of one device in a microbatch; copies of a step, both ways)"
        notes = ["`explain --offload` prints all of it, as offload= and --offload take it"]
        yield Paragraph(title, [], columns, rows, notes)


def running_data(facts: PlanFacts) -> dict[str, Any]:
    """Return the same for programs."""
    mesh = facts.mesh
    return {
        "way": way(facts),
        "gathered": [
            {**asdict(g), "name": lifetime_name(g.zero, mesh), "words": lifetime_words(g.zero, mesh)}
            for g in facts.gathered
        ],
        "copies": COPIES if any(g.copies for g in facts.gathered) else "",
        "remade": [{**asdict(r), "text": remade_text(r, _MOST_SHOWN)} for r in facts.recomputation.remade],
        "saving": saving(facts),
        "recompute": text_of(facts.plan, RECOMPUTE),
        "on_host": [{**asdict(row), "text": _shown(row, _MOST_SHOWN)} for row in facts.on_host],
        "offload": text_of(facts.plan, OFFLOAD),
        "statistics": statistics(facts) if facts.estimated else "",
        "precision": {
            "name": facts.plan.precision,
            "operators": dict(facts.dtypes),
            "reduce_dtype": facts.plan.execution.reduce_dtype,
            "optimizer": facts.plan.execution.assumed.optimizer,
            "text": precision(facts),
            "rounding": [asdict(row) for row in roundings(facts)],
        },
    }
