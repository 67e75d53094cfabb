"""The demo of a smaller model, with fewer steps and without its first part, which tests/cost/calibration runs."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwright.cost.clusters.local import default_cluster
from tests.forked import Forked, run_as_main
from tests.shardwright.command import launch

ROOT = Path(__file__).resolve().parent.parent.parent
SMALLER = {"n_embd=384": "n_embd=96", "n_layer=6": "n_layer=2", "SEQ = 128": "SEQ = 32"}
"""What is replaced in `demo_model.py`."""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Trained(Forked):
    """What the demo starts: a single process, or torchrun; that ranks start by torchrun is tested with the commands."""

    def run(self, command: Sequence[str]) -> None:
        if command[0] != "-m":
            run_as_main(command)
            return
        assert list(command[: len(TORCHRUN)]) == TORCHRUN
        launch(command[len(TORCHRUN) :], 2)


@pytest.mark.slow
def test_the_demo_shows_that_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.json"
    default_cluster(2).save(cluster)
    for name in ("demo.py", "demo_model.py", "demo_train.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    text = (tmp_path / "demo_model.py").read_text()
    for large, small in SMALLER.items():
        assert text.count(large) == 1, large
        text = text.replace(large, small)
    (tmp_path / "demo_model.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", Trained)
    options = ["--steps", "2", "--cluster", str(cluster), "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "demo.py"), *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    said = capfd.readouterr()
    del sys.modules["demo_model"]
    assert ended.value.code == 0, said.err
    for part in ("What each axis does", "data parallel", "ZeRO-3", "relative difference", "predicted", "PASSED"):
        assert part in said.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json", "plan.html", "program.py"}
    assert "def forward(" in (tmp_path / "out" / "program.py").read_text()
