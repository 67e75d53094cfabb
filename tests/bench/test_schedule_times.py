"""Simulated times of schedules beside measured ones."""

from bench.schedule_times import fits, least_error


def test_schedules_are_ordered_as_measured() -> None:
    links, blocks = fits()
    assert blocks.ordered > 0.95
    assert blocks.error < 0.2
    assert blocks.num_rows < links.num_rows == 202
    assert links.error > least_error() > 0.4  # no schedule there is limited by a link
