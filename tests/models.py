"""The models that many tests run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from examples.zoo import ZOO
from tests.each import WHOLE_GRIDS


def zoo(*names: str) -> list[Any]:
    """The models of the zoo, or these, as cases of `parametrize`. Each has one worker, which prepares it once."""
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names or ZOO]


def grid(cases: Sequence[Any], each: int, *, names: Sequence[str] = ()) -> list[Any]:
    """Cells (name, case) of the grid of models and cases, for `parametrize`: so many of the cases for each model.

    The next model takes the cases that follow, so that every case has its models.
    """
    cells = list[Any]()
    for number, name in enumerate(names or ZOO):
        taken = range(len(cases)) if WHOLE_GRIDS else sorted((number * each + i) % len(cases) for i in range(each))
        for case in (cases[i] for i in taken):
            cells.append(pytest.param(name, case, id=f"{name}-{case}", marks=pytest.mark.xdist_group(name)))
    found = {str(cell.values[1]) for cell in cells}
    assert found == {str(case) for case in cases}, "more cases than all models take together"
    return cells
