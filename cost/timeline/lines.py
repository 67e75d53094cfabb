"""A chunk of a model, unrolled: its lines in the order of forward, the memory of every value, weights, gathered blocks.

A section that occurs more than three times in a chunk is unrolled three times; `tasks.Fold` stands for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.cost.timeline.sections import Section
from shardwright.cost.timeline.steps import Step, Steps, Weight

GATHER_BYTES = 128 << 20
"""A block of parameters that are gathered together is closed when it has reached this size, as in the lowering."""
MOST_COPIES = 3


class Part(NamedTuple):
    """A section and how often it occurs in a chunk, one occurrence after the other."""

    section: Section
    times: int


@dataclass(eq=False, slots=True)
class Region:
    """Lines that backward runs again. `whole`: what leaves it is kept, and only what lies inside is made again."""

    whole: bool
    lines: list[Line] = field(default_factory=list)

    def needed(self) -> list[Line]:
        """The lines up to the last that makes what backward needs, where torch.utils.checkpoint stops too."""
        if not self.whole:
            return self.lines
        wanted = {storage for line in self.lines for storage in line.keeps if storage.region is self}
        made = [{line.result, *line.keeps} - set(line.reads) for line in self.lines]
        last = max((i for i, storages in enumerate(made) if wanted & storages), default=-1)
        return self.lines[: last + 1]


@dataclass(eq=False, slots=True)
class Storage:
    """The memory of one value and its views. `kept` for backward; `region`: where it is made again instead."""

    num_bytes: float
    kept: bool = False
    region: Region | None = None


class Line(NamedTuple):
    """One step: the storages that it reads, makes and keeps, and the weights (by number) that it reads.

    gradients    the storages among `reads` whose values get a gradient
    """

    step: Step
    reads: tuple[Storage, ...]
    result: Storage
    keeps: tuple[Storage, ...]
    gradients: tuple[Storage, ...]
    weights: tuple[int, ...]
    region: Region | None


@dataclass(eq=False, slots=True)
class Reading:
    """A weight of one occurrence of its section; a fold makes `more` of them.

    `first` and `last`: the lines that read it; `group`: its gathered block's number.
    """

    weight: Weight
    occurrence: int | None
    more: int
    first: int
    last: int
    group: int | None = None


@dataclass(eq=False, slots=True)
class Group:
    """Weights that are gathered, freed, and whose gradients are reduce-scattered together."""

    readings: list[Reading]

    @property
    def first(self) -> int:
        return min(r.first for r in self.readings)

    @property
    def last(self) -> int:
        return max(r.last for r in self.readings)

    @property
    def used_bytes(self) -> float:
        return sum(r.weight.used_bytes for r in self.readings)


class Span(NamedTuple):
    """The lines of one occurrence. `more`: how many further occurrences a fold makes of it."""

    start: int
    end: int
    more: int


class Chunk:
    """Lines, storages, weights and groups of consecutive parts of a model."""

    def __init__(self, steps: Steps, parts: Sequence[Part]) -> None:
        self.steps, self.parts = steps, tuple(parts)
        self.lines: list[Line] = []
        self.storages: list[Storage] = []
        self.readings: list[Reading] = []
        self.spans: list[Span] = []
        self._env: dict[str, Storage] = {}
        self._numbers: dict[tuple[object, str], int] = {}
        self._regions: dict[tuple[int, str], Region] = {}
        for section, times in parts:
            for copy in range(min(times, MOST_COPIES)):
                if copy:
                    self._env.update((new, self._env[old]) for new, old in section.carried)
                more = times - MOST_COPIES if copy == 1 and times > MOST_COPIES else 0
                self.spans.append(Span(len(self.lines), len(self.lines) + len(section.steps), more))
                for step in section.steps:
                    self._line(step, section, len(self.spans) - 1)
        self.groups = _groups(steps, self.readings)

    def _line(self, step: Step, section: Section, occurrence: int) -> None:
        reads = tuple(self._read(name) for name in step.reads)
        region = self._region(step, occurrence)
        result = self._env[step.alias] if step.alias and step.alias in self._env else self._new(step.num_bytes, region)
        self._env[step.name] = result
        keeps = [self._env[name] for name in step.keeps if name in self._env]
        keeps += [self._new(step.mask_bytes, region)] if step.mask_bytes else []
        for storage in keeps:
            self._keep(storage, region)
        if region is not None:
            for storage in reads:
                if storage.region is not region:
                    self._keep(storage, region)
        numbers = tuple(self._weight(name, section, occurrence) for name in step.weights)
        gradients = tuple(self._env[name] for name in step.gradients)
        line = Line(step, reads, result, tuple(dict.fromkeys(keeps)), gradients, numbers, region)
        if region is not None:
            region.lines.append(line)
        self.lines.append(line)

    def _new(self, num_bytes: float, region: Region | None) -> Storage:
        self.storages.append(Storage(num_bytes, False, region))
        return self.storages[-1]

    def _read(self, name: str) -> Storage:
        """A value of this chunk; what comes from another takes memory too, unlike leaves, which are always there."""
        if name not in self._env:
            self._env[name] = self._new(self.steps.num_bytes.get(name, 0.0), None)
        return self._env[name]

    def _region(self, step: Step, occurrence: int) -> Region | None:
        match self.steps.execution.recompute:
            case "full" if step.block:
                return self._regions.setdefault((occurrence, step.block), Region(True))
            case "selective" if step.attention:
                return Region(False)
            case _:
                return None

    def _keep(self, storage: Storage, reader: Region | None) -> None:
        """Kept for backward, unless it is made again there."""
        if storage.region is None or (storage.region is not reader and storage.region.whole):
            storage.kept = True

    def _weight(self, name: str, section: Section, occurrence: int) -> int:
        weight = self.steps.weights[name]
        home = occurrence if weight.leaf in section.leaves else None
        number = self._numbers.setdefault((home, name), len(self.readings))
        if number == len(self.readings):
            more = self.spans[occurrence].more if home is not None else 0
            self.readings.append(Reading(weight, home, more, len(self.lines), len(self.lines)))
        self.readings[number].last = len(self.lines)
        return number

    # ---- what a stage stores ----

    def leaves(self) -> Iterator[tuple[str, int]]:
        """The parameters that the chunk reads, and how many of each."""
        found: dict[str, int] = {}
        for section, times in self.parts:
            for step in section.steps:
                for name in step.weights:
                    leaf = self.steps.weights[name].leaf
                    found[leaf] = times if leaf in section.leaves else 1
        yield from found.items()


def _groups(steps: Steps, readings: Sequence[Reading]) -> list[Group]:
    """Neighbours in the order of first use of one block, one dtype, and gathered along the same axes."""
    groups: list[Group] = []
    last: tuple[object, ...] = ()
    for reading in sorted(readings, key=lambda r: r.first):
        if not reading.weight.gathers:
            continue
        weight = reading.weight
        axes = tuple(axis for axis, _ in weight.gathers)
        key = (reading.occurrence, weight.block, axes, steps.leaves[weight.leaf].dtype)
        if key != last or groups[-1].used_bytes >= GATHER_BYTES:
            groups.append(Group([]))
            last = key
        groups[-1].readings.append(reading)
        reading.group = len(groups) - 1
    return groups
