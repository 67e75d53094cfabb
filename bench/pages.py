"""Run what the pages of the documentation show, as a reader would: `python -m bench.pages`, or `make site-check`.

A page is read from top to bottom, in a folder of its own:

* a block after a line that ends with a name, as "Save this as `train.py`:" does, is a file;
* a `console` block has commands, each after a `$`, with what they print. A line `...` stands for any lines, and at the
  end of a line for its rest;
* a `python` block is run, and a `text` block right after it is what it prints;
* a block after `<!-- slow -->` is run by this command alone, and not by the test suite; a block after
  `<!-- not run: why -->` by neither. The test suite checks that what they name exists.

Numbers on a page may be others than those that came out: `--write` puts these in their place. Anything else that
differs is an error.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(
        DOCS / f"{name}.md"
        for name in ("start", "reading-a-plan", "concepts", "limits", "comparison", "troubleshooting")
    ),
    *sorted(DOCS.glob("tutorials/*.md")),
]
COLUMNS = "100"
"""How wide a terminal is on the pages."""

Execute = Callable[[Sequence[str]], tuple[int, str]]
"""Runs a command; its exit status and what it printed, or told on stderr where it printed nothing."""

_BLOCK = re.compile(
    r"^(?P<head>(?:<!-- (?P<mark>[^\n]+) -->\n)?```(?P<kind>\w+)\n)(?P<body>.*?)(?P<tail>^```$)", re.M | re.S
)
_COMMAND = re.compile(r"^\$ (?P<line>(?:.*\\\n)*.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.M)
_NUMBER = re.compile(r"[\d.,]*\d(?: (?:[µm]?s|[kMGT]?B|%)(?!\w))?")


def read(text: str, execute: Execute, *, everything: bool) -> str:
    """The page with what really came out, in the current folder; with `everything`, slow commands are run too."""
    names: dict[str, object] = {"__name__": "page"}
    printed = ""

    def come_out(block: re.Match[str]) -> str:
        nonlocal printed
        mark, kind, body = block["mark"] or "", block["kind"], block["body"]
        file = re.search(r"`([\w./-]+)`:\n+\Z", text[: block.start()])
        if file:
            Path(file[1]).write_text(body, encoding="utf-8")
        elif mark.startswith("not run") or (mark and not everything):
            pass
        elif kind == "console":
            body = _COMMAND.sub(lambda found: _command(found, execute), body)
        elif kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(body, "page", "exec"), names)
            printed = out.getvalue()
        elif kind == "text" and printed:
            body, printed = aligned(body, printed), ""
        return block["head"] + body + block["tail"]

    return _BLOCK.sub(come_out, text)


def commands(text: str) -> list[list[str]]:
    """All commands of a page, run or not."""
    sessions = [block["body"] for block in _BLOCK.finditer(text) if block["kind"] == "console"]
    return [_words(found["line"]) for body in sessions for found in _COMMAND.finditer(body)]


def _command(found: re.Match[str], execute: Execute) -> str:
    status, printed = execute(_words(found["line"]))
    if status and not re.search("^(error|FAILED)|DOES NOT FIT", found["shown"], re.MULTILINE):
        raise click.ClickException(f"$ {found['line']}\nended with status {status}:\n{printed}")
    return f"$ {found['line']}\n" + (aligned(found["shown"], printed) if found["shown"] else "")


def _words(line: str) -> list[str]:
    return shlex.split(line.replace("\\\n", " "), comments=True)


def aligned(shown: str, printed: str) -> str:
    """Return the printed text, abridged as `shown` is. Raise an error if they differ in more than numbers."""
    lines, told, skipping = iter(printed.splitlines()), list[str](), False
    for line in shown.splitlines():
        if line.strip() == "...":
            told.append(line)
            skipping = True
            continue
        tried = (_as_shown(line, found) for found in lines)
        found = next((as_shown for as_shown in tried if as_shown is not None or not skipping), None)
        if found is None:
            raise click.ClickException(f"the page shows\n{line}\nwhere this was printed:\n{printed}")
        told.append(found)
        skipping = False
    rest = list(lines)
    if rest and not skipping:
        raise click.ClickException("the page does not show\n" + "\n".join(rest))
    return "\n".join(told) + "\n"


def _as_shown(line: str, found: str) -> str | None:
    """`found` as much of it as is shown, or None where it is something else: numbers and spaces may differ."""
    start, dots, _ = line.partition("...") if line.endswith("...") else (line, "", "")
    ends = range(len(found), 0, -1) if dots else [len(found)]
    cut = next((found[:end] for end in ends if _masked(found[:end]) == _masked(start)), None)
    return None if cut is None else cut.rstrip() + " " * start.endswith(" ") + dots


def _masked(text: str) -> str:
    return " ".join(_NUMBER.sub("#", text).split())


# ---- as a reader would ----


def run(words: Sequence[str], *, installed: bool = False) -> tuple[int, str]:
    """Run a command in a process of its own, by this checkout or as it is `installed`."""
    modules = {"shardwright": "shardwright", "torchrun": "torch.distributed.run"}
    program = [sys.executable, "-m", modules[words[0]]] if words[0] in modules else [words[0]]
    path = os.pathsep.join(filter(None, ["" if installed else str(ROOT), os.environ.get("PYTHONPATH", "")]))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {
        "PATH": programs,
        "PYTHONPATH": path,
        "COLUMNS": COLUMNS,
        "XDG_CACHE_HOME": str(Path("cache").resolve()),
        "NO_COLOR": "1",
    }
    start = time.perf_counter()
    done = subprocess.run(
        [*program, *words[1:]], env={**os.environ, **own}, capture_output=True, text=True, check=False
    )
    click.echo(f"  {time.perf_counter() - start:5.0f} s  {shlex.join(words)}")
    return done.returncode, done.stdout or done.stderr


@click.command(help=__doc__)
@click.argument("pages", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--write", is_flag=True, help="Put the numbers that came out into the pages.")
@click.option("--installed", is_flag=True, help="Run the Shardwright that is installed, not this checkout.")
def main(pages: Sequence[Path], write: bool, installed: bool) -> None:
    for page in [page.resolve() for page in pages] or PAGES:
        click.echo(page.relative_to(ROOT))
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            found = read(text, partial(run, installed=installed), everything=True)
        if write:
            page.write_text(found, encoding="utf-8")
        elif found != text:
            click.echo("  other numbers came out; see them with --write")


if __name__ == "__main__":
    main()
