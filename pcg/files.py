"""Writing files: whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shardwright.pcg.errors import ShardwrightError


def write_whole(path: Path, text: str, what: str, error: type[ShardwrightError], *, make_folder: bool = False) -> None:
    """Write a file; one that exists is replaced only once the new one is complete.

    Raises `error`, which says that `what` cannot be written there, and why.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as problem:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        reason = problem.strerror or problem
        raise error(f"{path}: cannot write {what}: {reason}; choose a writable path") from problem
