"""Sections of docs/search.md say what their tables say."""

from __future__ import annotations

from bench import growth, search, within
from bench.grid_page import GROWTH, TIME_NEEDED, WITHIN
from bench.search import TASKS, Timing

TIMING = Timing(1.0, 2.0, 0.0, 3.0, 0.0, 4.0, 100, "[x=2]", 0.05, 10**9)


def test_planning_time_says_how_many_meet_the_aim() -> None:
    text = search.section([(TASKS[0], TIMING), (TASKS[1], TIMING)])
    assert text.startswith(f"{TIME_NEEDED}\n\n")
    assert "(*at most*): 1 of these 2. The others miss it." in text
    assert f"| {TASKS[0].name} | 100 | 1.0 s | 2.0 s | 0.0 s | 3.0 s | 0.0 s | 3.0 s | 4.0 s | 5.0 s | [x=2] |" in text


def test_layouts_within_memory_say_how_many_are_near_the_optimum() -> None:
    cases = [within.Case("mlp", 0.0, 0.5, 0.01, 1.0, 2.0), within.Case("gpt", 0.037, 0.5, 0.01, 1.0, 2.0)]
    text = within.section(cases)
    assert text.startswith(f"{WITHIN}\n\n")
    assert "Of 2 such problems, what it finds is\nwithin 1 % of the optimum in 1, and 3.7% above it at most." in text
    assert "| all | 2 | 3.7% (3.7%) | 50.0% (50.0%) | 1.0% (1.0%) | 1 of 2 | 2 s | 4 s |" in text


def test_growth_has_a_row_for_each_case() -> None:
    text = growth.section({(8, 8): TIMING, (16, 8): TIMING})
    assert text.startswith(f"{GROWTH}\n\n")
    assert "| 8 | 64 | 100 | 2.0 s | 4.0 s | [x=2] |\n| 16 | 64 | 100 |" in text
