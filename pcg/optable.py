"""The op table: one row per operator, the single source for importer, inference, rules, prover, cost and lowering.

Rows live in `pcg/rows/`, one file per topic; `ROWS` gathers them. The four parallel operators and the leaves (`input`,
`parameter`, …) are not rows: see `pcg/parallel.py`, `pcg/node.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.pcg.attrs import Attr, Attrs
from shardwright.pcg.errors import GraphError
from shardwright.pcg.row import LocalShapes, Row, keep_attrs, local_result_shape, numpy_dtype
from shardwright.pcg.rows import (
    contractions,
    declared,
    experts,
    images,
    indexing,
    neural,
    pointwise,
    recurrent,
    reductions,
    spectra,
    structural,
)


class OpTable(dict[str, Row]):
    """The rows by name. Unknown names raise a `GraphError` that says what to do; `find` gives None for them.

    Rows that a user declares (`pcg.rows.declared`) are found, and not listed.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        super().__init__()
        for row in rows:
            if row.name in self:
                raise GraphError(f"op table: two rows are called {row.name!r}")
            self[row.name] = row

    def __missing__(self, name: str) -> Row:
        if name in declared.DECLARED:
            return declared.DECLARED[name]
        raise GraphError(f"operator {name!r} has no row in the op table; add one to pcg/rows or fix the name")

    def find(self, name: str) -> Row | None:
        return self.get(name) or declared.DECLARED.get(name)


TOPICS = (pointwise, structural, reductions, contractions, experts, indexing, neural, images, recurrent, spectra)


def shipped() -> OpTable:
    """Return our own rows; `ROWS` may have some of a user's beside them."""
    return OpTable(row for topic in TOPICS for row in topic.ROWS)


ROWS = shipped()

__all__ = ["Attr", "Attrs", "LocalShapes", "keep_attrs", "local_result_shape", "numpy_dtype"]
