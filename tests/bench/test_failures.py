"""A few cases of `bench.failures`: a rank that is killed or stuck is named, and losses are those of a whole run."""

from __future__ import annotations

from dataclasses import replace

from bench.failures import Seen, judged, measured, phases


def test_a_rank_that_is_killed_or_stuck_is_named() -> None:
    """In a stage's action, beside which another rank waits, and in the optimizer's step, after which it does."""
    named = phases()
    found = measured("stages", [(named["stage action: backward"], "killed"), (named["optimizer step"], "stuck")])
    assert {case: cell.problem for case, cell in found.items()} == {
        ("stage action: backward", "killed"): "",
        ("optimizer step", "stuck"): "",
        ("the end of all", "killed"): "",
    }


def test_what_is_no_pass() -> None:
    assert len(phases()) >= 14
    phase, losses = phases()["forward"], {0: 1.0}
    good = Seen(losses, "rank 1 does not answer", 1.0, began=True)
    assert judged(good, phase, "killed", losses) == ""
    assert "another loss in step 0" in judged(replace(good, losses={0: 2.0}), phase, "killed", losses)
    assert "does not say that rank 1 is at" in judged(good, phase, "stuck", losses)
    assert judged(replace(good, began=False), phase, "killed", losses).startswith("no fault: ")
    assert judged(replace(good, seconds=60.0), phase, "killed", losses) == "took 60.0 s"
