"""Measured steps laid over the prediction: by kind of operator and of communication, by block, and one by one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, cast

from shardwright.cost.timeline.tasks import COMPUTE
from shardwright.pcg.errors import PlanError
from shardwright.pcg.files import read_whole, write_whole
from shardwright.reports.facts import PlanFacts
from shardwright.reports.report import Paragraph, Report
from shardwright.reports.units import percent, plural, seconds
from shardwright.reports.wording import provenance
from shardwright.search.plan import Plan

OPTIMIZER, PARAMETERS, ELSEWHERE = "optimizer", "parameters and gradients", "between operators"
"""The names of measured parts outside operators: the update, messages for weights and gradients, and the rest."""
SENT = "communication: "
FORMAT, VERSION = "shardwright-profile", 1
_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Profile:
    """The measurements of a plan. Saved as JSON.

    fingerprint      of the plan's model, and its `mesh`: so that it is compared with no other plan
    step_s           the median of steps that were not profiled
    profiled_step_s  the mean of profiled steps: a profiler slows small operators down
    parts            (block, place, direction, seconds of a step), the mean of all ranks. A place may be several that
                     run as one, with spaces between
    """

    model: str
    fingerprint: str
    mesh: str
    device: str
    torch: str
    num_ranks: int
    num_steps: int
    step_s: float
    profiled_step_s: float
    parts: tuple[tuple[str, str, str, float], ...]

    def save(self, path: Path) -> None:
        """Write the profile; an existing file is replaced only once the new one is complete."""
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_whole(path, json.dumps(data, indent=1) + "\n", "the profile", PlanError)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile. Raises `PlanError` for any other file."""
        content = read_whole(path, "the profile", PlanError)
        try:
            data = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path}: not a complete JSON file ({error}); profile the plan again") from error
        return cls.from_json(data, str(path))

    @classmethod
    def from_json(cls, data: object, source: str) -> Profile:
        """Return the profile that a file's data hold; raise `PlanError` if they hold none."""
        if not isinstance(data, dict) or [data.get(key) for key in ("format", "version")] != [FORMAT, VERSION]:
            raise PlanError(f"{source}: this is not a profile; expected what `shardwright profile` writes")
        given: dict[str, Any] = data
        values: dict[str, Any] = {field.name: given.get(field.name) for field in fields(cls)}
        if wrong := next((f.name for f in fields(cls) if not _is_a(str(f.type), values[f.name])), None):
            raise PlanError(f"{source}: field {wrong!r} is not as it should be; profile again")
        values["parts"] = tuple((*part,) for part in values["parts"])
        return cls(**values)

    def check(self, plan: Plan) -> None:
        """Raise `PlanError` if the profile is of another plan."""
        if (self.fingerprint, self.mesh) != (plan.fingerprint, str(plan.mesh)):
            raise PlanError(
                f"the profile is of {self.model} on mesh {self.mesh} (graph {self.fingerprint}), the plan of "
                f"{plan.model} on mesh {plan.mesh} (graph {plan.fingerprint}); profile this plan"
            )


def _is_a(kind: str, value: object) -> bool:
    """Return whether a value of a file is of a field's type. Numbers must be finite, and not negative."""
    match value:
        case bool():
            return False
        case int() | float():
            return kind in ("float", type(value).__name__) and 0 <= value < inf
        case str():
            return kind == "str"
        case list():
            return kind.startswith("tuple") and all(map(_is_part, cast(list[object], value)))
        case _:
            return False


def _is_part(part: object) -> bool:
    match part:
        case [str(), str(), str(), taken_s]:
            return _is_a("float", taken_s)
        case _:
            return False


class Both(NamedTuple):
    """Seconds of a step, measured and predicted."""

    name: str
    measured_s: float
    predicted_s: float

    @property
    def off_s(self) -> float:
        return self.measured_s - self.predicted_s

    @property
    def ratio(self) -> str:
        """Measured over predicted seconds."""
        return f"{self.measured_s / self.predicted_s:.2f}" if self.predicted_s > 0 else "–"


class ProfileReport(Report):
    """Measured and predicted seconds, the largest difference first. With stages, seconds are their mean."""

    def __init__(self, facts: PlanFacts, profile: Profile) -> None:
        profile.check(facts.plan)
        self.facts, self.profile = facts, profile

    @cached_property
    def _predicted(self) -> dict[tuple[str, str], float]:
        """Predicted seconds by block and place; messages for parameters, and the update, are places too."""
        by_place, stages = defaultdict[tuple[str, str], float](float), self.facts.timeline.stages
        for stage in stages:
            for placed in stage.placed:
                for task in placed.timeline.segment.tasks_in_all():
                    block, label = self.facts.names.of(task.name)
                    place = label.split(" ")[0]
                    if place != OPTIMIZER and task.stream != COMPUTE and "/" not in place:
                        place = PARAMETERS
                    if task.seconds > 0:
                        by_place[block, place] += task.seconds / len(stages)
        return by_place

    @cached_property
    def _one_by_one(self) -> list[tuple[str, Both]]:
        """Both seconds by block and fused group; `Both.name` is the place predicted to take most."""
        predicted, measured = dict(self._predicted), defaultdict[tuple[str, str], float](float)
        for block, place, _, taken_s in self.profile.parts:
            measured[block, place] += taken_s
        rows = list[tuple[str, Both]]()
        for (block, places), taken_s in measured.items():
            candidates = (
                [places] if places in (PARAMETERS, ELSEWHERE) else [p.removeprefix(":") for p in places.split(" ")]
            )
            main = max(candidates, key=lambda place: predicted.get((block, place), 0.0))
            told_s = sum(predicted.pop((block, place), 0.0) for place in candidates)
            rows.append((block, Both(main, taken_s, told_s)))
        return rows + [(block, Both(place, 0.0, told_s)) for (block, place), told_s in predicted.items()]

    @cached_property
    def kinds(self) -> list[Both]:
        """Both seconds by kind of operator and of communication."""
        return _summed((kind_of(both.name), both) for _, both in self._one_by_one)

    @cached_property
    def blocks(self) -> list[Both]:
        """Both seconds by block. Messages for parameters are measured for all blocks together, and left out."""
        return _summed((block or "in no block", both) for block, both in self._one_by_one if both.name != PARAMETERS)

    @cached_property
    def places(self) -> list[Both]:
        """Both seconds by place in a block, equal blocks together."""
        return _summed((both.name, both) for _, both in self._one_by_one)

    @property
    def step(self) -> Both:
        """Both seconds of the whole step without a profiler."""
        return Both("step", self.profile.step_s, self.facts.prediction.step_s)

    def paragraphs(self) -> list[Paragraph]:
        profile, whole = self.profile, self.step
        took = f"{seconds(whole.measured_s)} at the median of steps without a profiler"
        lines = [
            f"step      measured {took}, predicted {seconds(whole.predicted_s)}: {whole.ratio}",
            (
                f"profiled  {plural(profile.num_steps, 'step')} of {seconds(profile.profiled_step_s)} on "
                f"{profile.num_ranks} ranks ({profile.device}, torch {profile.torch}), "
                f"{percent(self.covered)} of it by name"
            ),
            f"rests on  {provenance(self.facts.plan.cluster)}",
            (
                "Seconds are the mean of all ranks in the profiled steps, forward and backward together; what is sent "
                "includes the wait for others, and may lie beside compute. The most off comes first."
            ),
        ]
        title = f"{profile.model} on mesh {profile.mesh}: measured against predicted"
        return [
            Paragraph(title, lines),
            _table("By kind", "kind", self.kinds),
            _table("By block", "block", self.blocks),
            _table("One by one, equal blocks together", "operator", self.places),
        ]

    @property
    def covered(self) -> float:
        """The share of the profiled steps that is measured under some name."""
        named_s = sum(taken_s for _, place, _, taken_s in self.profile.parts if place != ELSEWHERE)
        return min(1.0, named_s / max(self.profile.profiled_step_s, 1e-12))

    def data(self) -> dict[str, Any]:
        profile = self.profile
        tables = {"kinds": self.kinds, "blocks": self.blocks, "places": self.places}
        return {
            "model": profile.model,
            "mesh": profile.mesh,
            "device": profile.device,
            "torch": profile.torch,
            "num_ranks": profile.num_ranks,
            "num_steps": profile.num_steps,
            "profiled_step_s": profile.profiled_step_s,
            "covered": self.covered,
            "step": self.step._asdict(),
            **{name: [both._asdict() for both in rows] for name, rows in tables.items()},
        }


def kind_of(place: str) -> str:
    """Return a place's kind: `attn.c_attn:matmul#2` → `matmul`, `mlp.up:linear/reduce` → `communication: reduce`."""
    if place == PARAMETERS:
        return SENT + place
    first, slash, move = place.rpartition(":")[2].partition("/")
    kind = move.partition("#")[0] if slash else first.partition("#")[0].removeprefix("constant_")
    return SENT + kind if slash else kind


def _summed(rows: Iterable[tuple[str, Both]]) -> list[Both]:
    total: Mapping[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, both in rows:
        total[name][0] += both.measured_s
        total[name][1] += both.predicted_s
    summed = [Both(name, *sides) for name, sides in total.items()]
    return sorted(summed, key=lambda both: -abs(both.off_s))


def _table(title: str, what: str, rows: Sequence[Both]) -> Paragraph:
    shown = [
        (both.name, seconds(both.measured_s), seconds(both.predicted_s), both.ratio, _signed(both.off_s))
        for both in rows[:_MOST_SHOWN]
    ]
    rest = rows[_MOST_SHOWN:]
    off_s = sum(abs(both.off_s) for both in rest)
    notes = [f"and {len(rest)} more, off by {seconds(off_s)} together"] if rest else []
    return Paragraph(title, [], (what, ">measured", ">predicted", ">ratio", ">off"), shown, notes)


def _signed(value_s: float) -> str:
    return ("+" if value_s >= 0 else "−") + seconds(abs(value_s))
