"""The published collectives: read whole, split by the rule, predicted without a fit."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from bench.collectives import DATA, Measured, Row, from_neighbours, measured, others, predicted, section, splits, tables

TABLES = tables(measured())
KNOWN = [name for name in TABLES if name[0] != "8-gpu-2023"]


def errors(rows: list[Row]) -> np.ndarray:
    return np.abs([row.error for row in rows])


def test_no_row_is_lost() -> None:
    rows = measured()
    assert len(rows) == len(DATA.read_text().splitlines()) - 1
    assert all(row.source and 0 < row.seconds <= row.repeat_s for row in rows)
    assert sum(map(len, TABLES.values())) == sum(row.library == "nccl" for row in rows)


@pytest.mark.parametrize("name", TABLES, ids=" ".join)
def test_at_most_a_tenth_is_fitted_and_every_row_once(name: tuple[str, str]) -> None:
    rows, fitted = TABLES[name], Counter[Measured]()
    assert rows == sorted(rows, key=lambda row: (row.algorithm, row.num_bytes))
    for split in splits(rows):
        judged = {row.measured for row in split.rows}
        fitted.update(row for row in rows if row not in judged)
        assert split.num_fitted == len(rows) - len(judged) <= len(rows) / 10
    assert set(fitted.values()) == {1}


@pytest.mark.parametrize("name", KNOWN, ids=" ".join)
def test_known_machines_are_met_without_a_fit(name: tuple[str, str]) -> None:
    found = errors(predicted(TABLES[name]))
    assert np.median(found) < 0.055
    assert found.max() < 0.3


def test_a_power_of_the_size_is_what_its_neighbours_say() -> None:
    """By algorithm; a row that is twice too long is off by itself, and its neighbours by √2."""
    first = TABLES["8-gpu-2023", "all_reduce"][0]
    rows = [
        replace(first, algorithm=name, num_bytes=4**i, seconds=3 * 4 ** (i * power), repeat_s=4.0**9)
        for name, power in (("ring", 0.7), ("tree", 0.2))
        for i in range(5)
    ]
    assert from_neighbours(rows) == pytest.approx([0.0] * 6, abs=1e-12)
    rows[2] = replace(rows[2], seconds=2 * rows[2].seconds)
    assert from_neighbours(rows)[:3] == pytest.approx([2**0.5 - 1, 0.5, 2**0.5 - 1])


def test_large_collectives_of_other_libraries_are_met() -> None:
    by_nodes = {many: errors([row for row in others() if (row.measured.ranks > 8) == many]) for many in (False, True)}
    assert by_nodes[False].max() < 0.1
    assert by_nodes[True].max() < 0.35  # hierarchical there, one ring here


def test_the_section_names_every_table() -> None:
    text = section()
    assert all(table in text for table, _ in TABLES)
    assert all(
        line.count("|") == text.splitlines()[i - 1].count("|")
        for i, line in enumerate(text.splitlines())
        if line[:2] == "|-"
    )
