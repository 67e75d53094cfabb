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
    for name, told in (("own", "{} to {} % too fast at the median"), ("2023", "they are off by {} to {} %")):
        (line,) = re.findall(rf"^\| {name} \|.*$", ACCURACY, re.MULTILINE)
        medians = [round(float(median)) for median in re.findall(r"([\d.]+) / [\d.]+", line)]
        assert len(medians) == 3
        assert told.format(min(medians), max(medians)) in ROW


def test_ranks_of_this_machine() -> None:
    one, two = LOCAL.split("\n## ")[1:]
    pattern = (
        r"Median error, .*: ([\d.]+)% of a step's time \(([\d.]+)% of CPU time; ([\d.]+)% as calibrated before and "
    )
    medians = [[tuple(round(float(x)) for x in found) for found in re.findall(pattern, part)] for part in (one, two)]
    errors = [
        [int(error) for error in re.findall(r"^\|(?:[^|]*\|){6} ([+-]\d+)% \|", part, re.MULTILINE)]
        for part in (one, two)
    ]
    (alone, _), (searched, every) = medians
    of_one, of_two = (f"from {min(part):+d} % to {max(part):+d} %" for part in errors)
    assert f"{alone[0]} % at the median, {of_one}" in ROW
    assert f"{searched[0]} % for searched plans ({searched[1]} % of CPU time) and {every[0]} % for all, {of_two}" in ROW
    outside = f"{alone[2]} % on one rank, {searched[2]} % for searched plans and {every[2]} % for all on two"
    assert f"by calibrations minutes before and after, {outside}" in ROW
    memory = max(abs(int(error)) for error in re.findall(r"([+-]\d+)% \|$", LOCAL, re.MULTILINE))
    assert f"memory is within {memory} % everywhere" in ROW
