"""`shardwright rules coverage` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.shardwright.command import MODELS, Run, write

OTHERS = """
def other():
    return Net(), {"x": torch.randn(8, 8)}

def _hidden():
    raise ValueError
"""
RULE = {
    "form": "equation", "name": "mine", "variables": {"x": "*b"}, "left": ["relu(relu(x))"], "right": ["relu(x)"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _models(run: Run) -> None:
    """More functions in `models.py`."""
    Path("models.py").write_text(MODELS + OTHERS)


def test_every_model_of_a_file_is_planned_for_every_cluster(run: Run) -> None:
    status, out, err = run("rules", "coverage", "--models", "models.py", "--cluster", "local:2", "--cluster", "local:4")
    assert status == 0
    assert [line.strip().partition(":")[0] for line in out.splitlines()[1:5]] == [
        "net on local-2 (2 devices)", "net on local-4 (4 devices)",
        "other on local-2 (2 devices)", "other on local-4 (4 devices)",
    ]  # fmt: skip
    assert "linear [a b, c b -> a c] by R" in out
    assert "coverage: planning net for local-2" in err


def test_a_rule_file_is_the_source_of_its_form(run: Run) -> None:
    status, out, _ = run("rules", "coverage", write(RULE), "--models", "models.py:net", "--format", "json")
    assert status == 0
    data = json.loads(out)
    assert data["forms"]["serial"] == {"loaded": 1, "matched": 0, "fired": 0, "on_demand": 0}
    assert {"form": "serial", "name": "mine", "loaded": True, "matched": 0, "fired": 0} in data["rules"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "nowhere.py"], "error: model 'nowhere.py': there is no file nowhere.py"),
        (["--models", "empty.py"], "empty.py': the file has no function that could return (model, batch)"),
        (["--models", "models.py:net", "--cluster", "local:x"], "local:N wants a number of ranks"),
        ([], "Missing option '--models'"),
    ],
)
def test_what_cannot_be_surveyed_is_said(run: Run, arguments: list[str], message: str) -> None:
    Path("empty.py").write_text("import torch\n")
    status, _, err = run("rules", "coverage", *arguments)
    assert status == 2
    assert message in err
