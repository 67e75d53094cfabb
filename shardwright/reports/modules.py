"""The facts of a plan by the tree of the model's modules, repeated blocks folded.

Blocks fold when they are equal in everything that the tree shows: operators, types, layouts, moves and costs, all the
way down. So a plan that treats layers differently shows as several groups of layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from shardwright.pcg.graph import OPAQUE, Node
from shardwright.reports.differences import differences
from shardwright.reports.facts import PlanFacts, shown_operator
from shardwright.reports.lifetimes import lifetime_name
from shardwright.reports.tree import Module, ModuleRow, Totals, Transfer

CONSTANTS = "(constants)"
"""The name of a pseudo-module for values that no parameter reaches: the batch, positions, masks."""


@dataclass
class _Draft:
    rows: list[ModuleRow] = field(default_factory=list)
    children: dict[str, _Draft] = field(default_factory=dict)

    def at(self, path: Sequence[str]) -> _Draft:
        here = self
        for part in path:
            here = here.children.setdefault(part, _Draft())
        return here


def module_tree(facts: PlanFacts) -> Module:
    """Return the folded tree; its root stands for the whole model."""
    steps = _steps(facts)
    root = _Draft()
    shown = [n for n in facts.graph.nodes if _is_shown(n, bool(steps[n.name]))]
    # modules come in the order in which they run
    for node in sorted(shown, key=lambda n: (n.name in facts.constants, n.op == "parameter")):
        path = node.source.module.split(".") if node.source.module else []
        if node.name in facts.constants:
            path = [CONSTANTS]  # they belong to no block: the first that needs a mask computes it for all
        home = root.at(path[:-1] if node.op == "parameter" else path)
        home.rows.append(_row(facts, node, steps[node.name]))
    return _fold(facts.plan.model, root)


def _is_shown(node: Node, moves: bool) -> bool:
    if node.is_leaf:
        return moves or node.op == "parameter"
    return not node.is_parallel


def _steps(facts: PlanFacts) -> dict[str, list[Transfer]]:
    """Return the moves of each value, by the node that makes it."""
    transfers: dict[str, list[Transfer]] = defaultdict(list)
    for origin, move, cost in facts.moves:
        where = (facts.mesh.names[move.axis], str(move.before), str(move.after))
        how = (*cost.collectives, *cost.counts, cost.communication_s, cost.communication_bytes)
        transfers[origin.name].append(Transfer(*where, *how))
    for node, axes, exchange in facts.exchanges:
        cost = facts.costs[node.name]
        how = (*cost.collectives, *cost.counts, cost.communication_s, cost.communication_bytes)
        transfers[node.name].append(Transfer(axes, *exchange.ends, *how))
    return transfers


def _row(facts: PlanFacts, node: Node, steps: Sequence[Transfer]) -> ModuleRow:
    kind = facts.graph.types[node.name]
    weight = node.op == "parameter"
    name = str(node.attr("target")).rpartition(".")[2] if node.is_leaf else node.op
    if node.op == OPAQUE:
        name = shown_operator(node)
    elif not node.is_leaf and node.name not in facts.constants:
        name = facts.names.of(node.name)[1].rpartition(":")[2]  # the second of several is `add#2`, as in the timeline
    whole = ("whole",) * len(facts.mesh)
    return ModuleRow(
        facts.kind_of(node) if weight or node.name in facts.constants else "operator",
        name,
        node.source.line,
        kind.dtype,
        kind.shape,
        kind.local_shape(facts.mesh),
        tuple(map(str, kind.layouts)),
        facts.storage[node.name] if weight else facts.uses.get(node.name, whole),
        0.0 if weight else facts.costs[node.name].compute_s,
        kind.local_bytes(facts.mesh) if weight else 0,
        tuple(steps),
        node.name in facts.recomputation.nodes,
        lifetime_name(facts.lifetimes[node.name], facts.mesh) if node.name in facts.lifetimes else "",
    )


def _fold(name: str, draft: _Draft) -> Module:
    groups: dict[Hashable, list[Module]] = {}
    for child_name, child in draft.children.items():
        for module in _hoisted(_fold(child_name, child)):
            key = (module.rows, module.children) if _number(module) is not None else object()
            groups.setdefault(key, []).append(module)
    children = _compared(
        replace(group[0], members=tuple(m for module in group for m in module.members)) for group in groups.values()
    )
    each = Totals.of_all([Totals(), *map(Totals.of_row, draft.rows), *(child.total for child in children)])
    rows = sorted(draft.rows, key=lambda row: row.kind != "weight")
    return Module((name,), tuple(rows), children, each)


def _hoisted(module: Module) -> list[Module]:
    """Return numbered modules under their list's name: `layers.0` in place of `layers` and `0`."""
    if module.rows or not module.children or any(_number(child) is None for child in module.children):
        return [module]
    prefix = module.members[0]
    return [replace(c, members=tuple(f"{prefix}.{m}" for m in c.members)) for c in module.children]


def _compared(modules: Iterable[Module]) -> tuple[Module, ...]:
    """Return the modules; each of a numbered group has its differences from the first of them."""
    firsts: dict[str, Module] = {}
    compared: list[Module] = []
    for module in modules:
        stem = module.members[0].rpartition(".")[0]
        first = firsts.setdefault(stem, module) if _number(module) is not None else module
        text = "" if first is module else f"from {first.label}: {differences(module, first)}"
        compared.append(replace(module, differs=text))
    return tuple(compared)


def _number(module: Module) -> int | None:
    last = module.members[0].rpartition(".")[2]
    return int(last) if last.isdecimal() else None
