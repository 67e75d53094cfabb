"""Every snippet of the documentation runs and prints what the page shows; what is slow, at least exists."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import click
import pytest
from torch.distributed.run import parse_args

from bench.pages import COLUMNS, PAGES, aligned, commands, read
from shardwright import workers
from shardwright.cli.main import cli, main
from shardwright.pcg.aten import HANDLERS
from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.optable import ROWS
from tests.shardwright.command import launch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a page's files lie; what they add to this process, modules and operators, is gone in the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", COLUMNS)
    monkeypatch.setattr(workers, "num_cpus", lambda: 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # defaults of `local:2` are those of the pages
    monkeypatch.setattr("shardwright.cli.run.launch", lambda command, start: launch(command, start.per_node))
    monkeypatch.setattr(sys, "path", [*sys.path])  # models are found where they lie
    with patch.dict(ROWS), patch.dict(HANDLERS):
        yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_what_comes_out(page: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def execute(words: Sequence[str]) -> tuple[int, str]:
        if words[0] == "torchrun":
            options = parse_args(list(words[1:]))
            launch([options.training_script, *options.training_script_args], int(options.nproc_per_node))
            return 0, capfd.readouterr().out
        assert words[0] == "shardwright"
        with pytest.raises(SystemExit) as stopped:
            main(words[1:])
        assert isinstance(stopped.value.code, int)
        out, err = capfd.readouterr()
        return stopped.value.code, out or err

    text = page.read_text(encoding="utf-8")
    assert read(text, execute, everything=False) == text
    for words in commands(text):
        check(words)


def check(words: Sequence[str]) -> None:
    """A command and its options exist; the files that it names lie in the current folder, if they are to be read."""
    while words[0] in ("srun", "sbatch") or "=" in words[0]:
        words = words[1:]
    if words[0] == "torchrun":
        assert Path(parse_args(list(words[1:])).training_script).exists()
    elif words[0] == "shardwright":
        command, path, rest = cli, "shardwright", list(words[1:])
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            path = f"{path} {rest[0]}"
            command = command.commands[rest.pop(0)]
        with contextlib.suppress(ShardwrightError):  # a value that is wrong on purpose
            command.make_context(path, rest, click.Context(cli, **cli.context_settings))


def test_what_a_page_shows_is_held_against_what_is_printed() -> None:
    printed = "step 1  loss 4.71\nstep 2  loss 4.01  12 ms\nmedian 1.2 s\n"
    shown = "step 1  loss 4.71\n...\nmedian 1.2 s\n"
    assert aligned(shown, printed) == shown
    assert aligned(shown.replace("1.2 s", "900 ms"), printed) == shown  # numbers are those that came out
    assert aligned("step 1 ...\n...\n", printed) == "step 1 ...\n...\n"
    assert aligned("a\n\nb\n", "a\n\nb\n") == "a\n\nb\n"
    for wrong in ("step 1  loss 4.71\n", "\n" + printed, shown.replace("median", "mean"), shown.replace("...\n", "")):
        with pytest.raises(click.ClickException):
            aligned(wrong, printed)
