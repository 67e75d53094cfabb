"""The tree of a model's modules with the facts of its plan, repeated blocks folded, for reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwright.reports.units import plural, ranges


@dataclass(frozen=True, slots=True)
class Transfer:
    """A change of layout along one axis that follows a row, and its collectives.

    `num_forward`, `num_backward`: how often the value, and its gradient, moves in a step.
    """

    axis: str
    before: str
    after: str
    forward: str
    backward: str
    num_forward: int
    num_backward: int
    seconds: float
    sent_bytes: float


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """An operator or parameter of a module. `use` and `layouts` have one entry per mesh axis.

    `again`: whether backward recomputes it. `lifetime`: of a gathered weight, as "ZeRO-1".
    """

    kind: str
    name: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    layouts: tuple[str, ...]
    use: tuple[str, ...]
    compute_s: float
    stored_bytes: int
    steps: tuple[Transfer, ...]
    again: bool = False
    lifetime: str = ""


class Totals(NamedTuple):
    """The costs of a module on one device, its inner modules included. Optimizer time is not in `compute_s`."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    sent_bytes: float = 0.0
    stored_bytes: int = 0
    num_operators: int = 0

    @classmethod
    def of_row(cls, row: ModuleRow) -> Totals:
        seconds, sent_bytes = sum(step.seconds for step in row.steps), sum(step.sent_bytes for step in row.steps)
        return cls(row.compute_s, seconds, sent_bytes, row.stored_bytes, int(row.kind == "operator"))

    @classmethod
    def of_all(cls, parts: Iterable[Totals]) -> Totals:
        return cls._make(map(sum, zip(*parts, strict=True)))

    def times(self, count: int) -> Totals:
        return Totals._make(count * part for part in self)


@dataclass(frozen=True, slots=True)
class Module:
    """A module, or several equal ones: `members` are their names. `each` is the cost of one of them.

    `differs`: its differences from the first module of the same numbered list, or "".
    """

    members: tuple[str, ...]
    rows: tuple[ModuleRow, ...]
    children: tuple[Module, ...]
    each: Totals
    differs: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """The names in short: `h.0–5`, `layers.0, 2, 4–7` or just the name."""
        if len(self.members) == 1:
            return self.members[0]
        prefix = self.members[0].rpartition(".")[0]
        return (f"{prefix}." if prefix else "") + ranges([int(m.rpartition(".")[2]) for m in self.members])

    @property
    def total(self) -> Totals:
        return self.each.times(len(self.members))

    @property
    def own(self) -> Totals:
        """The costs of one module without its inner modules."""
        return Totals.of_all([Totals(), *map(Totals.of_row, self.rows)])

    def own_label(self, times: int) -> str:
        """Return a label for the module's own rows, over `times` modules: `29 operators of its own`."""
        weights = sum(row.kind == "weight" for row in self.rows)
        counts = {"operator": len(self.rows) - weights, "weight": weights}
        return " and ".join(plural(times * n, what) for what, n in counts.items() if n) + " of its own"

    def walk(self, depth: int = 0, times: int = 1) -> Iterator[tuple[int, int, Module]]:
        """Yield this module and all modules in it: depth, number of occurrences in the model, module."""
        times *= len(self.members)
        yield depth, times, self
        for child in self.children:
            yield from child.walk(depth + 1, times)

    def compute_by_use(self, axis: int) -> Mapping[str, float]:
        """Return seconds of compute by the kind of dimension that an axis splits, inner modules included."""
        seconds: dict[str, float] = defaultdict(float)
        for _, times, inner in self.walk():
            for use, own_s in own_by_use(inner.rows, axis).items():
                seconds[use] += times * own_s
        return seconds


def own_by_use(rows: Iterable[ModuleRow], axis: int) -> Mapping[str, float]:
    """Return operators' seconds of compute by the kind of dimension that a mesh axis splits."""
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.kind == "operator":
            seconds[row.use[axis]] += row.compute_s
    return seconds
