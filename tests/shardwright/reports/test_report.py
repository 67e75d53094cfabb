"""Text of paragraphs: titles, lines and tables."""

from __future__ import annotations

from shardwright.reports.report import Paragraph


def test_numbers_are_flush_right_and_lines_come_first() -> None:
    text = str(Paragraph("Title", ["a line"], ("name", ">bytes", ""), [("x", "12 B", "!"), ("longer", "3", "")]))
    assert text.splitlines() == ["Title", "  a line", "  name    bytes", "  x        12 B  !", "  longer      3"]


def test_a_table_without_rows_shows_its_columns() -> None:
    assert str(Paragraph("Title", columns=("name", ">bytes"))) == "Title\n  name  bytes"
    assert str(Paragraph("Title")) == "Title"
