"""The stage matrix: a cell of each kind is equal, and one that differs, fails or cannot be planned is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.accuracy import prepare
from bench.stage_matrix import MODELS, SCHEDULES, Cell, Refused, at_random, grid, main, run
from examples import zoo
from tests.each import in_whole_grids


@pytest.fixture(autouse=True)
def own_depth(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that was prepared in another depth is used, or left."""
    monkeypatch.setattr(zoo, "LAYERS", 4)
    prepare.cache_clear()
    yield
    prepare.cache_clear()


@pytest.mark.slow
def test_a_random_cell_is_equal_and_one_of_another_model_is_not() -> None:
    cell = at_random(5)
    assert isinstance(cell, Cell)
    ((_, good),) = run([cell])
    assert not isinstance(good, str)
    assert cell.prepared.accepts(good)
    weights = {name: w + 1e-6 for name, w in cell.prepared.reference.weights.items()}
    other = replace(cell.prepared, reference=replace(cell.prepared.reference, weights=weights))
    ((_, bad),) = run([replace(cell, prepared=other)])
    assert not isinstance(bad, str)
    assert not other.accepts(bad)
    ((_, text),) = run([replace(cell, execution=cell.execution.having(split=(1, 1)))])
    assert isinstance(text, str)
    assert "add up to" in text


def test_a_model_that_is_too_shallow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "LAYERS", 1)
    found = next(cell for cell in grid(["gpt"], [8]) if isinstance(cell, Refused))
    assert "split" in found.why


@in_whole_grids
@pytest.mark.slow
def test_the_command_says_what_has_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--models", MODELS[0], "--ranks", "2", "--every", str(len(SCHEDULES) + 1)]) == 0
    assert "4 equal" in capfd.readouterr().out
