"""Reports on a plan file in the cache folder: the facts of a large plan take seconds to compute.

The name of a cached file is a digest of the plan file's bytes and of this Shardwright's source. So it never belongs to
another plan or version, and the folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.pcg.errors import PlanError, ShardwrightError
from shardwright.pcg.files import cache_folder, read_whole, write_whole
from shardwright.reports.report import Paragraph, Report

if TYPE_CHECKING:
    from shardwright.reports.facts import PlanFacts
    from shardwright.search.plan import Plan

MOST_KEPT = 64
"""The most plans in the cache; the oldest are deleted first."""


@dataclass(frozen=True)
class Shown(Report):
    """The contents of `explain` and of the page for a plan.

    shown     paragraphs of a `PlanReport`
    modules   the paragraph of modules with one level shown, with two, and so on to all
    facts     `PlanReport.data()`
    timeline  the page's data of the simulated step
    outdated  a message if the file's prediction differs from the present one of its plan, or ""
    unfit     a message if the plan does not fit, with remedies, or ""
    """

    shown: Sequence[Paragraph]
    modules: Sequence[Paragraph]
    facts: Mapping[str, Any]
    timeline: Mapping[str, Any]
    outdated: str
    unfit: str

    @classmethod
    def of(cls, facts: PlanFacts) -> Shown:
        """Compute the contents from a plan's facts."""
        from shardwright.reports.course import course_data
        from shardwright.reports.facts import fits
        from shardwright.reports.plan import PlanReport
        from shardwright.reports.wording import infeasible, outdated

        plan, report = facts.plan, PlanReport(facts.plan, facts=facts)
        levels = range(1, 1 + max(depth for depth, _, _ in report.tree.walk()))
        return cls(
            report.paragraphs(),
            [report.modules(depth) for depth in levels],
            report.data(),
            course_data(facts),
            outdated(plan.prediction, facts.prediction),
            "" if fits(plan) else infeasible(plan),
        )

    @classmethod
    def of_plan(cls, plan: Plan) -> Shown:
        """Compute the contents from a plan without known facts."""
        from shardwright.reports.facts import PlanFacts

        return cls.of(PlanFacts(plan))

    @classmethod
    def load(cls, plan_file: Path) -> Shown:
        """Return a plan file's contents, from the cache or computed. Raises `PlanError` as `Plan.load` does."""
        content = read_whole(plan_file, "the plan", PlanError)  # once: the file may be replaced in the meantime
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return cls._read(json.loads(_place(content).read_text(encoding="utf-8")))
        from shardwright.search.plan import Plan

        shown = cls.of_plan(Plan.from_bytes(content, str(plan_file)))
        shown.keep(content)
        return shown

    @classmethod
    def _read(cls, record: Mapping[str, Any]) -> Shown:
        shown, modules = ([Paragraph(**paragraph) for paragraph in record[name]] for name in ("shown", "modules"))
        return cls(shown, modules, record["facts"], record["timeline"], record["outdated"], record["unfit"])

    def keep(self, content: bytes) -> None:
        """Store the contents for later readers of the same plan file. A folder that cannot be written is no error.

        Nothing is stored if a user has added rows of operators, since another reader of the file does not have them.
        """
        from shardwright.pcg.optable import ROWS, shipped

        if shipped() != ROWS:
            return
        with suppress(OSError, ShardwrightError):
            place = _place(content)
            write_whole(place, json.dumps(asdict(self)), "what is shown", PlanError, make_folder=True)
            others = sorted(place.parent.iterdir(), key=lambda file: file.stat().st_mtime)
            for file in others[:-MOST_KEPT]:
                file.unlink(missing_ok=True)

    def at(self, depth: int | None) -> Shown:
        """Return the contents with `depth` levels of modules; None: as many as fit a page."""
        if depth is None or not self.modules:
            return self
        modules = self.modules[min(depth, len(self.modules)) - 1]
        shown = [modules if paragraph.title == modules.title else paragraph for paragraph in self.shown]
        return Shown(shown, self.modules, self.facts, self.timeline, self.outdated, self.unfit)

    @property
    def of_memory(self) -> Shown:
        """The contents about memory alone."""
        shown = [paragraph for paragraph in self.shown if "memory" in paragraph.title.lower()]
        names = ("model", "mesh", "fits", "memory", "unfit", "usable_bytes", "limit_bytes", "peak")
        predicted = {name: self.facts["prediction"][name] for name in ("memory", "peak_at", "device_bytes")}
        facts = {**{name: self.facts[name] for name in names}, "prediction": predicted}
        return replace(self, shown=shown, modules=(), facts=facts)

    def paragraphs(self) -> Sequence[Paragraph]:
        return self.shown

    def data(self) -> Mapping[str, Any]:
        return self.facts

    @property
    def drawn(self) -> Mapping[str, Any]:
        """The data of the page."""
        return {**self.facts, "timeline": self.timeline}


def _place(content: bytes) -> Path:
    digest = hashlib.sha256(_source() + content).hexdigest()
    return cache_folder() / "shown" / f"{digest[:32]}.json"


@lru_cache(maxsize=1)
def _source() -> bytes:
    """Return a digest of the source of reports."""
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(Path(__file__).parents[1], followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".json", ".jsonl")):
                digest.update(name.encode() + b"\0" + Path(folder, name).read_bytes())
    return digest.digest()
