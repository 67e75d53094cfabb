"""Sums on all ranks in one order: which builders add alike, and a schedule that does not."""

from __future__ import annotations

from shardwright.pcg.collectives.builders.table import BUILDERS, build
from shardwright.pcg.collectives.collective import collective
from shardwright.pcg.collectives.schedule import Schedule, Transfer
from shardwright.pcg.collectives.sums import adds_alike


def test_which_builders_add_alike() -> None:
    """A sum that is made once and copied is one; so is doubling, where two summands change places at most."""
    makers = [name for name, builder in BUILDERS.items() if "all_reduce" in builder.makes]
    unlike = {name for name in makers if not adds_alike(build(name, "all_reduce", (2, 2, 2)))}
    assert unlike == {"one-shot"}  # each rank begins with its own summand
    assert adds_alike(build("one-shot", "all_reduce", (2,)))


def test_the_order_of_three_summands_matters() -> None:
    whole = collective("all_reduce", 3)
    chain = [Transfer(0, 0, 1, 0, "reduce"), Transfer(1, 1, 2, 0, "reduce")]
    copied = Schedule("chain", whole, (*chain, Transfer(2, 2, 0, 0), Transfer(2, 2, 1, 0)))
    added = Schedule("both ways", whole, (*chain, Transfer(0, 2, 1, 0, "reduce"), Transfer(2, 2, 0, 0)))
    assert adds_alike(copied)
    assert not adds_alike(added)  # (1 + 0) + 2 on rank 1, 2 + ((1 + 0) + 2) on rank 2
