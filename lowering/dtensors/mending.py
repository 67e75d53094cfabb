"""The replacements of torch's functions that would treat a DTensor differently from one process's tensor."""

from __future__ import annotations

from functools import cache

from shardwright.lowering import private_dtensors
from shardwright.lowering.dtensors.copies import refuse_lost_writes
from shardwright.lowering.dtensors.draws import draw_whole
from shardwright.lowering.dtensors.optimizers import update_as_parts
from shardwright.lowering.dtensors.reductions import reduce_whole
from shardwright.lowering.dtensors.states import make_states
from shardwright.lowering.dtensors.strided import honour_blocks
from shardwright.lowering.dtensors.updates import update_parts
from shardwright.lowering.dtensors.wholes import name_remedies


@cache
def mend_dtensors() -> None:
    """Install all replacements in this process, once, for DTensors on meshes of ours (`launch.connect`).

    They concern the search for overflows, numbers, draws, updates, writes, and tools that meet blocks.
    """
    private_dtensors.find_overflows_together()
    reduce_whole()
    draw_whole()
    honour_blocks()
    update_parts()
    update_as_parts()
    make_states()
    name_remedies()
    refuse_lost_writes()
