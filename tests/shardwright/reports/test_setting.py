"""Text and tables in so many columns: nothing is cut off, nothing is too wide, every word is still there."""

from __future__ import annotations

import re

from shardwright.reports.report import Paragraph
from shardwright.reports.setting import table, wrapped
from tests.each import each

ROWS = (
    ("this plan", "[dp=2, tp=16]", "404 ms", "", "███████"),
    ("search on [x=2, y=16], full recomputation", "[x=2, y=16]", "1.48 s", "267 % slower", "██████████"),
    ("  data parallel", "[dp=32]", "12.0 µs", "", ""),
)
COLUMNS = ("plan", "mesh", ">step", "", "")
TEXT = Paragraph("Compared with other plans of this cluster", ["by the timeline, in which communication overlaps"],
                 COLUMNS, ROWS, ["and one more"])  # fmt: skip


def lines(width: int | None) -> list[str]:
    return [line for _, line in TEXT.set(width)]


def words(text: str) -> list[str]:
    return sorted(re.findall(r"[^\s█]+", text))


@each("width", range(24, 140))
def test_nothing_is_cut_off_or_too_wide(width: int) -> None:
    found = lines(width)
    assert max(map(len, found)) <= width
    texts = [cell for row in ROWS for cell in row] + [TEXT.title, *TEXT.lines, *TEXT.notes]
    missing = [word for text in texts for word in words(text) if word not in " ".join(found)]
    assert missing == []


def test_a_wide_terminal_has_the_table_as_it_is() -> None:
    assert lines(200) == lines(None) == str(TEXT).split("\n")
    assert "  plan                                       mesh              step" in lines(None)


def test_bars_go_first() -> None:
    natural = max(map(len, lines(None)))
    assert not any("█" in line for line in lines(natural - 1))
    assert [line.rstrip("█ ") for line in lines(None)] == lines(natural - 1)


def test_then_cells_are_wrapped() -> None:
    assert list(table(("what", ">time"), [("all-gathered, then reduced", "1.0 s")], 22)) == [
        (None, ["what              time"]),
        (0, ["all-gathered,    1.0 s", "then reduced"]),
    ]


def test_at_last_rows_become_records() -> None:
    assert [line for _, own in table(COLUMNS, ROWS, 26) for line in own] == [
        "this plan", "  mesh  [dp=2, tp=16]", "  step  404 ms",
        "search on [x=2, y=16],", "  full recomputation", "  mesh  [x=2, y=16]", "  step  1.48 s",
        "        267 % slower",
        "  data parallel", "    mesh  [dp=32]", "    step  12.0 µs",
    ]  # fmt: skip


def test_a_number_that_heads_a_record_is_named() -> None:
    (_, titles), *_ = table((">stage", "at the peak"), [("3", "backward of microbatch 3 of a layer, and so on")], 14)
    assert titles[0] == "stage 3"


def test_what_hangs_is_indented() -> None:
    assert wrapped("  memory  of all that is", 16) == ["  memory  of all", "    that is"]
    assert wrapped("short", 16) == wrapped("short", None) == ["short"]


def test_lines_say_what_they_are() -> None:
    styles = [style for style, _ in TEXT.set()]
    assert styles == ["title", "text", "columns", "own", "text", "text", "text"]
