"""The roofline."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cost.compute import Compute
from shardwright.cost.device import Device
from shardwright.pcg.errors import ClusterError

DEVICE = Device("gpu", 10**9, 1e12, {"fp32": 2e13, "bf16": 2e14}, 0.5, 1e-6, "cuda")
MODEL = Compute(DEVICE)
amounts = st.floats(0, 1e18)


def test_bound_by_compute_or_by_memory() -> None:
    assert MODEL.time_s(1e13, 1e9, "float32") == pytest.approx(1.0 + 1e-6)
    assert MODEL.time_s(1e13, 1e9, "bfloat16") == pytest.approx(0.1 + 1e-6)
    assert MODEL.time_s(1e6, 2e12, "float32") == pytest.approx(2.0 + 1e-6)


def test_an_operator_takes_at_least_its_launch() -> None:
    assert MODEL.time_s(0, 0, "int64") == 1e-6


@given(amounts, amounts, amounts, amounts)
def test_more_work_takes_longer(flops: float, more_flops: float, num_bytes: float, more_bytes: float) -> None:
    time_s = MODEL.time_s(flops, num_bytes, "float32")
    assert time_s <= MODEL.time_s(flops + more_flops, num_bytes + more_bytes, "float32")


def test_arrays_are_costed_at_once() -> None:
    flops, num_bytes = np.array([0, 1e9, 1e13]), np.array([1e9, 1e6, 1e6])
    times = MODEL.time_s(flops, num_bytes, "float32")
    assert times.tolist() == [MODEL.time_s(f, b, "float32") for f, b in zip(flops, num_bytes, strict=True)]


def test_an_unknown_dtype() -> None:
    with pytest.raises(ClusterError, match=r"^device 'gpu': no peak rate for dtype 'float8'; choose one of"):
        MODEL.time_s(1.0, 1.0, "float8")
