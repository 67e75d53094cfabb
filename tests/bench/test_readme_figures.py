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
    pattern = r"Median error, .*: ([\d.]+)% of a step's time \(([\d.]+)% of CPU time\)"
    medians = [
        [(round(float(wall)), round(float(cpu))) for wall, cpu in re.findall(pattern, part)] for part in (one, two)
    ]
    errors = [
        [int(error) for error in re.findall(r"^\|(?:[^|]*\|){4} ([+-]\d+)% \|", part, re.MULTILINE)]
        for part in (one, two)
    ]
    (alone, _), ((searched, searched_cpu), (every, every_cpu)) = medians
    assert f"{alone[0]} % off at the median, from {-min(errors[0])} % too fast to {max(errors[0])} % too slow" in ROW
    assert f"{searched} % for searched plans and {every} % for all, up to {-min(errors[1])} % too fast" in ROW
    assert f"of CPU time {searched_cpu} % and {every_cpu} %" in ROW
