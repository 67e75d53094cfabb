"""The published collectives: read whole, split by the rule, predicted without a fit."""

from collections import Counter

import numpy as np
import pytest

from bench.collectives import DATA, Measured, Row, measured, others, predicted, section, splits, tables

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
