"""Writing files: whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EISDIR
from pathlib import Path

from shardwright.pcg.errors import ShardwrightError


def require_writable(path: Path, what: str, error: type[ShardwrightError]) -> None:
    """Raise what `write_whole` would raise there; nothing is left behind."""
    partial = _partial(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "Is a directory")
        partial.touch()
        partial.unlink()
    except OSError as problem:
        raise _unwritable(path, what, error, problem) from problem


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def _unwritable(path: Path, what: str, error: type[ShardwrightError], problem: OSError) -> ShardwrightError:
    return error(f"{path}: cannot write {what}: {problem.strerror or problem}; choose a writable path")


def write_whole(path: Path, text: str, what: str, error: type[ShardwrightError], *, make_folder: bool = False) -> None:
    """Write a file; one that exists is replaced only once the new one is complete.

    Raises `error`, which says that `what` cannot be written there, and why.
    """
    partial = _partial(path)
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as problem:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise _unwritable(path, what, error, problem) from problem
