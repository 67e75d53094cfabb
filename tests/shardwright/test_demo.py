"""The demo of a smaller model, with fewer steps and without its first part, which tests/cost/calibration runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cost.clusters.local import default_cluster

ROOT = Path(__file__).resolve().parent.parent.parent
SMALLER = {"n_embd=384": "n_embd=96", "n_layer=6": "n_layer=2", "SEQ = 128": "SEQ = 32"}
"""What is replaced in `demo_model.py`."""


@pytest.mark.slow
def test_the_demo_shows_that_nothing_is_lost(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    cluster = tmp_path / "cluster.json"
    default_cluster(2).save(cluster)
    for name in ("demo.py", "demo_model.py", "demo_train.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    text = (tmp_path / "demo_model.py").read_text()
    for large, small in SMALLER.items():
        assert text.count(large) == 1, large
        text = text.replace(large, small)
    (tmp_path / "demo_model.py").write_text(text)
    demo = [sys.executable, str(tmp_path / "demo.py")]
    command = [*demo, "--steps", "2", "--cluster", str(cluster), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    for part in ("What each axis does", "data parallel", "ZeRO-3", "relative difference", "predicted", "PASSED"):
        assert part in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json", "plan.html", "program.py"}
    assert "def forward(" in (tmp_path / "out" / "program.py").read_text()
