"""Tensor types: dtypes, sizes, text."""

from __future__ import annotations

from shardwright.pcg.layout import P, R, S
from shardwright.pcg.mesh import Mesh
from shardwright.pcg.types import TensorType, is_float, promote
from tests.each import each


@each(
    ("dtypes", "result"),
    [
        (("float32",), "float32"),
        (("int64", "float32"), "float32"),
        (("int64", "bfloat16"), "bfloat16"),
        (("float16", "bfloat16"), "float32"),
        (("float16", "bfloat16", "float64"), "float64"),
        (("bool", "int64"), "int64"),
        (("int32", "int64"), "int64"),
        (("float32", "float64", "bool"), "float64"),
    ],
)
def test_promote(dtypes: tuple[str, ...], result: str) -> None:
    assert promote(*dtypes) == result


def test_is_float() -> None:
    assert [is_float(d) for d in ("float16", "bfloat16", "float64", "int64", "bool")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_sizes() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    value = TensorType((8, 12), "bfloat16", (S(0), S(1)))
    assert (value.num_elements, value.num_bytes) == (96, 192)
    assert (value.local_shape(mesh), value.local_bytes(mesh)) == ((4, 3), 24)
    assert TensorType((), "float32").num_bytes == 4


def test_text_marks_what_has_no_gradient() -> None:
    assert str(TensorType((8, 12), "float32", (S(0), P), grad=True)) == "float32[8, 12]{S(0),P}"
    assert str(TensorType((8,), "int64")) == "int64[8]'"


def test_erased() -> None:
    assert TensorType((8,), "float32", (R,), grad=True).erased() == TensorType((8,), "float32", (), grad=True)
