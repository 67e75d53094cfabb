"""The README's first example splits something, what it lists is there, and its tables fit a screen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import shardwright as sw
from shardwright.reports.facts import PlanFacts

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_first_example_splits_something() -> None:
    """As it says: half of both weights on each rank, one by its outputs and one by its inputs."""
    (code, *_) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.partition("parallel = ")[0], names)
    plan = sw.plan(names["model"], names["cluster"], kwargs=names["batch"])
    facts = PlanFacts(plan)
    assert all(axis.share_of_compute["whole"] < 0.05 for axis in facts.axes)
    layouts = {str(n.attr("target")): str(plan.graph.types[n.name].layouts[0]) for n in plan.graph.leaves("parameter")}
    assert (layouts["up.weight"], layouts["down.weight"]) == ("S(0)", "S(1)")
    assert "parallel.forward_backward(**batch)" in code


def test_it_lists_every_page() -> None:
    there = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")} - {"docs/index.md"}
    assert there - {*re.findall(r"\((docs/[\w/-]+\.md)", README)} == set()


def test_what_it_is_takes_ten_lines() -> None:
    assert README.partition("\n```")[0].count("\n") <= 10


def test_what_works_fits_a_screen() -> None:
    """No cell is longer than two lines of 80 characters, and the rows are few."""
    (table,) = re.findall(r"^\| \| today \|\n\|---\|---\|\n((?:\|.*\n)+)", README, re.MULTILINE)
    rows = [[re.sub(r"\]\([^)]*\)", "]", cell).strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    assert len(rows) <= 12
    assert [cell for row in rows for cell in row if len(cell) > 160] == []
