"""Predicted peak memory of published runs, all of which fitted: `python -m bench.published_memory`.

No table of llm-foundry's says what memory a run used; its authors filled it as far as microbatches allowed. So a
prediction above a device's memory is an error, and one far below it may be.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.published import llm_foundry
from bench.published_plans import Planned, all_planned
from shardwright.cost.timeline.memory import Memory
from shardwright.cost.timeline.program import program
from shardwright.cost.timeline.timeline import simulate
from shardwright.reports.units import percent, size


@dataclass(frozen=True, slots=True)
class Peak:
    """A run, its predicted memory and that of the device."""

    name: str
    memory: Memory
    device_bytes: int

    @property
    def share(self) -> float:
        """Return the peak as a share of the device's memory."""
        return self.memory.total_bytes / self.device_bytes


def peak(planned: Planned) -> Peak:
    """Return the predicted peak of the fullest stage."""
    cluster = planned.cluster
    timeline = simulate(program(planned.graph, cluster, planned.execution, planned.repeats))
    return Peak(planned.run.name, timeline.fullest.memory, cluster.device.memory_bytes)


def lines(peaks: Sequence[Peak]) -> list[str]:
    """Say how many are predicted not to have fitted, and list the largest."""
    over = sum(peak.share > 1 for peak in peaks)
    beside = [p.memory.context_bytes + p.memory.communication_bytes for p in peaks]
    return [
        f"{len(peaks)} runs that fitted: {over} are predicted above the device's memory",
        f"context and connections: {size(min(beside))} to {size(max(beside))}",
        *map(_line, sorted(peaks, key=lambda p: -p.share)[:10]),
    ]


def _line(peak: Peak) -> str:
    return f"  {peak.name}: {size(peak.memory.total_bytes)}, {percent(peak.share)} of the device's memory"


def main() -> None:
    """Every bf16 and fp8 run of llm-foundry."""
    sys.stdout.write("\n".join(lines([peak(planned) for planned in all_planned(llm_foundry())])) + "\n")


if __name__ == "__main__":
    main()
