"""Writes the page: the description of a plan, the style and the script, in one HTML file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright import __version__
from shardwright.pcg.errors import PlanError
from shardwright.pcg.files import write_whole
from shardwright.reports.shown import Shown

if TYPE_CHECKING:
    from shardwright.reports.answer import Answer
    from shardwright.search.plan import Plan

_SCRIPTS = ("helpers", "charts", "course", "trace", "timeline", "memory", "modules", "parameters", "page")


def page(plan: Plan | Shown, profile: Mapping[str, Any] | None = None, answers: Sequence[Answer] = ()) -> str:
    """Return the whole page as text. It loads nothing: no scripts, fonts or images from elsewhere.

    `profile`: measurements, as in `ProfileReport.data`; `answers`: to questions about this plan.
    """
    drawn = (plan if isinstance(plan, Shown) else Shown.of_plan(plan)).drawn
    paragraphs = [asdict(paragraph) for answer in answers for paragraph in answer.paragraphs]
    facts = {**drawn, "profile": profile, "answers": paragraphs, "version": __version__}
    data = json.dumps(facts, separators=(",", ":"), ensure_ascii=False)
    parts = {
        "title": html.escape(f"{drawn['model']} on {drawn['cluster']['name']}"),
        "style": _asset("page.css"),
        "script": "\n".join(_asset(f"{name}.js") for name in _SCRIPTS),
        "data": data.replace("<", "\\u003c"),  # so that no text in a plan can end the script element
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def write_page(
    plan: Plan | Shown, target: Path, profile: Mapping[str, Any] | None = None, answers: Sequence[Answer] = ()
) -> None:
    """Write the page of a plan; an existing file is replaced only once the new one is complete."""
    write_whole(target, page(plan, profile, answers), "the page", PlanError)


def _asset(name: str) -> str:
    return files("shardwright.view").joinpath(name).read_text(encoding="utf-8")
