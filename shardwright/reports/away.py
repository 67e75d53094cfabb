"""The values of a plan that wait for backward in the host's memory, and the seconds of their copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.cost.timeline.passes import copy_s
from shardwright.cost.timeline.steps import Steps
from shardwright.pcg.step.chunk import Allocation, whole_chunk
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.places import places
from shardwright.pcg.step.recompute import OFFLOAD
from shardwright.reports.again import names_of


@dataclass(frozen=True, slots=True)
class OnHost:
    """Blocks of which the same waits on the host. `blocks`: their names; "" for what lies in none.

    `places`: of the values. `num_bytes`: on one device, in one microbatch. `copies_s`: seconds of the copies of a step,
    there and back, most of which run beside compute.
    """

    blocks: str
    places: tuple[str, ...]
    num_values: int
    num_bytes: float
    copies_s: float


def on_host(steps: Steps) -> tuple[OnHost, ...]:
    """Return what waits on the host, in the order of the model; nothing where nothing is asked for."""
    if not steps.execution.asks(OFFLOAD):
        return ()
    chunk, many = whole_chunk(steps), steps.graph.mesh.num_microbatches
    where = places(steps.graph, {o.name: o.block for o in steps.listed})
    by_block = defaultdict[str, list[Allocation]](list)
    for memory in chunk.allocations:
        if memory.fate is Fate.HOST:
            by_block[chunk.occurrences[memory.writers[0]].operation.block].append(memory)
    alike = defaultdict[tuple[str, ...], dict[str, list[Allocation]]](dict)
    for block, memories in by_block.items():
        alike[tuple(where[memory.name] for memory in memories)][block] = memories
    return tuple(_group(steps, places, blocks, many) for places, blocks in alike.items())


def _group(steps: Steps, names: tuple[str, ...], blocks: dict[str, list[Allocation]], many: int) -> OnHost:
    sizes = [memory.num_bytes for values in blocks.values() for memory in values]
    copies_s = 2 * many * sum(copy_s(steps, num_bytes) for num_bytes in sizes)
    return OnHost(names_of(blocks), names, len(sizes), sum(sizes), copies_s)


def modules_of(row: OnHost) -> Iterator[str]:
    """Yield the modules that the values lie in, each once."""
    yield from dict.fromkeys(place.partition(":")[0] or "its own code" for place in row.places)
