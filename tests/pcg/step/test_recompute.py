"""Patterns of modules, with ranges of numbers."""

from __future__ import annotations

from shardwright.pcg.step.recompute import fits
from tests.each import each


@each(
    ("name", "pattern", "expected"),
    [
        ("h.3", "h.*", True),
        ("h.3", "h.0-3", True),
        ("h.4", "h.0-3", False),
        ("h.30", "h.0-3", False),
        ("h.3.mlp", "h.0-3", False),
        ("h.3.mlp", "h.0-3.*", True),
        ("h.3.experts.12", "h.0-3.experts.10-20", True),
        ("h.3.experts.9", "h.0-3.experts.10-20", False),
        ("h.a", "h.0-3", False),
        ("x1-2", "x1-2", True),
        ("h.1", "h.[02]", False),
        ("", "*", True),
        ("", "", True),
        ("h", "", False),
    ],
)
def test_a_range_is_any_of_its_numbers(name: str, pattern: str, expected: bool) -> None:
    assert fits(name, pattern) == expected
