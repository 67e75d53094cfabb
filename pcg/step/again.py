"""Operators that backward runs again in place of keeping their values, by the names of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.pcg.errors import PlanError
from shardwright.pcg.graph import Graph
from shardwright.pcg.step.chunk import whole_chunk
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.fates import Fate
from shardwright.pcg.step.operation import Region
from shardwright.pcg.step.operations import Operations
from shardwright.pcg.step.recompute import RECOMPUTE


@dataclass(frozen=True)
class MadeAgain:
    """The operators that backward recomputes, or whose forward it runs again.

    regions   the region that an operator is recomputed with, if any
    twice     the operators whose forward runs again: those of a region up to the last that makes a value backward needs
    """

    regions: Mapping[str, Region] = field(default_factory=dict)
    twice: frozenset[str] = frozenset()

    def fate(self, value: str, reader: str) -> Fate:
        """Return the fate of a value that the backward of `reader` needs; see `pcg.step.chunk`."""
        region = self.regions.get(value)
        if region is None:
            return Fate.KEPT
        return Fate.AGAIN if region == self.regions.get(reader) else region.results


NOTHING = MadeAgain()


def made_again(graph: Graph, execution: Execution) -> MadeAgain:
    """Return what an execution recomputes of a graph, serial or parallel.

    Raises:
        PlanError: the execution names a block, place or kind that is not there.
    """
    return NOTHING if not execution.asks(RECOMPUTE) else made_again_in(Operations(graph, execution))


def made_again_in(operations: Operations) -> MadeAgain:
    """Return the same for operations that are listed already."""
    if not operations.execution.asks(RECOMPUTE):
        return NOTHING
    chunk = whole_chunk(operations)
    regions = {o.operation.name: o.operation.region for o in chunk.occurrences if o.operation.region is not None}
    reruns = {o.rerun for o in chunk.occurrences if o.rerun is not None}
    return MadeAgain(regions, frozenset(o.operation.name for rerun in reruns for o in rerun.needed()))


def made_again_of_part(graph: Graph, execution: Execution) -> MadeAgain:
    """Return the same for a part of a graph, which need not contain what the execution names."""
    try:
        return made_again(graph, execution)
    except PlanError:
        return NOTHING
