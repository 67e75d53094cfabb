"""A few cases of `bench.failures`: the rank that fails is named, and losses are those of a whole run."""

from __future__ import annotations

from dataclasses import replace

from bench.failures import Kind, Phase, Seen, judged, measured, phases
from tests.each import in_whole_grids


@in_whole_grids
def test_a_rank_that_fails_is_named() -> None:
    """In a stage's action, beside which another rank waits; and by a NaN, a full disk, another batch."""
    named = phases()
    cases: list[tuple[Phase, Kind]] = [
        (named["stage action: backward"], "killed"),
        (named["clipping"], "NaN"),
        (named["save: files are written"], "full disk"),
        (named["loading of data"], "wrong batch"),
    ]
    found = measured("stages", cases)
    assert [cell.problem for cell in found.values()] == [""] * 5


def test_what_is_no_pass() -> None:
    assert len(phases()) >= 14
    phase, losses = phases()["forward"], {0: 1.0}
    good = Seen(losses, "DistributedError", "rank 1 does not answer", 1.0, began=True)
    assert judged(good, phase, "killed", losses) == ""
    assert "another loss in step 0" in judged(replace(good, losses={0: 2.0}), phase, "killed", losses)
    assert "does not say 'rank 1 is at '" in judged(good, phase, "stuck", losses)
    assert "in a DistributedError: ShardwrightError" in judged(
        replace(good, error="ShardwrightError"), phase, "killed", losses
    )
    assert judged(replace(good, began=False), phase, "killed", losses).startswith("no fault: ")
    assert judged(replace(good, seconds=60.0), phase, "killed", losses) == "took 60.0 s"
