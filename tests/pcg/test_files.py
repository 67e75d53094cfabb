"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.pcg.errors import PlanError
from shardwright.pcg.files import write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    for text in ("one", "two"):
        write_whole(path, text, "the plan", PlanError, make_folder=True)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_is_told_and_the_old_file_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\udc80", "the plan", PlanError)
    assert path.read_text() == "old"
    with pytest.raises(PlanError, match=r"no/plan.json: cannot write the plan: No such file or directory; choose a "):
        write_whole(tmp_path / "no" / "plan.json", "", "the plan", PlanError)
    with pytest.raises(PlanError, match="cannot write the plan"):
        write_whole(path / "inside.json", "", "the plan", PlanError, make_folder=True)
