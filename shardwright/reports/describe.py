"""A plan as plain data, from which the page and `explain --format json` are made.

Rows of the module tree are listed once and referred to by number, so that blocks which differ a little stay small.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwright.reports.anatomy import Anatomy
from shardwright.reports.explain import axis_name, fits, links, move_text, provenance, quality, rewrites
from shardwright.reports.tree import Module, Row, Totals, module_tree
from shardwright.search.plan import Plan


def describe(plan: Plan) -> dict[str, Any]:
    """Summary, axes, communication, memory, alternatives, operators that run whole, and the folded tree of modules."""
    anatomy = Anatomy(plan)
    rows: dict[Row, int] = {}
    tree = _module(module_tree(anatomy), rows)
    return {
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "cluster": {
            "name": plan.cluster.name,
            "device": plan.cluster.device.name,
            "num_devices": plan.cluster.num_devices,
            "memory_bytes": plan.cluster.device.memory_bytes,
            "provenance": provenance(plan.cluster),
        },
        "quality": quality(plan),
        "rewrites": rewrites(plan),
        "fits": fits(plan),
        "limit_bytes": plan.report.limit_bytes,
        "prediction": plan.prediction.to_json(),
        "axes": [
            {**asdict(axis), "is": axis_name(axis), "links": links(plan.cluster, plan.mesh, axis.name)}
            for axis in anatomy.axes
        ],
        "communication": [{**asdict(t), "text": move_text(t)} for t in anatomy.traffic],
        "alternatives": [
            {"name": a.name, "mesh": str(a.mesh), "fits": a.fits, "prediction": a.prediction.to_json()}
            for a in sorted(plan.alternatives, key=lambda a: a.prediction.step_s)
        ],
        "unsplit": [asdict(u) for u in anatomy.unsplit],
        "rows": [_row(row) for row in rows],
        "tree": tree,
    }


def _module(module: Module, rows: dict[Row, int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "label": module.label,
        "count": len(module.members),
        "members": " ".join(module.members) if len(module.members) > 1 else "",
        "rows": [rows.setdefault(row, len(rows)) for row in module.rows],
        "children": [_module(child, rows) for child in module.children],
    }
    return {**found, **_totals(module.each)}


def _totals(totals: Totals) -> dict[str, Any]:
    return {
        "compute_s": _short(totals.compute_s),
        "communication_s": _short(totals.communication_s),
        "sent_bytes": round(totals.sent_bytes),
        "stored_bytes": totals.stored_bytes,
        "num_operators": totals.num_operators,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "name": row.name,
        "source": row.source,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "local_shape": list(row.local_shape),
        "layouts": list(row.layouts),
        "use": list(row.use),
        "compute_s": _short(row.compute_s),
        "stored_bytes": row.stored_bytes,
        "steps": [
            {**asdict(step), "seconds": _short(step.seconds), "sent_bytes": round(step.sent_bytes)}
            for step in row.steps
        ],
    }


def _short(seconds: float) -> float:
    """Four digits are enough, and make the page small."""
    return float(f"{seconds:.4g}")
