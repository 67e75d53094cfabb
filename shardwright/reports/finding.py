"""Parameters, operators and modules by their names in the model, though equal blocks are folded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any, NamedTuple

from shardwright.pcg.errors import PlanError
from shardwright.pcg.step.lifetimes import ZEROS
from shardwright.reports.facts import PlanFacts
from shardwright.reports.lifetimes import lifetime_name, lifetime_words
from shardwright.reports.modules import module_tree
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.tree import Module, ModuleRow
from shardwright.reports.units import seconds, shape, size
from shardwright.search.plan import Plan


class MatchedRow(NamedTuple):
    """A row by its whole name, and the folded module in which it is shown."""

    name: str
    row: ModuleRow
    shown_in: str


class FoundReport(Report):
    """A plan's facts about a parameter, an operator, or everything in a module; of one block, not its equals.

    Raises:
        PlanError: there is nothing of this name.
    """

    def __init__(self, plan: Plan, name: str, facts: PlanFacts | None = None) -> None:
        self.plan, self.name = plan, name
        self.found = find(module_tree(facts or PlanFacts(plan)), name)

    def paragraphs(self) -> list[Paragraph]:
        return [self._one(match) for match in self.found] if len(self.found) < 4 else [self._table()]

    def data(self) -> list[dict[str, Any]]:
        return [{"name": f.name, "shown_in": f.shown_in, **asdict(f.row)} for f in self.found]

    def _one(self, match: MatchedRow) -> Paragraph:
        row, axes = match.row, self.plan.mesh.names
        a_step = " a step" * (self.plan.mesh.num_microbatches > 1)
        facts = {
            "shape": f"{shape(row.shape)}, on a device {shape(row.local_shape)}" + self._each * (row.kind != "weight"),
            **{axis: f"{layout}: {use}" for axis, layout, use in zip(axes, row.layouts, row.use, strict=True)},
            "stored": size(row.stored_bytes) if row.kind == "weight" else "",
            "lifetime": f"{row.lifetime}: {self._lifetimes[row.lifetime]}" if row.lifetime else "",
            "compute": self._compute(row),
            "moves": "; ".join(f"{s.axis}: {s.before} → {s.after}, {seconds(s.seconds)}{a_step}" for s in row.steps)
            or "none",
            "shown in": match.shown_in,
            "source": row.source,
        }
        lines = [f"{title:10}{text}" for title, text in facts.items() if text]
        return Paragraph(f"{match.name}: {row.kind}, {row.dtype}", lines)

    @property
    def _each(self) -> str:
        return " in each microbatch" if self.plan.mesh.num_microbatches > 1 else ""

    @property
    def _lifetimes(self) -> Mapping[str, str]:
        mesh = self.plan.mesh
        return {lifetime_name(zero, mesh): lifetime_words(zero, mesh) for zero in ZEROS}

    def _compute(self, row: ModuleRow) -> str:
        count = self.plan.mesh.num_microbatches
        parts = f" a step, {seconds(row.compute_s / count)} in each of {count} microbatches" if count > 1 else ""
        recomputed = ", made again in backward" if row.again else ""
        return f"{seconds(row.compute_s)}{parts}{recomputed}" if row.compute_s else ""

    def _table(self) -> Paragraph:
        rows = [
            (f.name, f.row.kind, shape(f.row.shape), *f.row.layouts, f.row.lifetime or "made again" * f.row.again,
             seconds(f.row.compute_s), seconds(sum(step.seconds for step in f.row.steps)), size(f.row.stored_bytes))
            for f in self.found
        ]  # fmt: skip
        columns = ("name", "kind", "shape", *self.plan.mesh.names, "", ">compute", ">comm.", ">stored")
        count = self.plan.mesh.num_microbatches
        lines = [f"of a step, all {count} microbatches together"] if count > 1 else []
        return Paragraph(f"{self.name}: {len(rows)} operators and parameters", lines, columns, rows)


def find(tree: Module, name: str) -> list[MatchedRow]:
    """Return the rows with a dotted name from the model's root, or from any module; of a module, all rows in it.

    Raises:
        PlanError: there is nothing of this name.
    """
    dotted = name.partition("/")[0].replace(":", ".")  # names in timelines: `mlp.up:linear/combine`
    for module, at, shown_in in _walk(tree):
        if matches := list(_named(module, dotted, at, shown_in)):
            exact = [f for f in matches if ":" in name and f.row.name == dotted.rpartition(".")[2]]
            return exact or matches
    known = [f.name for f in _inside(tree, "", "")]
    near = get_close_matches(name, known, 3) or [n for n in known if n.endswith(f".{name.rpartition('.')[2]}")][:3]
    raise PlanError(
        f"--find {name}: the plan has no parameter, operator or module of this name; "
        + (f"there is {', '.join(dict.fromkeys(near))}" if near else "`explain --depth 99` lists the modules")
    )


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _walk(module: Module, at: str = "", shown_in: str = "") -> Iterator[tuple[Module, str, str]]:
    yield module, at, shown_in
    for child in module.children:
        yield from _walk(child, _join(at, child.members[0]), _join(shown_in, child.label))


def _inside(module: Module, at: str, shown_in: str) -> Iterator[MatchedRow]:
    yield from (MatchedRow(_join(at, row.name), row, shown_in) for row in module.rows)
    for child in module.children:
        yield from _inside(child, _join(at, child.members[0]), _join(shown_in, child.label))


def _named(module: Module, rest: str, at: str, shown_in: str) -> Iterator[MatchedRow]:
    """Yield the rows called `rest` below this module; without a number, all rows of that name."""
    yield from (
        MatchedRow(_join(at, row.name), row, shown_in)
        for row in module.rows
        if rest in (row.name, row.name.partition("#")[0])
    )
    for child in module.children:
        for member in child.members:
            inside = (child, _join(at, member), _join(shown_in, child.label))
            if rest == member:
                yield from _inside(*inside)
            elif rest.startswith(f"{member}."):
                yield from _named(child, rest.removeprefix(f"{member}."), *inside[1:])
