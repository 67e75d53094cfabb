"""docs/costs.md says what is so: its example of an execution runs, from the command line and from Python."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shardwright.cli.main import cli
from shardwright.pcg.mesh import Mesh
from shardwright.search.tree.planner import Planner
from tests.search.graphs import blocks, cluster, every_choice

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "costs.md").read_text(encoding="utf-8")


def test_a_pipeline_is_costed_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    graph = blocks(batch=8, width=64, layers=4, seq=8)
    plan = Planner(cluster(8), every_choice).plan(graph, mesh=Mesh.of(x=8), roles=("data",))
    plan.save("plan.json")
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(example, found)
    timeline, run = found["timeline"], found["run"]
    assert len(timeline.stages) == run.schedule.num_stages == 4
    (command,) = re.findall(r"^shardwright (timeline .*)$", PAGE, re.MULTILINE)
    told = CliRunner().invoke(cli, [*shlex.split(command), "--format", "json"], catch_exceptions=False)
    assert json.loads(told.stdout)["step_s"] == timeline.step_s > 0
