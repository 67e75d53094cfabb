"""What reports say of foreign parts: loudly that there are some, why, and what they cost."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwright as sw
from shardwright.pcg.errors import CaptureError, PlanError
from shardwright.reports.facts import PlanFacts
from shardwright.reports.foreign import foreign_parts
from shardwright.reports.plan import PlanReport
from shardwright.search.plan import Plan
from tests.foreign import make


def test_a_plan_says_what_runs_as_it_is(tmp_path: Path) -> None:
    model, batch = make("lengths")
    plan = sw.plan(model, sw.Cluster.local(2), kwargs=batch)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert "of which part is not captured and runs as it is" in repr(read)
    (part,) = foreign_parts(PlanFacts(read))
    assert (part.name, part.way, part.num_calls) == ("part", "whole", 1)
    assert 0 < part.share < 1
    text = str(PlanReport(read))
    assert "RUNS AS IT IS   part: not captured" in text
    assert "foreign.py:" in text
    assert "which depends on data" in text
    assert "measured on this machine's cpu" in text
    assert "it is foreign: it runs as it is" in text


def test_on_other_devices_operations_are_counted() -> None:
    model, batch = make("lengths")
    plan = sw.plan(model, sw.Cluster.preset("dgx-h100"), kwargs=batch, foreign="part")
    (part,) = foreign_parts(PlanFacts(plan))
    assert (part.basis, part.why) == ("counted operations", "named by the user")


def test_strict_and_microbatches_refuse_it() -> None:
    model, batch = make("lengths")
    with pytest.raises(CaptureError, match="part"):
        sw.plan(model, sw.Cluster.local(2), kwargs=batch, strict=True)
    with pytest.raises(PlanError, match=r"part is foreign, and runs on the whole batch"):
        sw.plan(model, sw.Cluster.local(2), kwargs=batch, foreign="part", microbatches=2)
