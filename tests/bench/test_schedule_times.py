"""Simulated times of schedules beside measured ones."""

from bench.schedule_times import fits


def test_schedules_are_ordered_as_measured() -> None:
    links, blocks = fits()
    assert blocks.ordered > 0.95
    assert blocks.error < 0.25
    assert blocks.num_rows < links.num_rows == 202
    assert links.error > 0.8  # no schedule there is limited by a link
