"""Memory by category."""

from dataclasses import fields, replace

import pytest

from shardwright.cost.timeline.memory import (
    Memory,
    Stored,
    gradient_bytes,
    kept_bytes,
    state_bytes,
    update_s,
    verdict,
)
from shardwright.pcg.step.execution import Execution
from shardwright.pcg.step.optimizers import OPTIMIZERS, Optimizer
from shardwright.pcg.step.precisions import PRECISIONS, Precision
from tests.each import each
from tests.search.graphs import cluster


def test_total() -> None:
    one = Memory(parameters_bytes=1, activations_bytes=2)
    two = Memory(*range(1, len(fields(Memory)) + 1))
    assert (one.total_bytes, two.total_bytes) == (3, 55)
    assert list(two.by_category()) == [
        "parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "communication",
        "temporary", "context", "slack",
    ]  # fmt: skip


STORED = Stored(1000, "float32", True, False, "float32")


def update_bytes(stored: Stored, run: Execution, shards: int = 1) -> float:
    """The seconds of an update on a device that moves one byte in a second, to its own memory and to the host's."""
    slow = replace(cluster(1).device, memory_bytes_per_s=1.0, host_bytes_per_s=1.0)
    return update_s(stored, run, slow, shards)


@each("run", [Execution.of(p, optimizer=o) for p in (None, *PRECISIONS) for o in OPTIMIZERS])
def test_what_is_kept_is_the_state_and_the_gradient(run: Execution) -> None:
    assert kept_bytes(STORED, run) == sum(state_bytes(STORED, run).values()) + gradient_bytes(STORED, run)
    frozen = STORED._replace(grad=False)
    assert kept_bytes(frozen, run) == state_bytes(frozen, run)["parameters"]


def test_adam_in_fp32_takes_16_bytes_per_element() -> None:
    assert kept_bytes(STORED, Execution()) == 16_000
    assert state_bytes(STORED, Execution()) == {"parameters": 4000, "optimizer": 8000}
    assert gradient_bytes(STORED, Execution()) == 4000
    assert update_bytes(STORED, Execution()) == 7 * 4000


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_precision_takes_18_bytes_per_element_of_which_12_are_sharded(dtype: str, shards: int) -> None:
    """2 for the weight, 4 for the gradient, 4 for the master copy and 8 for the moments."""
    stored, run = STORED._replace(dtype=dtype, used="bfloat16"), Execution.of("amp_bf16", shard_optimizer=shards > 1)
    assert state_bytes(stored, run, shards) == {"parameters": 2000, "optimizer": 12000 / shards}
    assert gradient_bytes(stored, run) == 4000
    assert update_bytes(stored, run, shards) == 30_000 / shards


def test_a_gathered_parameter_in_mixed_precision_is_its_master_copy() -> None:
    run = Execution("amp_bf16")
    gathered = STORED._replace(gathered=True, used="bfloat16")
    assert state_bytes(gathered, run) == {"parameters": 4000, "optimizer": 8000}


def test_a_parameter_that_the_graph_casts_is_its_master_copy() -> None:
    assert state_bytes(STORED, Execution("amp_bf16")) == {"parameters": 4000, "optimizer": 8000}
    assert update_bytes(STORED, Execution("amp_bf16")) == 7 * 4000


def test_sgd_keeps_no_moments_and_what_is_not_trained_keeps_nothing() -> None:
    sgd = Execution.of(optimizer="sgd")
    assert state_bytes(STORED, sgd) == {"parameters": 4000, "optimizer": 0}
    assert update_bytes(STORED, sgd) == 3 * 4000
    frozen = STORED._replace(grad=False)
    assert state_bytes(frozen._replace(used="bfloat16"), Execution("amp_bf16")) == {"parameters": 2000}
    assert update_bytes(frozen, Execution()) == 0


MATRIX = Stored(8192, "float32", True, False, "float32", (128, 256))
"""A quarter of it is on this device."""


@each(
    ("optimizer", "own", "num_bytes"),
    [
        ("adam", MATRIX, 2 * 4 * 8192),
        ("momentum", MATRIX, 4 * 8192),
        ("lion", MATRIX, 4 * 8192),
        ("adafactor", MATRIX, 4 * (128 + 256)),
        ("adafactor", MATRIX._replace(shape=(4, 128, 256)), 4 * 4 * (128 + 256)),
        ("adafactor", MATRIX._replace(shape=(0, 256), num_elements=0), 0),
        ("adafactor", MATRIX._replace(shape=(32768,)), 4 * 8192),
        ("muon", MATRIX, 4 * 8192),
        ("muon", MATRIX._replace(shape=(32768,)), 2 * 4 * 8192),
        ("muon", MATRIX._replace(shape=(4, 32, 256)), 2 * 4 * 8192),
        ("adam8bit", MATRIX, 2 * (8192 + 4 * 32)),
        ("adam8bit", MATRIX._replace(num_elements=4095), 2 * 4 * 4095),
        ("adam8bit", MATRIX._replace(num_elements=8193), 2 * 4 * 8193),
    ],
)
def test_what_other_optimizers_keep(optimizer: Optimizer, own: Stored, num_bytes: float) -> None:
    run = Execution.of(optimizer=optimizer)
    assert state_bytes(own, run)["optimizer"] == num_bytes
    assert update_bytes(own, run) == 3 * 4 * own.num_elements + 2 * num_bytes


def test_sums_of_rows_and_columns_are_whole_on_every_device() -> None:
    run = Execution.of(optimizer="adafactor", shard_optimizer=True)
    assert state_bytes(MATRIX, run, shards=4) == state_bytes(MATRIX, run)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_pure_16_bit_training_takes_8_bytes_per_element(precision: Precision) -> None:
    run = Execution(precision)
    stored = STORED._replace(used=run.compute_dtype("float32"))
    assert sum(state_bytes(stored, run).values()) + gradient_bytes(stored, run) == 8000


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("shards", [1, 4])
def test_a_loss_scaler_reads_and_writes_every_gradient_once_more(optimizer: Optimizer, shards: int) -> None:
    plain, scaled = (Execution.of(precision, optimizer=optimizer) for precision in ("amp_bf16", "amp_fp16"))
    assert update_bytes(STORED, scaled, shards) - update_bytes(STORED, plain, shards) == 2 * 4000 / shards
    assert state_bytes(STORED, scaled, shards) == state_bytes(STORED, plain, shards)
    assert update_bytes(STORED._replace(grad=False), scaled) == 0


def test_memory_comes_from_categories() -> None:
    assert Memory.of({"parameters": 1.4, "slack": 2.6}) == Memory(parameters_bytes=1, slack_bytes=3)


@each(
    ("used", "said"), [(0, "fits"), (900, "fits"), (901, "may not fit"), (1000, "may not fit"), (1001, "does not fit")]
)
def test_within_the_last_tenth_it_may_not_fit(used: int, said: str) -> None:
    assert verdict(used, 1000) == said
