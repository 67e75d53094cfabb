"""Ours in place of torch's own where a DTensor would not be as one process's tensor is."""

from __future__ import annotations

from shardwright.lowering import private_dtensors
from shardwright.lowering.draws import draw_whole
from shardwright.lowering.reductions import reduce_whole
from shardwright.lowering.strided import honour_blocks
from shardwright.lowering.updates import update_parts


def mend_dtensors() -> None:
    """From now on in this process: what finds overflows, numbers, draws, updates, and tools that meet blocks."""
    private_dtensors.find_overflows_together()
    reduce_whole()
    draw_whole()
    honour_blocks()
    update_parts()
