"""A plan as the tree of the model's modules, repeated blocks folded.

Blocks fold when they are equal in everything that the tree shows: operators, types, layouts, moves and costs, all the
way down. So a plan that treats layers differently shows as several groups of layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.pcg.graph import OPAQUE, Node
from shardwright.pcg.moves import Move
from shardwright.reports.anatomy import Anatomy

CONSTANTS = "(constants)"
"""Stands for a module that holds what no parameter reaches: the batch, positions, masks."""


@dataclass(frozen=True, slots=True)
class Step:
    """A change of layout along one axis that follows a row, and the collectives that it takes."""

    axis: str
    before: str
    after: str
    forward: str
    backward: str
    seconds: float
    sent_bytes: float


@dataclass(frozen=True, slots=True)
class Row:
    """One operator or parameter of a module. `use` and `layouts` have one entry per mesh axis."""

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
    steps: tuple[Step, ...]

    @property
    def communication_s(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def sent_bytes(self) -> float:
        return sum(step.sent_bytes for step in self.steps)


@dataclass(frozen=True, slots=True)
class Totals:
    """What a module costs on one device, its inner modules included. Optimizer time is not in `compute_s`."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    sent_bytes: float = 0.0
    stored_bytes: int = 0
    num_operators: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.compute_s + other.compute_s,
            self.communication_s + other.communication_s,
            self.sent_bytes + other.sent_bytes,
            self.stored_bytes + other.stored_bytes,
            self.num_operators + other.num_operators,
        )

    def times(self, count: int) -> Totals:
        return Totals(
            self.compute_s * count,
            self.communication_s * count,
            self.sent_bytes * count,
            self.stored_bytes * count,
            self.num_operators * count,
        )


@dataclass(frozen=True, slots=True)
class Module:
    """A module, or several equal ones: `members` are their names. `each` is what one of them costs."""

    members: tuple[str, ...]
    rows: tuple[Row, ...]
    children: tuple[Module, ...]
    each: Totals

    @property
    def label(self) -> str:
        """`h.0–5`, `layers.0, 2, 4–7` or just the name."""
        if len(self.members) == 1:
            return self.members[0]
        prefix = self.members[0].rpartition(".")[0]
        return (f"{prefix}." if prefix else "") + _ranges([int(m.rpartition(".")[2]) for m in self.members])

    @property
    def total(self) -> Totals:
        return self.each.times(len(self.members))

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Module]]:
        """This module and everything in it, with depths."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


@dataclass
class _Draft:
    rows: list[Row] = field(default_factory=list)
    children: dict[str, _Draft] = field(default_factory=dict)

    def at(self, path: Sequence[str]) -> _Draft:
        here = self
        for part in path:
            here = here.children.setdefault(part, _Draft())
        return here


def module_tree(anatomy: Anatomy) -> Module:
    """The folded tree; its root stands for the whole model."""
    steps = _steps(anatomy)
    root = _Draft()
    shown = [n for n in anatomy.graph.nodes if _is_shown(n, bool(steps[n.name]))]
    # modules come in the order in which they run
    for node in sorted(shown, key=lambda n: (n.name in anatomy.constants, n.op == "parameter")):
        path = node.source.module.split(".") if node.source.module else []
        if node.name in anatomy.constants:
            path = [CONSTANTS]  # they belong to no block: the first that needs a mask computes it for all
        home = root.at(path[:-1] if node.op == "parameter" else path)
        home.rows.append(_row(anatomy, node, steps[node.name]))
    return _fold(anatomy.plan.model, root)


def _is_shown(node: Node, moves: bool) -> bool:
    if node.is_leaf:
        return moves or node.op == "parameter"
    return not node.is_parallel


def _steps(anatomy: Anatomy) -> dict[str, list[Step]]:
    found: dict[str, list[Step]] = defaultdict(list)
    for origin, last, move in anatomy.moves:
        cost = anatomy.costs[last.name]
        forward, backward = cost.collectives
        found[origin.name].append(
            _step(anatomy, move, forward, backward, cost.communication_s, cost.communication_bytes)
        )
    return found


def _step(anatomy: Anatomy, move: Move, forward: str, backward: str, seconds: float, sent_bytes: float) -> Step:
    axis = anatomy.mesh.names[move.axis]
    return Step(axis, str(move.before), str(move.after), forward, backward, seconds, sent_bytes)


def _row(anatomy: Anatomy, node: Node, steps: Sequence[Step]) -> Row:
    kind = anatomy.graph.types[node.name]
    weight = node.op == "parameter"
    name = str(node.attr("target")).rpartition(".")[2] if node.is_leaf else node.op
    if node.op == OPAQUE:
        name = str(node.attr("target"))
    whole = ("whole",) * len(anatomy.mesh)
    use = anatomy.storage[node.name] if weight else anatomy.uses.get(node.name, whole)
    return Row(
        anatomy.kind_of(node) if weight or node.name in anatomy.constants else "operator",
        name,
        node.source.line,
        kind.dtype,
        kind.shape,
        kind.local_shape(anatomy.mesh),
        tuple(map(str, kind.layouts)),
        tuple(use),
        0.0 if weight else anatomy.costs[node.name].compute_s,
        kind.local_bytes(anatomy.mesh) if weight else 0,
        tuple(steps),
    )


def _fold(name: str, draft: _Draft) -> Module:
    groups: dict[Hashable, list[Module]] = {}
    for child_name, child in draft.children.items():
        for module in _hoisted(_fold(child_name, child)):
            key = (module.rows, module.children) if _number(module) is not None else object()
            groups.setdefault(key, []).append(module)
    children = tuple(
        Module(tuple(m for module in group for m in module.members), group[0].rows, group[0].children, group[0].each)
        for group in groups.values()
    )
    each = sum((child.total for child in children), _own(draft.rows))
    rows = sorted(draft.rows, key=lambda row: row.kind != "weight")
    return Module((name,), tuple(rows), children, each)


def _hoisted(module: Module) -> list[Module]:
    """A list of numbered modules gives its name to them: `layers.0` in place of `layers` and `0`."""
    if module.rows or not module.children or any(_number(child) is None for child in module.children):
        return [module]
    prefix = module.members[0]
    return [
        Module(tuple(f"{prefix}.{m}" for m in child.members), child.rows, child.children, child.each)
        for child in module.children
    ]


def _number(module: Module) -> int | None:
    last = module.members[0].rpartition(".")[2]
    return int(last) if last.isdecimal() else None


def _own(rows: Sequence[Row]) -> Totals:
    return Totals(
        sum(row.compute_s for row in rows),
        sum(row.communication_s for row in rows),
        sum(row.sent_bytes for row in rows),
        sum(row.stored_bytes for row in rows),
        sum(row.kind == "operator" for row in rows),
    )


def _ranges(numbers: Sequence[int]) -> str:
    """0–3, 5"""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
