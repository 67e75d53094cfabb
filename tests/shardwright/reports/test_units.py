"""Numbers as people read them."""

from __future__ import annotations

from shardwright.reports import units
from tests.each import each


@each(
    ("text", "expected"),
    [
        (units.seconds(0), "0"), (units.seconds(4e-18), "0"), (units.seconds(3e-7), "0.30 µs"),
        (units.seconds(0.00999), "9.99 ms"),
        (units.seconds(0.9999), "1.00 s"), (units.seconds(123), "123 s"),
        (units.seconds(3599.4), "3599 s"), (units.seconds(3599.5), "1 h 0 min"),
        (units.seconds(110_557), "30 h 43 min"),
        (units.size(0), "0"), (units.size(12), "12 B"), (units.size(999_900), "1.00 MB"),
        (units.size(65.7e9), "65.7 GB"),
        (units.percent(0), "0 %"), (units.percent(0.0002), "under 0.1 %"), (units.percent(0.034), "3.4 %"),
        (units.percent(0.5), "50 %"), (units.percent(0.9999), "over 99.9 %"), (units.percent(1), "100 %"),
        (units.plural(1, "mesh", "meshes"), "1 mesh"), (units.plural(2, "mesh", "meshes"), "2 meshes"),
        (units.plural(0, "row"), "0 rows"),
    ],
)  # fmt: skip
def test_numbers_read_well(text: str, expected: str) -> None:
    assert text == expected
