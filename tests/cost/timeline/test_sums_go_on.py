"""Sums of gradients over devices go on beside what follows; the end of the step waits for them."""

from __future__ import annotations

import pytest

from shardwright.cost.timeline.clock import Sharing
from shardwright.cost.timeline.streams import run
from shardwright.cost.timeline.tasks import COMPUTE, Recorder

ALONE = Sharing(1.0, 1.0)


def test_a_segment_is_ready_before_its_sums_have_ended() -> None:
    r = Recorder(overlap=True)
    r.compute("product", 1.0)
    r.launch("gradient", "dp", 3.0, blocks=False, microbatch="last")
    r.compute("other", 0.5)
    found = run(r.segment(), ALONE)
    assert (found.ready_s, found.seconds, found.waiting_s) == pytest.approx((1.5, 4.0, 0.0))


def test_what_every_microbatch_does_is_waited_for() -> None:
    r = Recorder(overlap=True)
    r.compute("product", 1.0)
    r.launch("gradients of a gathered block", "dp", 3.0, blocks=False)
    found = run(r.segment(), ALONE)
    assert (found.ready_s, found.seconds, found.waiting_s) == pytest.approx((4.0, 4.0, 3.0))


def test_nothing_is_ready_at_once() -> None:
    found = run(Recorder(overlap=True).segment(), ALONE)
    assert (found.ready_s, found.seconds) == (0.0, 0.0)
    assert COMPUTE not in found.busy_s
