"""`shardwright rules coverage` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.cli.main import main

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def net():
    return Net(), {"x": torch.randn(4, 8)}

def other():
    return Net(), {"x": torch.randn(8, 8)}

def _hidden():
    raise ValueError
"""
RULE = {
    "form": "equation", "name": "mine", "variables": {"x": "*b"}, "left": ["relu(relu(x))"], "right": ["relu(x)"],
}  # fmt: skip


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["rules", "coverage", *arguments])
    out, err = capfd.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path / "models.py"


def test_every_model_of_a_file_is_planned_for_every_cluster(capfd: pytest.CaptureFixture[str], models: Path) -> None:
    status, out, err = run(capfd, "--models", str(models), "--cluster", "local:2", "--cluster", "local:4")
    assert status == 0
    assert [line.strip().partition(":")[0] for line in out.splitlines()[1:5]] == [
        "net on local-2 (2 devices)", "net on local-4 (4 devices)",
        "other on local-2 (2 devices)", "other on local-4 (4 devices)",
    ]  # fmt: skip
    assert "linear [a b, c b -> a c] by R" in out
    assert "coverage: planning net for local-2" in err


def test_a_rule_file_is_the_source_of_its_form(capfd: pytest.CaptureFixture[str], models: Path, tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"version": 1, "rules": [RULE]}))
    status, out, _ = run(capfd, str(file), "--models", f"{models}:net", "--format", "json")
    assert status == 0
    data = json.loads(out)
    assert data["forms"]["serial"] == {"loaded": 1, "matched": 0, "fired": 0, "on_demand": 0}
    assert {"form": "serial", "name": "mine", "loaded": True, "matched": 0, "fired": 0} in data["rules"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "nowhere.py"], "error: model 'nowhere.py': there is no file nowhere.py"),
        (["--models", "{folder}/empty.py"], "empty.py': the file has no function that could return (model, batch)"),
        (["--models", "{folder}/models.py:net", "--cluster", "local:x"], "local:N wants a number of ranks"),
        ([], "Missing option '--models'"),
    ],
)
def test_what_cannot_be_surveyed_is_said(
    capfd: pytest.CaptureFixture[str], models: Path, arguments: list[str], message: str
) -> None:
    (models.parent / "empty.py").write_text("import torch\n")
    status, _, err = run(capfd, *(a.format(folder=models.parent) for a in arguments))
    assert status == 2
    assert message in err
