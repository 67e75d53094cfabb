"""Stored results of the grid and of the plans that it judges: a line of JSON each, the newest by kind and case."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.files import write_whole
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.step.lifetimes import Zero
from shardwright.pcg.step.recompute import Recompute

KEPT = Path(__file__).parent / "data" / "grid.jsonl"
Kind = Literal["grid", "plan"]


@dataclass(frozen=True)
class Key:
    """The key of a result: the best of the grid or the searched plan, of a model, on a cluster."""

    kind: Kind
    model: str
    cluster: str

    @property
    def of_grid(self) -> Key:
        """Return the key of the grid's result by which a plan is judged."""
        return replace(self, kind="grid")


@dataclass(frozen=True)
class Cell:
    """A way of the grid: `mesh` by axes, with that of time; roles of the others."""

    mesh: Mapping[str, int]
    roles: Sequence[str]
    zero: Zero
    recompute: Recompute

    @property
    def words(self) -> str:
        again = [] if self.recompute == "none" else [f"{self.recompute} recomputation"]
        return ", ".join([f"{Mesh.of(**self.mesh)} {' × '.join(self.roles)}", self.zero, *again])


@dataclass(frozen=True)
class Found:
    """A way to run a model.

    way                    in words
    step_s                 by the timeline; None: nothing fits
    cpu_s                  seconds of CPU time that it took to find it
    cell                   of the grid: which it is
    num_ways, num_costed   of the grid: all, and those that the timeline costed
    grid_s                 of a plan: what the best way of the grid took under the costs that it was planned with
    mesh, recompute        of a plan, by axes, with that of time; and what is made again, "by block" if it differs
    bound_gap              of a plan: what it takes above the bound that it reports, relative to that
    """

    way: str
    step_s: float | None
    cpu_s: float
    cell: Cell | None = None
    num_ways: int = 0
    num_costed: int = 0
    grid_s: float | None = None
    mesh: Mapping[str, int] | None = None
    recompute: str = ""
    bound_gap: float | None = None


def kept(path: Path = KEPT) -> dict[Key, Found]:
    """Everything that is kept, by case."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return dict(map(_parsed, map(json.loads, lines)))


def _parsed(row: Mapping[str, dict[str, Any]]) -> tuple[Key, Found]:
    found = dict(row["found"])
    if cell := found["cell"]:
        found["cell"] = Cell(cell["mesh"], tuple(cell["roles"]), cell["zero"], cell["recompute"])
    return Key(**row["key"]), Found(**found)


def write(results: Mapping[Key, Found], path: Path = KEPT) -> None:
    """Sorted by case, so that a new result changes a line."""
    rows = [{"key": asdict(key), "found": asdict(found)} for key, found in results.items()]
    rows.sort(key=lambda row: (row["key"]["model"], row["key"]["cluster"], row["key"]["kind"]))
    write_whole(
        path,
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        "the grid's results",
        ShardwrightError,
    )
