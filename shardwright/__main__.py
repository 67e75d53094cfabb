"""Entry point of `python -m shardwright` and of the command `shardwright`."""

from __future__ import annotations

from shardwright.cli.main import main

if __name__ == "__main__":
    main()
