"""Names of dtypes and precisions as people write them."""

from __future__ import annotations

import pytest
import torch

from shardwright.pcg.checks import FieldError
from shardwright.pcg.dtypes import dtype_named
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.precisions import PRECISIONS, canonical, precision_named
from tests.each import each

DTYPES = ("float32", "bfloat16", "float16", "float64")


@each("name, dtype", [
    *((name, name) for name in DTYPES), *((f"torch.{name}", name) for name in DTYPES), (torch.bfloat16, "bfloat16"),
    ("bf16", "bfloat16"), ("BF16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("torch.half", "float16"),
    ("fp32", "float32"), ("float", "float32"), ("single", "float32"), ("fp64", "float64"), (" double", "float64"),
])  # fmt: skip
def test_a_dtype_has_many_names(name: object, dtype: str) -> None:
    assert dtype_named(name, "", "--dtype", DTYPES) == dtype


@each("name", ["int3", "", "bf 16", "fp8", torch.int64, None, 16, ["bf16"]])
def test_other_dtypes_are_refused(name: object) -> None:
    with pytest.raises(FieldError, match=r"^--dtype: expected one of 'float32', .*, got .*; choose one of them$"):
        dtype_named(name, "", "--dtype", DTYPES)


def test_what_is_not_allowed_there_is_refused() -> None:
    with pytest.raises(FieldError, match=r"^Execution.reduce_dtype: expected one of 'float32', .*, got 'double'"):
        Execution(reduce_dtype="double")  # pyright: ignore[reportArgumentType]
    assert Execution(reduce_dtype="bf16") == Execution(reduce_dtype="bfloat16")  # pyright: ignore[reportArgumentType]


@each("name, precision", [
    *((name, name) for name in PRECISIONS), ("bfloat16", "bf16"), (torch.bfloat16, "bf16"), ("half", "fp16"),
    ("float32", "fp32"), ("bf16-mixed", "amp_bf16"), ("16-mixed", "amp_fp16"), ("bf16-true", "bf16"),
    ("32-true", "fp32"), ("AMP-BF16", "amp_bf16"), ("bf16-params", "bf16_params"),
])  # fmt: skip
def test_a_precision_has_many_names(name: object, precision: str) -> None:
    assert canonical(name, "") == precision
    assert canonical({"*": name}, "") == precision


@each("name", ["mixed", "16", "fp4", "torch.int64", ""])
def test_other_precisions_are_refused(name: object) -> None:
    with pytest.raises(FieldError, match=r"^--precision: expected one of 'fp32', .*, got .*; choose one of them$"):
        precision_named(name, "", "--precision")
