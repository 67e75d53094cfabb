"""What a calibration measures, and the points that it has measured so far, as data in files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.cost.calibration.probes import CPU_SIZES, Sizes

CHAINS = (4, 44)  # parameters of the chains whose steps tell what a parameter takes, and a step
OVERHEADS = "shardwright.overheads"
POINTS, WORKLOAD = "points.jsonl", "workload.json"


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured. Sizes of collectives are of the full tensor of a group, as `Communication` counts them.

    `overheads` names the module with the lowering's `runtime` and `chain_step`: ranks import it, costs do not.
    """

    num_ranks: int
    num_threads: int
    timeout_s: float
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32",)
    sizes: Sizes = CPU_SIZES
    collective_bytes: tuple[int, ...] = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**25)
    seconds_per_point: float = 0.03
    overheads: str = OVERHEADS

    @property
    def group_sizes(self) -> list[int]:
        """Sizes of groups to measure collectives on: every divisor of the number of ranks but 1."""
        return [size for size in range(2, self.num_ranks + 1) if self.num_ranks % size == 0]


class Point(NamedTuple):
    """One measured time. `spread`: how much longer the upper quartile of the repeats is than the lower, as a share."""

    key: str
    seconds: float
    spread: float
    samples: int


def read_workload(text: str) -> Workload:
    """The workload that `asdict` and JSON made text of."""
    data: dict[str, Any] = _with_tuples(json.loads(text))
    data["sizes"] = Sizes(**data["sizes"])
    return Workload(**data)


def _with_tuples(value: Any) -> Any:  # noqa: ANN401  JSON
    if isinstance(value, dict):
        return {name: _with_tuples(entry) for name, entry in value.items()}
    return tuple(_with_tuples(entry) for entry in value) if isinstance(value, list) else value


def write_workload(workload: Workload) -> str:
    """The workload as JSON."""
    return json.dumps(asdict(workload))


def read_points(path: Path) -> dict[str, Point]:
    """The points of a file by their keys. A line that was cut off as it was written is left out."""
    found: dict[str, Point] = {}
    if not path.exists():
        return found
    names = set(Point._fields)
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(data, dict) and set(data) == names and data["seconds"] > 0:
            found[data["key"]] = Point(**data)
    return found
