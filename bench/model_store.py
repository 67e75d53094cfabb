"""The stored results of `bench.models`: for each model in each way a line of JSON, with all that the page says.

The file is tracked, so that a part of the table can be run again and the page written without the hours of the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.pcg.errors import ShardwrightError
from shardwright.pcg.files import write_whole

if TYPE_CHECKING:
    from bench.sweep import Outcome

STORE = Path(__file__).parent / "data" / "models.jsonl"
NOTE = 400
"""Of what was said, so many characters are kept."""
SPLIT_WAYS = ("data", "fast links")
"""The ways of which the page says why operators are not split."""


@dataclass(frozen=True)
class Judged:
    """A model in one way, against one process.

    Attributes:
        kind: in what numbers.
        verdict: "equal", "differs", "failed", "refused", or "slow" where no plan was found in time.
        day: on which it ran, as in "2026-11-29".
        error: the largest of loss, gradients, buffers and how far the weights came.
        note: what was said where it does not run, or what differs.
        split: the share of predicted compute that is split along all axes.
        unsplit: operator, reason, how many, share of compute; of `SPLIT_WAYS`.
        foreign: part, reason, share of the step; of "data".
    """

    model: str
    way: str
    kind: str
    verdict: str
    day: str
    error: float | None = None
    note: str = ""
    split: float | None = None
    unsplit: Sequence[tuple[str, str, int, float]] = ()
    foreign: Sequence[tuple[str, str, float]] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.way

    @property
    def has_run(self) -> bool:
        return self.verdict in ("equal", "differs", "failed")

    @property
    def is_bad(self) -> bool:
        return self.verdict in ("differs", "failed")


def judged(outcome: Outcome) -> Judged:
    """Return the stored result of a cell of the sweep."""
    facts, errors = outcome.facts or {}, outcome.errors
    return Judged(
        outcome.model, outcome.way, outcome.kind, outcome.verdict, date.today().isoformat(),
        error=float(f"{_largest(errors):.0e}") if errors else None,
        note=_said(errors) if errors and outcome.verdict == "differs" else outcome.note[:NOTE],
        split=facts.get("split"),
        unsplit=_rows(facts, "unsplit") if outcome.way in SPLIT_WAYS else (),
        foreign=_rows(facts, "foreign") if outcome.way == "data" else (),
    )  # fmt: skip


def _rows(facts: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401
    return tuple(map(tuple, facts.get(name, ())))


def _largest(errors: Mapping[str, Any]) -> float:
    return max(errors[name] for name in ("loss", "gradient", "buffer", "drift"))


def _said(errors: Mapping[str, Any]) -> str:
    state = "" if errors["same_random_state"] else ", another state of the generator"
    return (
        f"gradient {errors['gradient']:.0e} at `{errors['gradient_name']}`; all gradients {errors['whole']:.0e}, "
        f"loss {errors['loss']:.0e}, buffers {errors['buffer']:.0e}, weights {errors['drift']:.0e} of how far they came"
        f"{state}"
    )


def load(path: Path = STORE) -> dict[tuple[str, str], Judged]:
    """Everything that is kept, by model and way: the newest."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {found.key: found for found in map(_judged, map(json.loads, lines))}


def _judged(line: dict[str, Any]) -> Judged:
    return Judged(**{**line, "unsplit": _rows(line, "unsplit"), "foreign": _rows(line, "foreign")})


def append(path: Path, found: Judged) -> None:
    """Add a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(found))


def tidy(path: Path, models: Sequence[str], ways: Sequence[str]) -> None:
    """Leave only the newest line of each cell that is in the table, in the table's order."""
    found = load(path)
    ordered = (found[key] for key in ((model, way) for model in models for way in ways) if key in found)
    write_whole(path, "".join(map(_line, ordered)), "what models did", ShardwrightError)


def _line(found: Judged) -> str:
    """Return a line of JSON without the fields that have their defaults."""
    defaults = {f.name: f.default for f in fields(Judged)}
    return json.dumps({name: value for name, value in asdict(found).items() if value != defaults[name]}) + "\n"
