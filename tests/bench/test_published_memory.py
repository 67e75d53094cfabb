"""Memory of published runs: what is counted as not fitting, and one run from its row to its memory."""

from __future__ import annotations

from bench.published import llm_foundry
from bench.published_memory import Peak, lines, peak
from bench.published_plans import planned
from shardwright.cost.timeline.memory import Memory
from shardwright.verifier.choices import Certified


def test_what_is_above_the_memory_is_counted_and_the_largest_come_first() -> None:
    peaks = [
        Peak(str(gb), Memory(parameters_bytes=gb * 10**9, context_bytes=gb), 80 * 10**9) for gb in (79, 100, 60, 83)
    ]
    said = lines(peaks)
    assert said[0] == "4 runs that fitted: 2 are predicted above the device's memory"
    assert said[1] == "context and connections: 60 B to 100 B"
    assert [line.split(":")[0].strip() for line in said[2:]] == ["100", "83", "79", "60"]


def test_a_run() -> None:
    run = next(run for run in llm_foundry() if run.name == "a100-40/125m/seq032768/gpus00008/micro001x004/bf16")
    found = peak(planned(run, Certified()))
    assert found.memory.context_bytes > 0
    assert found.memory.communication_bytes > 0
    assert 0.1 < found.share < 1
