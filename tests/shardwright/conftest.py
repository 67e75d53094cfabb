"""The command line in this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwright import workers
from shardwright.cli.main import main
from shardwright.cli.status import FINDING
from shardwright.cli.torchrun import Start
from shardwright.pcg.errors import DistributedError
from tests.forked import ForkedWorker
from tests.shardwright.command import MODELS, Run, launch


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked, where it is not their start that is tested: it takes seconds to load all anew."""
    forking = SimpleNamespace(Popen=ForkedWorker, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(workers, "subprocess", forking)


@pytest.fixture
def fresh_workers(forked_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are processes of their own, as for users."""
    monkeypatch.setattr(workers, "subprocess", subprocess)


@pytest.fixture
def run(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_workers: None
) -> Run:
    """Runs commands with one worker, in a folder that holds `models.py`."""
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "num_cpus", lambda: 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("SHARDWRIGHT_DEBUG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        out, err = capfd.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, out, err

    return run


@pytest.fixture
def forked_launch() -> Callable[..., int]:
    """Starts the ranks of a command by forks, where it is not torchrun that is tested: loading all takes seconds."""

    def forked(command: Sequence[str], start: Start, *, quiet: bool = False) -> int:
        try:
            return launch(command, start.worlds[-1], quiet=quiet)
        except DistributedError as error:
            if "SystemExit" not in str(error):  # nor has a rank said why it ended
                sys.stderr.write(f"{error}\n")
            return FINDING

    return forked


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, forked_launch: Callable[..., int]) -> None:
    """Ranks of a command are forked."""
    monkeypatch.setattr("shardwright.cli.run.launch", forked_launch)
