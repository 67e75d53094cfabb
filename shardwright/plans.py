"""Plans for several numbers of ranks: a folder with a file `RANKS.json` for each (`shardwright plan --for`)."""

from __future__ import annotations

from pathlib import Path

from shardwright.pcg.errors import PlanError


def file_for(folder: Path, num_ranks: int) -> Path:
    """Return the name of the plan for so many ranks in a folder."""
    return folder / f"{num_ranks}.json"


def sizes_of(folder: Path) -> list[int]:
    """Return the numbers of ranks that a folder has plans for, the fewest first; [] for a file."""
    return sorted(int(file.stem) for file in folder.glob("*.json") if file.stem.isdecimal())


def plan_file(path: Path, num_ranks: int) -> Path:
    """Return the plan file itself, or, of a folder of plans, the one for so many ranks.

    Raises `PlanError` where a folder has none.
    """
    if not path.is_dir():
        return path
    if (for_ranks := file_for(path, num_ranks)).is_file():
        return for_ranks
    sizes = ", ".join(map(str, sizes_of(path))) or "none"
    raise PlanError(
        f"{path}: there is no plan for {num_ranks} ranks, only for {sizes}; add one with `shardwright plan --for "
        f"{num_ranks} --output {path}`, or start as many ranks as one of them is for"
    )
