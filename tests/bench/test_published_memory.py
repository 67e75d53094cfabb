"""Memory of published runs: what is counted as not fitting, and one run from its row to its memory."""

from __future__ import annotations

from bench.published import llm_foundry
from bench.published_memory import REPORTED_BYTES, Peak, lines, peak
from bench.published_plans import MACHINES, planned
from shardwright.cost.clusters.cluster import Cluster
from shardwright.cost.timeline.memory import Memory
from shardwright.verifier.choices import Certified


def test_drivers_report_more_than_the_presets_have() -> None:
    assert set(REPORTED_BYTES) == set(MACHINES)
    for gpu, machine in MACHINES.items():
        assert 1 < REPORTED_BYTES[gpu] / Cluster.preset(machine).device.memory_bytes < 1.07


def test_what_is_above_either_memory_is_counted_and_the_largest_come_first() -> None:
    peaks = [
        Peak(str(gb), "h100", Memory(parameters_bytes=gb * 10**9, context_bytes=gb), 80 * 10**9)
        for gb in (79, 100, 60, 83)
    ]
    said = lines(peaks)
    assert said[0].startswith("4 runs that fitted: 2 are predicted above the preset's memory, 1 above what drivers")
    assert said[1] == "context and connections: 60 B to 100 B"
    assert [line.split(":")[0].strip() for line in said[2:]] == ["100", "83", "79", "60"]


def test_a_run() -> None:
    run = next(run for run in llm_foundry() if run.name == "a100-40/125m/seq032768/gpus00008/micro001x004/bf16")
    found = peak(planned(run, Certified()))
    assert found.memory.context_bytes > 0
    assert found.memory.communication_bytes > 0
    preset, reported = found.shares()
    assert 0.1 < reported < preset < 1
