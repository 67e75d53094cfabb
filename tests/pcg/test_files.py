"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.pcg.errors import PlanError
from shardwright.pcg.files import cache_folder, read_whole, require_writable, write_whole


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
    for folder in (tmp_path, Path(), Path("/")):
        for write in (lambda path: write_whole(path, "", "the plan", PlanError), _require):
            with pytest.raises(PlanError, match="cannot write the plan"):
                write(folder)
    assert [*tmp_path.iterdir()] == [path]


def _require(path: Path) -> None:
    require_writable(path, "the plan", PlanError)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found there and nothing can be written, as in any other folder that is not to be used."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert cache_folder({"XDG_CACHE_HOME": "/own"}) == Path("/own/shardwright")
    file = cache_folder({}) / "plan.json"
    assert not file.exists()
    with pytest.raises(PlanError, match="cannot read the plan: Not a directory"):
        read_whole(file, "the plan", PlanError)
    with pytest.raises(PlanError, match="cannot write the plan"):
        write_whole(file, "", "the plan", PlanError, make_folder=True)
