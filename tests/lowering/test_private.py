from __future__ import annotations

import re
from pathlib import Path

import shardwright.lowering
from tests.each import each

FILES = sorted(Path(shardwright.lowering.__file__).parent.rglob("*.py"))
PRIVATE = re.compile(r"\btorch(\.\w+)*\._\w|from torch(\.\w+)*\._\w|from torch[\w.]* import (.*, )?_\w")


@each("path", FILES, ids=lambda path: path.name)
def test_private_names_of_torch_are_used_in_these_files_only(path: Path) -> None:
    found = PRIVATE.search(path.read_text())
    assert (found is not None) == (path.name in ("private.py", "private_dtensors.py", "private_kernels.py")), found


@each("path", FILES, ids=lambda path: path.name)
def test_files_fit_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 300
