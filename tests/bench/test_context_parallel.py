"""Torch's ring and ours give what one process does, so their times are of the same work."""

from __future__ import annotations

from bench.context_parallel import OURS, RANKS, ROTATIONS, Contender, check, refusal
from shardwright.lowering.ranks.launch import run_ranks


def on_rank() -> str:
    told = refusal()
    for name in (OURS, *ROTATIONS):
        check(Contender(name))
    return told


def test_all_rings_are_attention_and_the_context_manager_says_why_it_is_none() -> None:
    """If torch learns to run it on CPUs, it says nothing."""
    for told in run_ranks(on_rank, RANKS, 60.0):
        assert not told or told.startswith("Operator aten._scaled_dot_product_flash_attention_for_cpu"), told
