"""The sweep: what it runs, how it goes on, and the page."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.accuracy import Errors, prepare
from bench.plans import Case
from bench.sweep import Cell, Outcome, Sweep, kinds, load, run_cells, sweep
from bench.sweep_page import page, spearman, times_autocast, wrong_pairs
from bench.ways import every, first, ways
from shardwright.pcg.errors import DistributedError
from shardwright.pcg.mesh import Mesh
from shardwright.search.request.restrict import DATA
from tests.each import each, in_whole_grids

MODEL, RANKS = "mlp", 2


@each("num_ranks", [2, 4, 8])
def test_ways_are_many_and_have_names_of_their_own(num_ranks: int) -> None:
    found = list(ways(MODEL, num_ranks))
    assert len({case.name for case in found}) == len(found)
    assert {case.num_ranks for case in found} == {num_ranks}
    assert all(case.mesh is None or case.mesh.num_devices == num_ranks for case in found)
    assert Counter(case.kind for case in first(num_ranks)) == {"fp64": 6, "fp32": 6, "amp_bf16": 6}


def test_the_first_ways_behind_those_have_everything() -> None:
    cases = list(ways(MODEL, 4))[len(list(first(4))) :][:18]
    parts = {part for case in cases for part in case.name.split(", ")}
    assert parts >= {part for case in every(4) for part in case.name.split(", ")} - {"zero × sequence"}


def test_every_second_way_may_be_in_fp32() -> None:
    found = [case for case in ways(MODEL, 2, ("fp64", "fp32")) if case not in set(first(2))]
    assert [case.kind for case in found[3:7]] == ["fp64", "fp32"] * 2
    assert len({case.name for case in found}) == len(found)
    assert {case.kind for case in ways(MODEL, 2, ("fp32",))} == {"fp32", "amp_bf16"}


# ---- running ----


def known(way: str, verdict: str = "equal", note: str = "") -> Outcome:
    return Outcome(MODEL, RANKS, way, "fp64", verdict, note=note)


def test_a_sweep_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    found = list(sweep([MODEL], [RANKS], path, lambda: False, num_plans=1))
    assert [o.verdict for o in found] == ["equal"]
    assert load(path) == found
    assert all(o.errors and abs(o.memory_error) < 0.1 for o in found)
    assert list(sweep([MODEL], [RANKS], path, lambda: False, num_plans=1)) == []
    assert list(sweep([MODEL], [RANKS], path, lambda: True, num_plans=2)) == []
    (more,) = sweep([MODEL], [RANKS], path, lambda: False, num_plans=2)
    assert more.way not in {o.way for o in found}


@each(
    ("model", "num_ranks", "way"),
    [
        ("mixtral", 2, "zero, zero-1, 4 microbatches, full, fp32"),  # gradients are added up before they are sent
        ("bert", 4, "sequence, 1 microbatches, selective"),  # keys and values are gathered again
    ],
)
@in_whole_grids
def test_memory_is_as_predicted(
    model: str, num_ranks: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.sweep.NUM_STEPS", 1)
    one = Sweep(model, num_ranks, tmp_path / "sweep.jsonl")
    case = next(case for case in ways(model, num_ranks, one.kinds) if case.name == way)
    cell = one._plan(one._prepared(case.kind), case)
    assert isinstance(cell, Cell)
    (found,) = run_cells([cell], tmp_path / "sweep.jsonl")
    assert found.verdict == "equal"
    assert abs(found.memory_error) < 0.06


def test_a_cell_that_fails_is_an_outcome_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Sweep(MODEL, RANKS, tmp_path / "sweep.jsonl", num_plans=3)
    cells = [cell for cell in one._planned() if isinstance(cell, Cell)]

    def measured(cell: Cell, forked: dict[int, int], _: float) -> tuple[Errors, int]:
        if cell.case.name == cells[1].case.name:
            raise DistributedError("broken")
        return Errors(0.0, 0.0, "", 0.0, "", same_random_state=cell is not cells[2]), 1

    monkeypatch.setattr("bench.sweep._measured", measured)
    monkeypatch.setattr(one, "_planned", lambda: iter(cells))
    found = list(one.run())
    assert [o.verdict for o in found] == ["equal", "failed", "differs"]
    assert "broken" in found[1].note
    assert load(one.path) == found


def test_a_model_that_cannot_be_cut_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = [Case(f"data, {many}", RANKS, Mesh.of(mb=many, dp=RANKS), (DATA,)) for many in (2, 4)]
    monkeypatch.setattr("bench.sweep.prepare", lambda model, **_: prepare(model))
    monkeypatch.setattr("bench.sweep.ways", lambda *_, **__: iter(cut))
    one = Sweep("resnext", RANKS, tmp_path / "sweep.jsonl", num_plans=3)
    assert one.kinds == ("fp64", "fp32")
    assert kinds("mixtral") == ("fp32",)
    assert kinds("mlp") == ("fp64",)
    refused = [o for o in one._planned() if isinstance(o, Outcome)]
    assert [o.verdict for o in refused] == ["refused"]
    assert "cannot be cut into" in refused[0].note
    assert not one.is_cut


# ---- the page ----


def outcome(way: str, predicted: int = 100, measured: int = 100, **changes: Any) -> Outcome:
    errors = {"loss": 1e-16, "losses": 2e-16, "gradient": 3e-16, "weight": 4e-16, "drift": 5e-16, "whole": 6e-16}
    made = Outcome(MODEL, RANKS, way, "fp64", "equal", "[x=2]", errors, None, predicted, measured)
    return replace(made, **changes)


def test_the_page_has_a_line_per_model_and_ranks_and_what_is_wrong() -> None:
    rounded = {"whole": 4e-16, "drift": 5e-16}
    text = page(
        [
            outcome("a", 100, 100),
            outcome("b", 230, 200),
            outcome("c", 150, 300, num_ranks=4, verdict="differs"),
            outcome("d", kind="amp_bf16", rounding=rounded, measured_bytes=0),
            known("e", "refused", "because | so"),
            known("f", "failed", "broken"),
        ],
        30, 10, 4,
    )  # fmt: skip
    assert "| mlp | 2 | 4 | 2e-16 | 3e-16 | 4e-16 |  |  |  | 1.50 | 7.5% | 15.0% | 1 | " in text
    assert "| mlp | 4 | 1 | 2e-16 | 3e-16 | 4e-16 |  |  |  |  | 50.0% | 50.0% | 1 |  | 0 of 0 | **1 wrong** |" in text
    assert "* mlp, 2 ranks, f : failed: broken" in text
    assert "* mlp, 2 ranks, b: +15.0%" in text
    assert r"* mlp, 1 ways: because \| so" in text
    assert "So far fewer have run on 2 ranks: mlp 4, gpt 0, " in text


def test_ranks_of_memory() -> None:
    right = [outcome("a", 1, 10), outcome("b", 2, 20), outcome("c", 3, 30)]
    assert (spearman(right), wrong_pairs(right)) == (pytest.approx(1.0), (0, 3))
    wrong = [outcome("a", 3, 10), outcome("b", 2, 20), outcome("c", 1, 30)]
    assert (spearman(wrong), wrong_pairs(wrong)) == (pytest.approx(-1.0), (3, 3))
    near = [outcome("a", 3, 100), outcome("b", 2, 102)]
    assert wrong_pairs(near) == (0, 0)


def test_how_far_autocast_is() -> None:
    rounding = {"whole": 3e-16, "drift": 5e-16}
    assert times_autocast(outcome("a", rounding=rounding)) == pytest.approx(2.0)


# ---- cases of less memory, and of other lifetimes ----


def test_a_case_has_part_of_the_memory_that_its_plan_would_take() -> None:
    graph = prepare(MODEL).captured.graph
    free = Case("searched", RANKS).plan(graph, MODEL)
    tight = Case("searched", RANKS, share=0.6).plan(graph, MODEL)
    assert tight.prediction.memory.total_bytes <= 0.6 * free.prediction.memory.total_bytes
    data = Case("data", RANKS, Mesh.of(dp=RANKS), (DATA,)).plan(graph, MODEL)
    assert data.prediction.memory.total_bytes > tight.prediction.memory.total_bytes
