"""Files that we write, whole or not at all, and the folder of those that belong to the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from errno import EISDIR
from pathlib import Path

from shardwright.pcg.errors import ShardwrightError


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder where this machine keeps measurements and proofs; it may be deleted at any time.

    For a user without a home, it is a place where no file can be.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        folder = Path(os.devnull)
    return folder / "shardwright"


def read_whole(path: Path, what: str, error: type[ShardwrightError]) -> bytes:
    """Return the content of a file. Raises `error`, which says that `what` cannot be read there, and why."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise error(f"{path}: cannot read {what}: {problem.strerror or problem}") from problem


def require_writable(path: Path, what: str, error: type[ShardwrightError], *, make_folder: bool = False) -> None:
    """Raise what `write_whole` would raise there; leave nothing behind but a folder that is made."""
    partial = _partial(path)
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(EISDIR, "Is a directory")
        partial.touch()
        partial.unlink()
    except OSError as problem:
        raise _unwritable(path, what, error, problem) from problem


def _partial(path: Path) -> Path:
    return path.parent / f".{path.name}.{os.getpid()}.partial"


def _unwritable(path: Path, what: str, error: type[ShardwrightError], problem: OSError) -> ShardwrightError:
    return error(f"{path}: cannot write {what}: {problem.strerror or problem}; choose a writable path")


def write_whole(path: Path, text: str, what: str, error: type[ShardwrightError], *, make_folder: bool = False) -> None:
    """Write a file; an existing one is replaced only once the new one is complete.

    Raises `error`, which says that `what` cannot be written there, and why.
    """
    partial, content = _partial(path), text.encode("utf-8")
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as problem:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise _unwritable(path, what, error, problem) from problem
