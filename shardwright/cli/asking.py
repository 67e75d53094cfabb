"""Questions of `explain` that need another search, and the model where the plan file does not say enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright import asking
from shardwright.cli import terminal
from shardwright.cli.models import Loaded, Request, load
from shardwright.cost.clusters.changes import Change
from shardwright.reports.asking import WhatIfReport, WhyNotReport
from shardwright.search.plan import Plan


def why_not(plan: Plan, strategy: str, model: str | None, hf_config: Path | None) -> WhyNotReport:
    """Run `asking.why_not` and show its progress."""
    with terminal.progress("why not") as progress:
        given = _given(plan, model, hf_config, {})
        if given is None:
            return asking.why_not(plan, strategy, progress=progress)
        return asking.why_not(plan, strategy, given.model, given.args, given.kwargs, progress=progress)


def what_if(plan: Plan, changes: Mapping[str, Any], model: str | None, hf_config: Path | None) -> WhatIfReport:
    """Run `asking.what_if` and show its progress. `changes` has the names of its arguments."""
    with terminal.progress("what if") as progress:
        given = _given(plan, model, hf_config, changes)
        if given is None:
            return asking.what_if(plan, **changes, progress=progress)
        return asking.what_if(plan, given.model, given.args, given.kwargs, **changes, progress=progress)


def _given(plan: Plan, model: str | None, hf_config: Path | None, changes: Mapping[str, Any]) -> Loaded | None:
    """Return the model that the user names; a model from a config gets the question's batch and the plan's dtype."""
    if model is None and hf_config is None:
        return None
    if hf_config is None:
        return load(Request(model, None), fake=True)
    batch, seq = asking.new_sizes(plan, {name: Change.of(name, given) for name, given in changes.items()})
    dtypes = Counter(plan.graph.types[leaf.name].dtype for leaf in plan.graph.leaves("parameter"))
    dtype = dtypes.most_common(1)[0][0] if dtypes else "float32"
    return load(Request(model, hf_config, batch, seq or 1, dtype), fake=True)
