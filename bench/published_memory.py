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
from shardwright.search.units import percent, size

REPORTED_BYTES = {"h100": 81_559 << 20, "a100-80": 81_251 << 20, "a100-40": 40_536 << 20}
"""Memory of the three GPUs as nvidia-smi reports it; the presets have 80 and 40 decimal GB."""


@dataclass(frozen=True, slots=True)
class Peak:
    """A run, its predicted memory and that of the device."""

    name: str
    gpu: str
    memory: Memory
    preset_bytes: int

    def shares(self) -> tuple[float, float]:
        """Of the preset's memory, and of what drivers report."""
        return self.memory.total_bytes / self.preset_bytes, self.memory.total_bytes / REPORTED_BYTES[self.gpu]


def peak(planned: Planned) -> Peak:
    """Of the fullest stage."""
    cluster, run = planned.cluster, planned.run
    timeline = simulate(program(planned.graph, cluster, planned.execution, planned.repeats))
    return Peak(run.name, run.gpu, timeline.fullest.memory, cluster.device.memory_bytes)


def lines(peaks: Sequence[Peak]) -> list[str]:
    """How many are predicted not to have fitted, and the largest."""
    over, more = (sum(share > 1 for share in shares) for shares in zip(*map(Peak.shares, peaks), strict=True))
    beside = [p.memory.context_bytes + p.memory.communication_bytes for p in peaks]
    counted = f"{over} are predicted above the preset's memory, {more} above what drivers report"
    return [
        f"{len(peaks)} runs that fitted: {counted}",
        f"context and connections: {size(min(beside))} to {size(max(beside))}",
        *map(_line, sorted(peaks, key=lambda p: -p.shares()[1])[:10]),
    ]


def _line(peak: Peak) -> str:
    preset, reported = map(percent, peak.shares())
    used = size(peak.memory.total_bytes)
    return f"  {peak.name}: {used}, {preset} of the preset, {reported} of what drivers report"


def main() -> None:
    """Every bf16 and fp8 run of llm-foundry."""
    sys.stdout.write("\n".join(lines([peak(planned) for planned in all_planned(llm_foundry())])) + "\n")


if __name__ == "__main__":
    main()
