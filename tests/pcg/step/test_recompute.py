"""Patterns of modules, with ranges of numbers."""

from __future__ import annotations

from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.recompute import exactly, fits
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
        ("stages.5.blocks.1.mlp", "*.0-2.mlp", True),
        ("stages.5.blocks.1.mlp", "*.0-2.m*", True),
        ("h.3", "h.3-0", False),
        ("h." + "3" * 5000, "h.0-3", False),
        ("h.3", "h.0-" + "9" * 5000, False),
    ],
)
def test_a_range_is_any_of_its_numbers(name: str, pattern: str, expected: bool) -> None:
    assert fits(name, pattern) == expected


@each(("low", "high"), [(0, 0), (0, 9), (0, 123), (7, 7), (7, 1010), (99, 100), (10, 9)])
def test_a_range_is_that_of_numbers(low: int, high: int) -> None:
    found = [n for n in range(1200) if fits(f"h.{n}", f"h.{low}-{high}")]
    assert found == list(range(low, high + 1))


@each("name", ["h.1-2.3", "h.a[b].3", "h.*", "x?", "3-4", "mlp:linear#2/combine", ""])
def test_any_name_has_a_pattern_that_fits_it_alone(name: str) -> None:
    others = {"h.1.3", "h.2.3", "h.ab.3", "h.3", "xy", "3", "4", "mlp:linear#2", "h.1-2.3", "h.a[b].3", "h.*", "x?"}
    assert fits(name, exactly(name))
    assert not any(fits(other, exactly(name)) for other in others - {name})


def test_lists_of_places_are_read_as_they_were_written() -> None:
    run = Execution(recompute={"h.0-3": ["mlp", ":add"], "h.*": "full"})
    assert run.to_json() == {"recompute": {"h.0-3": ["mlp", ":add"], "h.*": "full"}}
    assert Execution.from_json(run.to_json()) == run
