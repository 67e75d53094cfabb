"""A search gives its memory back: it may be one of many in a process."""

from __future__ import annotations

import gc
from collections import Counter

from shardwright.search.choices.interning import Interned
from shardwright.search.exact.keeping import KeepingProblem
from tests.search.graphs import blocks, planner


def test_tables_of_a_search_are_in_no_cycle() -> None:
    """Else they stay until Python looks through all that there is for cycles, which it seldom does."""
    graph, search = blocks(), planner()
    search.plan(graph)
    gc.collect()
    search.plan(blocks())
    del search
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = Counter(type(x) for x in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert not found[Interned]
    assert not found[KeepingProblem]
