"""The op table itself: lookup, FLOPs, dtype rules, and what every row must say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter

import numpy as np
import pytest

from shardwright.pcg.errors import GraphError
from shardwright.pcg.optable import (
    ROWS,
    Attr,
    LocalShapes,
    OpTable,
    Row,
    keep_attrs,
    local_result_shape,
    numpy_dtype,
)
from shardwright.pcg.row import BESIDE
from tests.each import each
from tests.samples import SAMPLES


def test_unknown_rows() -> None:
    with pytest.raises(
        GraphError, match=r"operator 'nag' has no row in the op table; add one to pcg/rows or fix the name"
    ):
        ROWS["nag"]
    assert "nag" not in ROWS
    assert len(list(ROWS)) == len(ROWS)
    assert (ROWS.get("neg"), ROWS.get("input"), ROWS.get("input", 0)) == (ROWS["neg"], None, 0)


def test_names_are_unique() -> None:
    row = Row("neg", "... -> ...", np.negative, "-{0}")
    with pytest.raises(GraphError, match=r"op table: two rows are called 'neg'"):
        OpTable([row, row])


@each(
    ("op", "shapes", "attrs", "flops"),
    [
        ("linear", [(4, 8, 12), (16, 12)], {}, 2 * 4 * 8 * 12 * 16),
        ("matmul", [(4, 8, 12), (4, 12, 16)], {}, 2 * 4 * 8 * 12 * 16),
        ("sdpa", [(4, 8, 12, 6), (4, 8, 20, 6), (4, 8, 20, 6)], {"causal": False, "scale": None},
         4 * 4 * 8 * 12 * 20 * 6),
        ("conv2d", [(4, 12, 7, 9), (16, 12, 3, 2)],
         {"groups": 1, "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}, 2 * 4 * 12 * 16 * 3 * 2 * 5 * 8),
        ("grouped_mm", [(24, 8), (4, 8, 12), (4,)], {}, 2 * 24 * 8 * 12),
        ("expert_linear", [(24, 1, 8), (4, 8, 12), (24, 2)], {}, 2 * 24 * 2 * 8 * 12),
        ("experts", [(24, 8), (24, 2), (24, 2), (4, 8, 40), (4, 20, 12)], {"activation": "silu"},
         2 * 24 * 2 * (8 * 40 + 20 * 12)),
        ("reshape", [(4, 8)], {"shape": (32,)}, 0),
        ("add", [(4, 8), (8,)], {}, 32),
        ("sum", [(4, 8)], {"dims": (1,), "keepdim": False}, 32),
        ("gelu", [(4, 8)], {"approximate": "none"}, 12 * 32),
        ("embedding", [(500, 8), (4, 6)], {"padding_idx": None, "offset": 0}, 4 * 6 * 8),
        ("gather", [(4, 500), (4, 3)], {"dim": 1}, 4 * 3),
        ("index", [(500, 8), (4, 6)], {"dim": 0}, 4 * 6 * 8),
        ("full", [], {"shape": (4, 8), "value": 1, "dtype": "float32"}, 32),
    ],
)  # fmt: skip
def test_flops(op: str, shapes: list[tuple[int, ...]], attrs: Mapping[str, Attr], flops: float) -> None:
    assert ROWS[op].flops(ROWS[op].signature(shapes, attrs)) == flops


@each(
    ("op", "dtypes", "attrs", "result"),
    [
        ("add", ["int64", "float32"], {}, "float32"),
        ("div", ["int64", "int64"], {}, "float32"),
        ("exp", ["bool"], {}, "float32"),
        ("exp", ["bfloat16"], {}, "bfloat16"),
        ("sum", ["bool"], {}, "int64"),
        ("sum", ["int32"], {}, "int64"),
        ("sum", ["float16"], {}, "float16"),
        ("eq", ["float32", "float32"], {}, "bool"),
        ("where", ["bool", "float32", "int64"], {}, "float32"),
        ("cast", ["float32"], {"dtype": "bfloat16"}, "bfloat16"),
        ("embedding", ["float32", "int64"], {}, "float32"),
        ("argmax", ["float32"], {}, "int64"),
    ],
)
def test_dtypes(op: str, dtypes: list[str], attrs: Mapping[str, Attr], result: str) -> None:
    assert ROWS[op].result_dtype(dtypes, attrs) == result


def test_numpy_stands_in_for_bfloat16() -> None:
    assert [numpy_dtype(d) for d in ("bfloat16", "float16", "bool")] == ["float32", "float16", "bool"]


def test_localizers() -> None:
    shapes = LocalShapes(((8, 4),), (32,), ((4, 4),), (16,))
    assert keep_attrs({"shape": (32,)}, shapes) == {"shape": (32,)}
    assert local_result_shape({"shape": (32,)}, shapes) == {"shape": (16,)}


@each("row", ROWS.values(), ids=list(ROWS))
def test_every_row_is_complete(row: Row) -> None:
    """The torch expression names operands and attributes that exist; what it lists about operands is in range."""
    for one in SAMPLES[row.name]:
        known = {*one.attrs, "*", "*1", *({"offset"} if row.offset else ()), *({"draw", "shard"} if row.random else ())}
        for _, field, _, _ in Formatter().parse(row.torch):
            if field is not None:
                root = re.split(r"[\[.]", field)[0]
                assert root in known or int(root) < len(one.operands)
        for partial in row.linear_in:
            assert list(partial) == sorted(set(partial))
            assert all(i < len(one.operands) for i in partial)
        for item in row.saves:
            assert item == "result" or item in BESIDE or int(item) < max(len(s.operands) for s in SAMPLES[row.name])
        names = {f.name for f in row.signature(one.shapes, one.attrs).factors}
        assert set(row.uncounted) <= names
        assert ("inside" in row.saves) == (row.inside is not None)
        assert row.offset is None or row.offset in names


@each(
    ("op", "shapes", "attrs", "message"),
    [
        ("gather", [(4, 8), (4,)], {"dim": 1}, r"gather of \[4, 8\] by an index of another rank, \[4\]"),
        ("concat", [(4, 8), (4,)], {"dim": 0}, r"concat of shapes \[\[4, 8\], \[4\]\] of different rank"),
        (
            "pad",
            [(4,)],
            {"pads": (0, -1), "value": 0},
            r"attribute 'pads' is \(0, -1\); slice instead of padding by less",
        ),
        ("pad", [(4,)], {"pads": (0,), "value": 0}, r"attribute 'pads' should have 2 entries, got \(0,\)"),
        ("expand", [(4, 8)], {"shape": (8,)}, r"expand of \[4, 8\] to the lower rank of \[8\]"),
        ("expand", [(4,)], {"shape": (8,)}, r"d0 should have size 8, got 4"),
        ("layer_norm", [(4,)], {"normalized_dims": 2, "eps": 0.1}, r"'normalized_dims' is 2 for a tensor of rank 1"),
        ("index", [(4,)], {"dim": 0}, r"index of \[4\] from dimension 0 by 0 tensors"),
        (
            "conv2d",
            [(1, 12, 4, 4), (8, 6, 1, 1)],
            {"groups": 3, "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)},
            r"conv2d of \[1, 12, 4, 4\] with weight \[8, 6, 1, 1\] in 3 groups; they do not fit together",
        ),
    ],
)
def test_shapes_and_attributes_that_do_not_fit(
    op: str, shapes: list[tuple[int, ...]], attrs: Mapping[str, Attr], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        ROWS[op].signature(shapes, attrs)
