"""`python -m shardwright`, and the command `shardwright`."""

from __future__ import annotations

from shardwright.cli.main import main

if __name__ == "__main__":
    main()
