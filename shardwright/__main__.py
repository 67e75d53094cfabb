"""Entry point of `python -m shardwright` and of the command `shardwright`: a process that runs one command and ends."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from shardwright.cli.main import main as command

_OBJECTS_BEFORE_A_COLLECTION = 1_000_000
"""Python's own 700 or 2,000 are for processes that run long; here, nearly all objects stay until the end."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit, as `cli.main.main`. Garbage is looked for rarely, and not at the end."""
    gc.set_threshold(_OBJECTS_BEFORE_A_COLLECTION)
    try:
        command(arguments)
    finally:
        gc.freeze()


if __name__ == "__main__":
    main()
