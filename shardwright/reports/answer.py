"""Answers to `explain --why-not` or `--what-if` in files, for the page to show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardwright.pcg.errors import PlanError
from shardwright.pcg.files import read_whole, write_whole
from shardwright.reports.report import Paragraph, Report
from shardwright.search.plan import Plan

FORMAT, VERSION = "shardwright-answer", 1


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer about a plan, which it names by its model's `fingerprint`, its `mesh` and its predicted step."""

    model: str
    fingerprint: str
    mesh: str
    step_s: float
    paragraphs: tuple[Paragraph, ...]

    @classmethod
    def of(cls, report: Report, plan: Plan) -> Answer:
        """Return a report about a plan as an answer."""
        step_s = plan.prediction.step_s
        return cls(plan.model, plan.fingerprint, str(plan.mesh), step_s, tuple(report.paragraphs()))

    def save(self, path: Path) -> None:
        """Write the answer; an existing file is replaced only once the new one is complete."""
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_whole(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n", "the answer", PlanError)

    @classmethod
    def load(cls, path: Path) -> Answer:
        """Read an answer. Raises `PlanError` for any other file."""
        try:
            given = json.loads(read_whole(path, "the answer", PlanError).decode("utf-8"))
            if [given.pop(key) for key in ("format", "version")] != [FORMAT, VERSION]:
                raise ValueError("another format or version")
            values = {field.name: given[field.name] for field in fields(cls)}
            values["paragraphs"] = tuple(_paragraph(one) for one in values["paragraphs"])
            values["step_s"] = float(values["step_s"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanError(
                f"{path}: this is not an answer that `shardwright explain --why-not … -o FILE` wrote "
                f"({type(error).__name__}: {error}); ask again"
            ) from error
        return cls(**values)

    def check(self, shown: Mapping[str, Any]) -> None:
        """Raise `PlanError` if the answer is about another plan than the data of `PlanReport`."""
        identity = self.fingerprint, self.mesh, self.step_s
        if identity != (shown["fingerprint"], shown["mesh"], shown["prediction"]["step_s"]):
            raise PlanError(
                f"the answer is about a plan of {self.model} on mesh {self.mesh} with a step of {self.step_s:.4g} s, "
                f"the plan is of {shown['model']} on mesh {shown['mesh']} with {shown['prediction']['step_s']:.4g} s; "
                "ask about this plan"
            )


def _paragraph(record: Mapping[str, Any]) -> Paragraph:
    """Return a paragraph of a file; raise an error unless it has texts, and rows as long as its columns."""
    paragraph = Paragraph(**record)
    texts = (
        paragraph.title,
        *paragraph.lines,
        *paragraph.columns,
        *paragraph.notes,
        *(cell for row in paragraph.rows for cell in row),
    )
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("what should be text is not")
    if any(len(row) != len(paragraph.columns) for row in paragraph.rows):
        raise ValueError("a row is not as long as the table has columns")
    return paragraph
