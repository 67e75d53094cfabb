"""`examples/train.py` in small: killed and started again, it has the losses of a run that nothing disturbed."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from shardwright.cost.clusters.local import default_cluster
from shardwright.pcg.errors import DistributedError
from tests.shardwright.command import launch
from tests.shardwright.test_demo import ROOT, SMALLER

STEPS = 8
AFTER = "                step += 1\n"
KILL = "                step == {} and dist.get_rank() and __import__('signal').raise_signal({})\n"


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    default_cluster(2).save(tmp_path / "cluster.json")
    model, loop = ((ROOT / "examples" / name).read_text() for name in ("demo_model.py", "train.py"))
    for large, small in SMALLER.items():
        assert model.count(large) == 1, large
        model = model.replace(large, small)
    (tmp_path / "demo_model.py").write_text(model)
    shutil.copy(ROOT / "examples" / "train.py", tmp_path)
    assert loop.count(AFTER) == 1
    scripts = {"killed.py": KILL.format(5, int(signal.SIGKILL)), "ended.py": KILL.format(3, int(signal.SIGTERM))}
    for name, line in scripts.items():
        (tmp_path / name).write_text(loop.replace(AFTER, AFTER + line))

    def trained(script: str, folder: str) -> dict[int, str]:
        """The loss of each step, as it is shown."""
        command = [str(tmp_path / script), "--folder", str(tmp_path / folder), "--steps", str(STEPS)]
        command += ["--cluster", str(tmp_path / "cluster.json"), "--save-every", "2", "--evaluate-every", "4"]
        try:
            launch(command, 2)
        finally:
            shown.clear()
            shown.append(capfd.readouterr().out)
        return {int(step): loss for step, loss in re.findall(r"step (\d+)/\d+  loss (\S+)", shown[0])}

    shown = list[str]()
    expected = trained("train.py", "whole")
    assert list(expected) == list(range(1, STEPS + 1))
    assert re.search(r"tokens/s  MFU \d", shown[0])
    assert shown[0].count("loss on held-out text") == 2

    with pytest.raises(DistributedError, match="SystemExit: 75"):
        trained("ended.py", "again")
    with pytest.raises(DistributedError, match="rank 1"):
        trained("killed.py", "again")
    assert re.findall(r"step (\d)/", shown[0]) == ["4", "5"]
    again = trained("train.py", "again")
    assert again == {step: loss for step, loss in expected.items() if step > min(again) - 1}
    assert min(again) in (4, 5)  # what was written beside the steps after 4 may not have been whole yet
