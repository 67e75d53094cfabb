"""Simulated times of schedules beside measured ones."""

from bench.schedule_times import fits, least_error, nccls_rings


def test_schedules_are_ordered_as_measured() -> None:
    links, blocks = fits()
    assert blocks.ordered > 0.95
    assert blocks.error < 0.2
    assert blocks.num_rows < links.num_rows == 202
    assert links.error > least_error() > 0.4  # no schedule there is limited by a link


def test_nccls_rings_take_what_their_links_do() -> None:
    num_rows, error = nccls_rings()
    assert num_rows == 6
    assert error < 0.08
