"""The grid: what it enumerates, that leaving ways out changes nothing, what is kept of it and how it is shown."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from bench import grid_page
from bench.grid import SETUPS, Grid, grid, plan, solve, step_s, ways
from bench.grid_page import GRID, TIME_NEEDED, TITLE, WITHIN, chart, page, replace_section, rows
from bench.grid_store import Cell, Found, Key, kept, write
from shardwright.search.exact.folding import Folded
from shardwright.search.exact.solving import Solver
from shardwright.search.request.restrict import DATA, TENSOR, ZERO
from shardwright.verifier.choices import Certified
from tests.each import each
from tests.search.graphs import blocks, cluster, every_choice

CELL = Cell({"mb": 2, "x": 4, "y": 2}, (ZERO, TENSOR), "zero-1", "full")


def test_the_grid_has_every_way_once() -> None:
    found = list(ways(8, 8))
    assert len(set(found)) == len(found)
    assert {way.roles for way in found} == set(SETUPS)
    assert {way.roles for way in ways(16, 16)} == {roles for roles in SETUPS if roles != (TENSOR,)}
    assert all(way.mesh.num_devices == 8 for way in found)
    flat = [way for way in found if way.roles == (TENSOR,)]
    assert [way.mesh.num_microbatches for way in flat] == 3 * [8, 4, 2, 1]  # for each kind of recomputation
    crossed = [way.mesh for way in found if way.roles == (DATA, TENSOR) and way.mesh.sizes[-2:] == (4, 2)]
    assert [mesh.num_microbatches for mesh in crossed] == 3 * [2, 1]
    lifetimes = {way.mesh.num_microbatches: len(way.zeros) for way in found if way.roles == (ZERO, TENSOR)}
    assert lifetimes == {4: 4, 2: 4, 1: 2}
    assert all(way.zeros == ("zero-3",) for way in flat)


def test_leaving_ways_out_changes_nothing() -> None:
    """On two devices, whatever memory there is, the best way is that of all; and most were not costed."""
    graph, solver = blocks(8, 16, layers=4, seq=8), Solver(cluster(2), every_choice)
    searched = Grid(Folded(graph), solver)
    everything = [
        solve(searched.folded, solver, way, zero)
        for way in ways(2, 8) if way.recompute != "selective" for zero in way.zeros
    ]  # fmt: skip
    needs = sorted(c.prediction.memory.total_bytes for c in everything)
    for limit in (needs[-1], needs[len(needs) // 2], needs[0] // 4):
        solver.limit_bytes = limit
        searched = Grid(searched.folded, solver)
        fitting = [c.prediction.step_s for c in everything if c.prediction.memory.total_bytes <= limit]
        best = searched.run()
        assert (None if best is None else best.prediction.step_s) == min(fitting, default=None)
        assert searched.num_costed < len(everything) < searched.num_ways  # that has no attention to make again


def test_a_way_and_a_plan_are_costed_again() -> None:
    graph, two = blocks(8, 16, layers=4, seq=8), cluster(2)
    cell = Cell({"x": 2}, (DATA,), "zero-3", "none")
    best = grid(graph, two)
    assert best.cell is not None
    assert best.step_s == pytest.approx(step_s(Folded(graph), Solver(two, Certified()), best.cell))
    found = plan(graph, two, cell)
    grid_s = step_s(Folded(graph), Solver(two, Certified()), cell)
    assert found.grid_s == pytest.approx(grid_s)
    assert found.step_s is not None
    assert found.step_s <= grid_s
    assert found.way.startswith("[x=2]")
    assert plan(graph, cluster(2, memory_bytes=1), None).way == "nothing fits"


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    assert kept(path) == {}
    grid, own = Key("grid", "GPT", "1 × box"), Key("plan", "GPT", "1 × box")
    results = {own: Found("[x=8], zero-1", 1.0, 2.0, grid_s=3.0), grid: Found(CELL.words, 3.0, 4.0, CELL, 100, 10)}
    write(results, path)
    assert kept(path) == results
    assert CELL.words == "[mb=2, x=4, y=2] zero × tensor, zero-1, full recomputation"


@each("plan_s, now, found_s, gap, is_stale", [
    (1.02, 1.0, 1.0, 0.02, False),
    (1.02, 1.01, 1.0, 1.02 / 1.01 - 1, True),
    (None, 1.0, 1.0, inf, False),
    (1.0, None, None, -1.0, False),
    (None, None, None, 0.0, False),
])  # fmt: skip
def test_gaps_are_of_the_costs_of_now(
    plan_s: float | None, now: float | None, found_s: float | None, gap: float, is_stale: bool
) -> None:
    grid, own = Key("grid", "GPT", "1 × box"), Key("plan", "GPT", "1 × box")
    results = {grid: Found("its way", found_s, 4.0, CELL, 100, 10), own: Found("a way", plan_s, 2.0, grid_s=now)}
    (row,) = rows(results)
    assert abs(row.gap - gap) < 1e-12 or row.gap == gap
    assert row.is_stale == is_stale
    text = page([row], 0.03)
    assert (grid_page.STALE in text) == is_stale
    assert f"slower than the best of the grid in {int(gap <= 0.03)}, and" in text
    assert "| GPT | 1 × box |" in text


@each("mesh, recompute, differs", [
    ({"mb": 2, "dp": 4, "tp": 2}, "full", "layouts"),
    ({"x": 4, "y": 2}, "full", "microbatches"),
    ({"mb": 2, "x": 8}, "by block", "mesh, recomputation"),
    (None, "", ""),
])  # fmt: skip
def test_the_page_says_in_what_a_plan_differs(mesh: dict[str, int] | None, recompute: str, differs: str) -> None:
    grid, own = Key("grid", "T5", "1 × box"), Key("plan", "T5", "1 × box")
    made = Found("a way", 0.9, 2.0, grid_s=1.0, mesh=mesh, recompute=recompute, bound_gap=0.04)
    (row,) = rows({grid: Found("its way", 1.0, 4.0, CELL, 100, 10), own: made})
    assert row.differs == differs
    text = page([row], 0.03)
    assert f"| -10.0% | {differs} | 4.0% |" in text
    assert ">T5<" in chart([row])
    words = " ".join(text.split())
    assert "at the median 10.0% faster (10.0% for mixtures" in words
    assert "above their bounds by 4.0% at the median" in words


def test_sections_are_replaced_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "search.md"
    monkeypatch.setattr(grid_page, "PAGE", path)
    replace_section(TIME_NEEDED, f"{TIME_NEEDED}\n\nSeconds.\n")
    replace_section(GRID, f"{GRID}\n\nOld.\n")
    replace_section(WITHIN, f"{WITHIN}\n\nGaps.\n")
    replace_section(GRID, f"{GRID}\n\nNew.\n")
    assert path.read_text() == f"{TITLE}\n{GRID}\n\nNew.\n\n{WITHIN}\n\nGaps.\n\n{TIME_NEEDED}\n\nSeconds.\n"


def test_a_grid_without_its_plan_is_not_shown() -> None:
    assert rows({Key("grid", "GPT", "1 × box"): Found("its way", 1.0, 4.0, CELL)}) == []
