"""What the runtime does with gathered blocks is compiled from the list."""

from __future__ import annotations

from shardwright.lowering.runtime.schedule import schedule
from shardwright.pcg.step.actions import actions
from tests.pcg.step.test_actions import SLICED, chain, chunk


def test_the_next_block_is_gathered_when_one_is_opened_and_gradients_are_delivered_one_block_later() -> None:
    found = schedule(actions(chunk(chain(), *SLICED)))
    assert found.opened == {
        (0, False): (1,), (1, False): (2,), (2, False): (), (2, True): (1,), (1, True): (),
    }  # fmt: skip
    assert found.scatter == {2: (), 1: (2,), 0: (1,)}
    assert set(found.frees.values()) == set(found.scatters.values()) == {"every"}


def test_without_overlap_nothing_is_launched_ahead() -> None:
    found = schedule(actions(chunk(chain(), *SLICED), ahead=False))
    assert set(found.opened.values()) == {()}


def test_what_stays_for_a_step_is_freed_in_its_last_microbatch_and_scattered_there_if_it_is_summed() -> None:
    stays = [p._replace(slices=p.slices and p.slices._replace(lifetime="step", summed=p.leaf == "w")) for p in SLICED]
    found = schedule(actions(chunk(chain(), *stays)))
    assert set(found.frees.values()) == {"last"}
    assert found.scatters == {0: "every", 1: "every", 2: "last"}
