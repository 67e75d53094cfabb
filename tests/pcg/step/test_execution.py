"""How a step is run: what is refused, and which dtypes a precision means."""

from __future__ import annotations

import re
from typing import Any

import pytest

from shardwright.pcg.encodings import ENCODINGS
from shardwright.pcg.errors import ClusterError
from shardwright.pcg.step.assumed import Assumed
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.pipelining import Schedule
from shardwright.pcg.step.precisions import DTYPES, PRECISIONS
from tests.each import each


@each(
    ("fields", "message"),
    [
        (
            {"precision": "fp4"},
            "Execution.precision: expected one of 'fp32', 'tf32', 'amp_bf16', 'bf16_params', 'bf16', 'amp_fp16', ",
        ),
        (
            {"reduce_dtype": "int8"},
            "Execution.reduce_dtype: expected one of 'float32', 'bfloat16', 'float16', got 'int8'; choose one of them",
        ),
        ({"recompute": "some"}, "Execution.recompute: expected one of 'none', 'selective', 'full', got 'some'"),
        (
            {"recompute": 3},
            "Execution.recompute: expected one of 'none', 'selective', 'full', or a mapping from blocks",
        ),
        ({"recompute": {"h.*": "all"}}, "Execution.recompute['h.*']: expected one of 'none', 'selective', 'full', got"),
        ({"recompute": {" ": "full"}}, "Execution.recompute: expected a non-empty string, got ' '"),
        ({"recompute": {"h.*": []}}, "Execution.recompute['h.*']: expected places in the block, got an empty list"),
        ({"recompute": {"h.*": [1]}}, "Execution.recompute['h.*']: expected a non-empty string, got 1"),
        ({"schedule": "1b1f"}, "Execution.schedule: expected one of 'gpipe', '1f1b', 'eager-1f1b', 'interleaved',"),
        ({"optimizer": "lamb"}, "Execution.optimizer: expected one of 'adam', 'adam8bit', 'momentum', 'sgd', 'lion', "),
        ({"compiled": 1}, "Execution.compiled: expected True or False, got 1; give one of them"),
        ({"offload": "selective"}, "Execution.offload: expected one of 'none', 'full', got 'selective'"),
        ({"offload": {"h.*": []}}, "Execution.offload['h.*']: expected places in the block, got an empty list"),
        ({"shard_optimizer": "no"}, "Execution.shard_optimizer: expected True or False, got 'no'"),
        ({"overlap": 0}, "Execution.overlap: expected True or False, got 0"),
        ({"late_gathers": 2}, "Execution.late_gathers: expected True or False, got 2"),
        ({"num_microbatches": 0}, "Execution.num_microbatches: expected a positive integer, got 0"),
        ({"num_stages": 1.5}, "Execution.num_stages: expected a positive integer, got 1.5"),
        ({"chunks_per_stage": -1}, "Execution.chunks_per_stage: expected a positive integer, got -1"),
        ({"chunks_per_stage": 2}, "Execution.chunks_per_stage: expected 1 with schedule '1f1b', got 2; change the one"),
        ({"schedule": "interleaved"}, "Execution.chunks_per_stage: expected at least 2 with schedule 'interleaved'"),
        ({"num_stages": 2, "split": [3]}, "Execution.split: expected a number of sections for each of the 2 virtual"),
        ({"num_stages": 2, "split": 3}, "Execution.split: expected a number of sections for each of the 2 virtual"),
        ({"num_stages": 2, "split": [5, 0]}, "Execution.split: expected a positive integer, got 0; it is sections of"),
        (
            {"schedule": "interleaved", "chunks_per_stage": 2, "num_stages": 4, "num_microbatches": 6},
            "Execution.num_microbatches: expected a multiple of the 4 stages, or fewer than them, got 6; interleaving",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError) as error:
        Execution.of(**fields)
    assert str(error.value).startswith(message)


@each(
    ("precision", "compute", "state", "rates"),
    [
        (None, "float64", "float64", {}),
        ("fp32", "float32", "float32", {}),
        ("tf32", "float32", "float32", {"matmul": "tf32", "conv": "tf32"}),
        ("bf16", "bfloat16", "bfloat16", {}),
        ("amp_bf16", "bfloat16", "float32", {}),
        ("fp16", "float16", "float16", {}),
        ("amp_fp16", "float16", "float32", {}),
        ("bf16_params", "bfloat16", "float32", {}),
        ("fp16_params", "float16", "float32", {}),
        ("fp8", "bfloat16", "float32", {"matmul": "fp8"}),
    ],
)
def test_a_precision_says_the_dtypes_of_floats(precision: Any, compute: str, state: str, rates: Any) -> None:
    run = Execution(precision)
    assert (run.compute_dtype("float64"), run.state_dtype("float64"), run.rates) == (compute, state, rates)
    assert {run.compute_dtype("int64"), run.state_dtype("int64")} == {"int64"}
    assert run.is_scaled == (precision in ("amp_fp16", "fp16_params"))


@each("given, dtype, found", [
    (None, "float32", "float32"), ("bfloat16", "float32", "bfloat16"), ("float32", "bfloat16", "float32"),
    ("bfloat16", "int64", "int64"),
])  # fmt: skip
def test_gradients_are_sent_in(given: Any, dtype: str, found: str) -> None:
    assert Execution(reduce_dtype=given).reduced_dtype(dtype) == found


def test_floats_are_sent_encoded() -> None:
    run = Execution(encodings={"gradients": "int4", "weights": "fp8"})  # pyright: ignore[reportArgumentType]
    assert run.encodings == (("weights", "fp8"), ("gradients", "int4"))
    assert run.encoding("weights", "bfloat16") == ENCODINGS["fp8"]
    assert run.encoding("gradients", "int64") is None
    assert Execution().encoding("weights", "float32") is None
    for given, problem in (
        ({"weights": "int4"}, "encodings['weights']: expected one of 'int8', 'fp8', got 'int4'"),
        ({"tokens": "int8"}, "encodings: expected one of 'weights', 'gradients', got 'tokens'"),
        ("int8", "encodings: expected encodings by what is sent, got 'int8'"),
    ):
        with pytest.raises(ClusterError, match=re.escape(f"Execution.{problem}")):
            Execution(encodings=given)  # pyright: ignore[reportArgumentType]


def test_every_precision_is_described() -> None:
    assert set(DTYPES) == set(PRECISIONS)


def test_what_is_made_again_may_differ_by_block() -> None:
    run = Execution(recompute={"h.1": "full", "h.*": "selective"})
    assert run == Execution(recompute=(("h.1", "full"), ("h.*", "selective")))
    assert hash(run) != hash(Execution(recompute={"h.*": "selective", "h.1": "full"}))
    assert [run.kind_of(block)[1] for block in ("h.1", "h.11", "")] == ["full", "selective", "none"]
    assert Execution(recompute="full").kind_of("")[1] == "full"


def test_files_have_the_fields_of_all_parts_side_by_side() -> None:
    """As they have had them since there are stages."""
    data: dict[str, Any] = {
        "precision": {"lm_head": "fp32", "*": "amp_bf16"}, "recompute": {"h.*": ["mlp"], "*": "none"},
        "per_microbatch": ["norm"], "reduce_dtype": "bfloat16", "encodings": {"weights": "int8", "gradients": "int4"},
        "schedule": "interleaved", "num_stages": 2, "chunks_per_stage": 2, "stage_sizes": [2, 1],
        "split": [1, 2, 1, 1], "recompute_by_stage": ["full", "none"],
        "offload": {"h.0-3": "full"},
        "compiled": True, "num_microbatches": 4, "optimizer": "sgd", "shard_optimizer": True,
        "overlap": False, "late_gathers": True,
    }  # fmt: skip
    run = Execution.from_json(data)
    assert run.to_json() == data
    assert run.schedule == Schedule("interleaved", 2, (2, 1), 2, (1, 2, 1, 1), ("full", "none"))
    assert run.assumed == Assumed(True, 4, "sgd", True, overlap=False, late_gathers=True)
    assert Execution().to_json() == {}
    assert run.having(schedule="1f1b", chunks_per_stage=1, split=()).schedule.name == "1f1b"
    with pytest.raises(ValueError, match="execution: field 'assumed' is not known"):
        Execution.from_json({"assumed": {}})
