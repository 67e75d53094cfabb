"""Rows that hold because the user says so: nothing about them is proven, and no listing of the op table has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from shardwright.pcg.attrs import Attrs, integers
from shardwright.pcg.errors import GraphError
from shardwright.pcg.factors import Shape
from shardwright.pcg.row import Row, attr_dtype

ROW_BY_ROW = "foreign_rows"
"""A foreign call (`pcg.foreign`) along the batch: each row of its results depends on its own row of operands alone."""


def _factors(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, Mapping[str, int]]:
    """Return the batch `b` in the first dimension of the operands that `batched` lists; nothing else may be split."""
    batched, shape = integers(attrs, "batched"), integers(attrs, "shape")
    if not batched or not shape or max(batched) >= len(shapes):
        raise GraphError(f"operands {batched} of {len(shapes)} have the batch, for a result of shape {list(shape)}")

    def dims(number: int, rank: int) -> str:
        first = "b" if number in batched else f"x{number}_0!"
        return " ".join([first, *(f"x{number}_{dim}!" for dim in range(1, rank))][:rank])

    operands = ", ".join(dims(number, len(shape)) for number, shape in enumerate(shapes))
    rest = {f"y{dim}": size for dim, size in enumerate(shape) if dim}
    return f"{operands} -> {' '.join(['b', *(f'{name}!' for name in rest)])}", rest


def _no_meaning(*operands: np.ndarray, **attrs: object) -> NoReturn:
    raise GraphError("a foreign call runs in Python alone and cannot be interpreted")


DECLARED = {ROW_BY_ROW: Row(ROW_BY_ROW, _factors, _no_meaning, "", dtype=attr_dtype)}
