"""The work of pipeline stages in a step: segments of one microbatch through their chunks, and the hops between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardwright.cost.clusters.device import Device
from shardwright.cost.timeline.pool import BufferKind
from shardwright.cost.timeline.streams import SegmentTimeline
from shardwright.cost.timeline.tasks import COMPUTE, Segment
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.messages import Message


@dataclass(frozen=True, slots=True, eq=False)
class ChunkSegments:
    """A chunk's segments for one microbatch.

    name      the sections in it
    weights   the second part of backward, where it has two
    leaves    the parameters that it reads, with how many of each
    pool      bytes of the buffer sets that it needs
    """

    name: str
    forward: Segment
    backward: Segment
    weights: Segment
    leaves: Mapping[str, int] = field(default_factory=dict)
    pool: Mapping[BufferKind, float] = field(default_factory=dict)

    def without(self, categories: Collection[str]) -> ChunkSegments:
        """Return the same without the memory of some categories."""
        segments = (segment.without(categories) for segment in (self.forward, self.backward, self.weights))
        forward, backward, weights = segments
        return replace(self, forward=forward, backward=backward, weights=weights)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A pipeline stage.

    pieces   of its chunks, in order
    state    bytes by category that are there all the time
    held     the part of `state` that is for parameters, by category and leaf
    end      after the last backward: the optimizer's update
    """

    pieces: tuple[ChunkSegments, ...]
    state: Mapping[str, float]
    end: Segment
    device: Device
    held: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def without(self, categories: Collection[str]) -> Stage:
        """Return the same without the memory of some categories."""
        state = {name: num_bytes for name, num_bytes in self.state.items() if name not in categories}
        held = {key: num_bytes for key, num_bytes in self.held.items() if key[0] not in categories}
        pieces = tuple(piece.without(categories) for piece in self.pieces)
        return replace(self, pieces=pieces, state=state, end=self.end.without(categories), held=held)


SimulatedSegments = dict[tuple[object, ...], SegmentTimeline]
"""Timelines of segments, by the segment and the way it is run."""


@dataclass(frozen=True)
class StepProgram:
    """The program of a step: the work of each device of every stage.

    execution   with all microbatches, and the split of several stages
    hops_s      seconds to send a microbatch from each virtual stage to the next one, one way; the slower of the two
    hops_bytes  the bytes that a device sends on that way
    simulated   timelines of segments that are known already, shared by programs of the same pieces
    """

    execution: Execution
    stages: tuple[Stage, ...]
    hops_s: tuple[float, ...] = ()
    hops_bytes: tuple[float, ...] = ()
    simulated: SimulatedSegments = field(default_factory=dict, compare=False, repr=False)

    def messages(self, stage: int = 0) -> Counter[Message]:
        """Count the messages that a device of a stage sends to others of the stage in a step."""
        many, sent = self.execution.assumed.num_microbatches, Counter[Message]()
        for piece in self.stages[stage].pieces:
            for segment in (piece.forward, piece.backward, piece.weights):
                for number in range(many):
                    sent += segment.in_microbatch(first=number == 0, last=number == many - 1).messages()
        return sent

    def without(self, categories: Collection[str]) -> StepProgram:
        """Return the same without the memory of some categories."""
        return replace(self, stages=tuple(stage.without(categories) for stage in self.stages), simulated={})

    @cached_property
    def serial_s(self) -> float:
        """The seconds of the busiest stage if nothing overlaps and it never waits for another stage."""
        parts = ((self._passes(stage), _seconds(self.stages[stage].end)) for stage in range(len(self.stages)))
        return max(sum([seconds for piece in (end, passes) for _, seconds in piece]) for passes, end in parts)

    def compute_s(self, stage: int) -> tuple[float, float]:
        """Return the seconds of a stage's undisturbed kernels: of its microbatches, and of the end."""
        parts = self._passes(stage), _seconds(self.stages[stage].end)
        passes_s, end_s = (sum([seconds for stream, seconds in part if stream == COMPUTE]) for part in parts)
        return passes_s, end_s

    def _passes(self, stage: int) -> Iterator[tuple[str, float]]:
        """Yield the stream of every task of a stage's microbatches, with the total seconds of its runs."""
        many = self.execution.assumed.num_microbatches
        for piece in self.stages[stage].pieces:
            for segment in (piece.forward, piece.backward, piece.weights):
                first, each = (segment.in_microbatch(first=first, last=many == 1) for first in (True, False))
                last = segment.in_microbatch(first=False, last=True)
                for kernels, times in ((first, 1), (each, max(0, many - 2)), (last, int(many > 1))):
                    yield from ((stream, times * seconds) for stream, seconds in _seconds(kernels))


def _seconds(segment: Segment) -> Iterator[tuple[str, float]]:
    """Yield the stream of every task of a segment, with the total seconds of its runs."""
    return ((task.stream, times * task.seconds) for times, task in zip(segment.copies(), segment.tasks, strict=True))
