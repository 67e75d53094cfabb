"""The accuracy that the README states is that of the pages it names; where a page is written anew, so is its row."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, ACCURACY, LOCAL = (
    (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/accuracy.md", "docs/local.md")
)
(ROW,) = re.findall(r"^\| accuracy of costs \|.*$", README, re.MULTILINE)


def test_gpus() -> None:
    (line,) = re.findall(r"^\| own \|.*$", ACCURACY, re.MULTILINE)
    medians = [round(float(median)) for median in re.findall(r"([\d.]+) / [\d.]+", line)]
    assert len(medians) == 3
    assert f"GPUs {min(medians)} to {max(medians)} % too fast at the median" in ROW


def test_ranks_of_this_machine() -> None:
    """The worst of one rank and two, searched plans and all."""
    parts = LOCAL.split("\n## ")[1:]
    medians = [float(x) for part in parts for x in re.findall(r"Median error, .*: ([\d.]+)% of a step alone", part)]
    errors = [error for part in parts for error in _column(part, 3)]
    assert len(medians) == 4
    spans = f"from {min(errors):+d} % to {max(errors):+d} %"
    assert f"this CPU within {round(max(medians))} % at the median, {spans}" in ROW
    memory = max(abs(int(error)) for error in re.findall(r"([+-]\d+)% \|$", LOCAL, re.MULTILINE))
    assert f"memory within {memory} %" in ROW


def _column(part: str, number: int) -> list[int]:
    """Per cent in the table's rows, by how many columns come before."""
    return [int(cell) for cell in re.findall(rf"^\|(?:[^|]*\|){{{number}}} ([+-]?\d+)% \|", part, re.MULTILINE)]
