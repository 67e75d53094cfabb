"""Traces: what the viewers require, and that they show what was simulated."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from shardwright.cost.timeline import trace as module
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.tasks import COMPUTE
from shardwright.cost.timeline.timeline import Timeline, simulate
from shardwright.cost.timeline.trace import trace
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.verbs import VERBS
from tests.cost.programs import planned
from tests.each import each
from tests.search.graphs import cluster

RUNS = [
    ({}, Execution()),
    ({"layers.1": 7}, Execution.of(recompute="full", num_microbatches=2)),
    ({}, Execution.of(num_stages=2, num_microbatches=4, schedule="zero-bubble")),
    ({}, Execution.of(num_stages=2, num_microbatches=4, schedule="interleaved", chunks_per_stage=2)),
]
runs = each(("repeats", "run"), RUNS, ids=range(len(RUNS)))
roles = each("role", ["data", "zero", "tensor"])


def simulated(role: str, repeats: dict[str, int], run: Execution) -> Timeline:
    return simulate(program(planned(role, 6), cluster(4 * run.schedule.num_stages), run, repeats))


def tracks(found: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    by_track = defaultdict[tuple[int, int], list[dict[str, Any]]](list)
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            by_track[event["pid"], event["tid"]].append(event)
    return by_track


@runs
@roles
def test_viewers_can_read_it(role: str, repeats: dict[str, int], run: Execution) -> None:
    found = json.loads(json.dumps(trace(simulated(role, repeats, run)), allow_nan=False))
    named = {(e["pid"], e.get("tid")) for e in found["traceEvents"] if e["ph"] == "M"}
    for event in found["traceEvents"]:
        assert event["ph"] in ("X", "M", "C")
        assert event["name"]
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert (event["pid"], event["tid"]) in named
            assert event["cat"] in ("segment", "fold") or event["args"]["verb"] in VERBS
    assert {pid for pid, tid in named if tid is None} == set(range(run.schedule.num_stages))


@runs
@roles
def test_tasks_of_a_track_do_not_overlap_and_end_with_the_step(
    role: str, repeats: dict[str, int], run: Execution
) -> None:
    timeline = simulated(role, repeats, run)
    found = trace(timeline)
    for events in tracks(found).values():
        events.sort(key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-5 for a, b in pairwise(events))
    last = max(e["ts"] + e["dur"] for events in tracks(found).values() for e in events)
    assert last == pytest.approx(1e6 * timeline.step_s)


@runs
@roles
def test_compute_and_memory_are_those_of_the_timeline(role: str, repeats: dict[str, int], run: Execution) -> None:
    timeline = simulated(role, repeats, run)
    found = trace(timeline)
    for number, stage in enumerate(timeline.stages):
        compute = next(
            e["tid"] for e in found["traceEvents"]
            if e["name"] == "thread_name" and e["pid"] == number and e["args"]["name"] == COMPUTE
        )  # fmt: skip
        shown = sum(e["dur"] for e in tracks(found)[number, compute])
        if role == "tensor" or not repeats:  # a fold is shown whole, with what compute waits for in it
            assert shown <= 1e6 * stage.at_work_s * (1 + 1e-6)
        values = [e["args"]["bytes"] for e in found["traceEvents"] if e["ph"] == "C" and e["pid"] == number]
        assert min(values) >= 0
        assert max(values) == pytest.approx(stage.memory.total_bytes, abs=len(stage.memory.by_category()))


def test_long_traces_show_each_kind_of_segment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = simulated("tensor", {}, Execution.of(num_microbatches=10))
    whole = len(trace(timeline)["traceEvents"])
    monkeypatch.setattr(module, "MAX_TASKS", 10)
    short = trace(timeline)["traceEvents"]
    assert len(short) < whole
    names = [e["name"] for e in short if e["ph"] == "X" and e["cat"] == COMPUTE]
    assert max(names.count(name) for name in names if name != "optimizer") <= 3  # forward, or the first, other, last
    assert sum(e["ph"] == "X" and e["tid"] == 0 for e in short) == 21
