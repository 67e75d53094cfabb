"""The accuracy that the README states is that of the pages it names; where a page is written anew, so is its row."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
README, ACCURACY, LOCAL = (
    (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/accuracy.md", "docs/local.md")
)
(ROW,) = re.findall(r"^\| accuracy of costs \|.*$", README, re.MULTILINE)


def test_gpus() -> None:
    for name, told in (("own", "{} to {} % too fast at the median"), ("2023", "they are off by {} to {} %")):
        (line,) = re.findall(rf"^\| {name} \|.*$", ACCURACY, re.MULTILINE)
        medians = [round(float(median)) for median in re.findall(r"([\d.]+) / [\d.]+", line)]
        assert len(medians) == 3
        assert told.format(min(medians), max(medians)) in ROW


def test_ranks_of_this_machine() -> None:
    one, two = LOCAL.split("\n## ")[1:]
    pattern = r"Median error, .*: ([\d.]+)% of a step alone; ([\d.]+)% as calibrated .* \(([\d.]+)% of CPU time\)"
    medians = [[tuple(round(float(x)) for x in found) for found in re.findall(pattern, part)] for part in (one, two)]
    errors = [_column(part, 3) for part in (one, two)]
    (of_one, _), (searched, every) = medians
    one_spans, two_spans = (f"from {min(part):+d} % to {max(part):+d} %" for part in errors)
    assert f"on one rank, {of_one[0]} % at the median, {one_spans}" in ROW
    assert f"on two, {searched[0]} % for searched plans and {every[0]} % for all, {two_spans}" in ROW
    between = f"{of_one[1]} % on one rank, and on two {searched[1]} % for searched plans and {every[1]} % for all"
    span = f"from {min(_column(two, 8)):+d} % to {max(_column(two, 8)):+d} %"
    (halves,) = {f"{median(_column(part, 5)):.0f}" for part in (one, two)}
    assert f"calibrated between the steps, {between}, {span}, in a run whose halves disagree by {halves} %" in ROW
    memory = max(abs(int(error)) for error in re.findall(r"([+-]\d+)% \|$", LOCAL, re.MULTILINE))
    assert f"memory is within {memory} % everywhere" in ROW


def _column(part: str, number: int) -> list[int]:
    """Per cent in the table's rows, by how many columns come before."""
    return [int(cell) for cell in re.findall(rf"^\|(?:[^|]*\|){{{number}}} ([+-]?\d+)% \|", part, re.MULTILINE)]
